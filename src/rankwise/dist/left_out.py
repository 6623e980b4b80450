"""Which objects of a script its checkpoints should contain: a save without one of them loses what the user counts on.

belongs_in_checkpoints(sync, "is_apart", "its model is the replica of rank 0")      # from now on
with is_used(loader, "position", "a resumed run would read its data from the start"): ...
[(loader, lost)] = left_out(parts)            # at a save
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any
from weakref import WeakKeyDictionary

_belonging: WeakKeyDictionary[Any, tuple[str, str]] = WeakKeyDictionary()


def belongs_in_checkpoints(part: object, when: str, lost: str) -> None:
    """A checkpoint should contain `part` while its attribute `when` is true. `lost`: what is lost without it."""
    _belonging[part] = when, lost


@contextlib.contextmanager
def is_used(part: object, when: str, lost: str) -> Iterator[None]:
    """The same, but only inside."""
    belongs_in_checkpoints(part, when, lost)
    try:
        yield
    finally:
        _belonging.pop(part, None)


def left_out(parts: Collection[Any]) -> list[tuple[object, str]]:
    """(an object that should be among these parts, or an attribute of one of them, but is not; what is lost). If there is
    another object of its class, it is for something else (an evaluation)."""
    held = [*parts, *(value for part in parts for value in getattr(part, "__dict__", {}).values())]
    kinds = set(map(type, held))
    return [(one, lost) for one, (when, lost) in _belonging.items() if type(one) not in kinds and getattr(one, when)]
