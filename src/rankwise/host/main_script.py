"""Runs a script in this process as Python would: as the module `__main__`.

main_script.run("train.py")     # the caller sets sys.argv and sys.path[0]

agent/fork_server.py loads this file by its path, in the script's own interpreter: it imports only the standard library.
"""

import builtins
import importlib.machinery
import io
import os
import sys
import types
from typing import Any

__tracebackhide__ = True  # agent/exception_record.py removes the frames of this file from tracebacks


def run(path: str) -> None:
    """Raises what the script raises. Like Python, `__file__` and tracebacks have the whole path: the script may change its
    folder."""
    path = os.path.abspath(path)
    module: Any = types.ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = builtins
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__cached__ = None
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)
