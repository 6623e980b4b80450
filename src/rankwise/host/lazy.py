"""The names of a package, each imported at its first use: importing the package costs almost nothing, and no torch.

__getattr__ = lazy(__name__, {"Log": "rankwise.actions.log"})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`. `home`: the module of each name."""

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home[name]), name)

    return find
