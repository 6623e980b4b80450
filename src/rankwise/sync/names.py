"""Strategies by short names, for a script's own command line: Trainer(..., sync=args.sync).

strategy = named("local-sgd:16")
"""

from __future__ import annotations

from collections.abc import Callable

from rankwise.errors import ConfigError
from rankwise.host.arguments import Argument
from rankwise.sync.all_reduce import AllReduce
from rankwise.sync.diloco import DiLoCo
from rankwise.sync.local_sgd import LocalSGD
from rankwise.sync.strategy import SyncStrategy


def _steps(text: str) -> int | None:
    """What stands after the colon; None for nothing. Raises ValueError."""
    return int(text) if text else None


_KINDS: dict[str, Callable[[str], SyncStrategy]] = {
    "all-reduce": lambda rest: AllReduce(compress=rest or None),
    "local-sgd": lambda rest: LocalSGD(_steps(rest)),
    "diloco": lambda rest: DiLoCo(_steps(rest)),
}


def named(name: str) -> SyncStrategy:
    """`all-reduce`, or with how it is compressed: `all-reduce:bf16`; `local-sgd:16` and `diloco:32` with the steps between two
    averages. Raises ConfigError for another."""
    kind, _, rest = name.partition(":")
    try:
        return _KINDS[kind](rest)
    except (KeyError, ValueError, ConfigError):
        raise ConfigError(f"sync={name!r}: give {NAME.words}") from None


def _is_name(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(named(value))
    except ConfigError:
        return False


NAME = Argument(_is_name, "the name of a strategy: all-reduce, all-reduce:bf16, local-sgd:16, diloco:32")
