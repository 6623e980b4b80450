"""What can be known of a script before anything is started.

facts = examine("train.py")        # ConfigError: it is not there, or does not compile
"""

from __future__ import annotations

import ast
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from rankwise.errors import ConfigError


@dataclass(frozen=True)
class ScriptFacts:
    """`keep_cold` says why the ranks of this script cannot be forked from a warm process; None if they can."""

    keep_cold: str | None


def examine(script: str) -> ScriptFacts:
    """Raises ConfigError in one line for a script that cannot run at all."""
    path = Path(script)
    if path.is_dir():
        raise ConfigError(f"{script} is a folder; give the script that trains, for example {script.rstrip('/')}/train.py")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the script {script} cannot be read: {error.strerror} (from {os.getcwd()})") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python says them again when the ranks run it
            tree = ast.parse(source, filename=script)
    except (SyntaxError, ValueError) as error:
        where = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(f"{script}{where}: syntax error: {what}") from None
    line = _environment_write_before_torch(tree)
    return ScriptFacts(keep_cold=f"line {line} sets environment variables before torch is imported" if line else None)


def _environment_write_before_torch(tree: ast.Module) -> int | None:
    """The line of a write to os.environ at module level that comes before the first import of torch: torch reads its
    variables when it is imported, and in a forked rank it has been."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            if any(name.split(".")[0] == "torch" for name in names):
                return None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for part in ast.walk(node):
            if _writes_environment(part):
                return getattr(part, "lineno", node.lineno)
    return None


def _writes_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        return any(isinstance(t, ast.Subscript) and _is_environ(t.value) for t in targets)
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        return function in ("os.putenv", "putenv") or (
            isinstance(node.func, ast.Attribute)
            and _is_environ(node.func.value)
            and node.func.attr in ("update", "setdefault", "pop", "clear", "__setitem__")
        )
    return False


def _is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")
