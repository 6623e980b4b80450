"""The user's own source of a program: its script, and the modules that it imports from the folders of `sys.path`.

any("Trainer" in text for text in texts(["train.py"], sys.path))

stop/early.py imports this file during `import rankwise`, in a rank: only the standard library here.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Iterator

_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+)?import[ \t]+(?:\(([^)]*)\)|([^\n#;]*))", re.MULTILINE)
_MOST_FILES = 200
_MOST_BYTES = 1_000_000


def texts(files: Iterable[str], folders: Iterable[str]) -> Iterator[str]:
    """The texts of these files, and of the modules that they import, at any depth, from `folders` (as in sys.path). Skips
    folders of Python itself and of installed packages. Reads up to 200 files."""
    found = _Modules(folders)
    todo = list(dict.fromkeys(files))
    seen = set(todo)
    for file in todo:  # the list grows in this loop
        text = _text(file)
        yield text
        new = [other for other in found.imported_by(file, text) if other not in seen]
        seen.update(new)
        todo += new[: _MOST_FILES - len(todo)]


def _text(file: str) -> str:
    """Empty if the file cannot be read. A notebook's cell exists only in linecache."""
    try:
        with open(file, encoding="utf-8", errors="replace") as source:
            return source.read(_MOST_BYTES)
    except OSError:
        return "".join(linecache.getlines(file))


class _Modules:
    """Finds the files of modules by their names."""

    def __init__(self, folders: Iterable[str]) -> None:
        python = os.path.dirname(os.__file__)
        self._names = {
            folder: _listed(folder)
            for folder in dict.fromkeys(map(os.path.abspath, folders))
            if not folder.startswith(python) and os.path.basename(folder) not in ("site-packages", "dist-packages")
        }

    def imported_by(self, file: str, text: str) -> Iterator[str]:
        for found in _IMPORT.finditer(text):
            of, in_brackets, plain = found.groups()
            names = [part.split()[0] for part in (in_brackets or plain or "").split(",") if part.split()]
            modules = names if of is None else [of, *(f"{of}{'' if of.endswith('.') else '.'}{name}" for name in names)]
            for module in modules:
                yield from self._files(module, os.path.dirname(file))

    def _files(self, module: str, folder: str) -> Iterator[str]:
        """The files of the module and of its parent packages."""
        name = module.lstrip(".")
        dots = len(module) - len(name)
        parts = name.split(".") if name else []
        if parts and parts[0] == "rankwise":
            return
        if dots:
            roots = [os.path.normpath(os.path.join(folder, *[os.pardir] * (dots - 1)))]
        else:
            roots = [root for root, names in self._names.items() if parts[0] in names or f"{parts[0]}.py" in names]
        for root in roots:
            for depth in range(1, len(parts) + 1):
                place = os.path.join(root, *parts[:depth])
                yield from filter(os.path.isfile, (f"{place}.py", os.path.join(place, "__init__.py")))


def _listed(folder: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()
