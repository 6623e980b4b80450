"""Printing with ranks: the main rank prints, and the other ranks print only if asked to.

log.say("resumed from step 400")              # main rank
log.say("my shard is short", force=True)      # any rank, with its prefix
log.get_logger(__name__).info("loaded")       # the same for Python's logging
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

from rankwise.dist import comm
from rankwise.errors import WorldError
from rankwise.host.arguments import ANYTHING, FLAG, takes
from rankwise.host.disk import NO_SPACE

_warned: set[str] = set()


@takes(values=ANYTHING, force=FLAG)
def say(*values: object, force: bool = False) -> None:
    """Print on the main rank, like `print(*values)`; with `force` on every rank that calls this, with the prefix `[rank k]` on
    each line. A line for which the disk has no space is lost, and one after the script has closed its output."""
    if getattr(sys.stdout, "closed", False):
        return
    text = " ".join(map(str, values))
    rank, several = _here()
    try:
        if force and several:
            print(_prefixed(text, rank), flush=True)
        elif rank == 0:
            print(text, flush=True)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise


def warn(text: str, force: bool = False) -> None:
    """As `say`, marked as a warning."""
    say(f"warning: {text}", force=force)


def say_per_node(text: object) -> None:
    """As `say`, on the first rank of each node."""
    try:
        first = comm.local_rank() == 0
    except WorldError:
        first = True
    if first:
        say(text, force=_here()[0] > 0)


def warning_once(text: str, force: bool = False) -> None:
    """As `warn`, but each text only once per process."""
    if text not in _warned:
        _warned.add(text)
        warn(text, force)


def get_logger(name: str) -> RankLogger:
    """Python's logger of this name. The main rank logs all records, the other ranks only errors.

    Each call takes `force=True`: then every rank logs the record. Records of other ranks have the prefix `[rank k]`.
    """
    return RankLogger(logging.getLogger(name))


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """See `get_logger`."""

    def log(  # type: ignore[override]
        self, level: int, msg: object, *args: object, force: bool = False, **kwargs: Any
    ) -> None:
        rank, several = _here()
        if rank > 0 and not force and level < logging.ERROR:
            return
        text = _prefixed(str(msg), rank) if several and (force or rank > 0) else msg
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's line, not this one
        super().log(level, text, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs


def _here() -> tuple[int, bool]:
    """(this rank, whether there are other ranks). If this is not known, the line is printed: `init` soon raises the error."""
    try:
        return comm.rank(), comm.world_size() > 1
    except WorldError:
        return 0, False


def _prefixed(text: object, rank: int) -> str:
    return "\n".join(f"[rank {rank}] {line}" for line in str(text).split("\n"))
