"""Lines that know their rank: the main rank speaks, the others are heard in their own log files.

log.say("resumed from step 400")              # main rank
log.say("my shard is short", force=True)      # any rank, with its prefix
"""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from rankwise import comm
from rankwise.errors import RankwiseError


def say(text: str, force: bool = False) -> None:
    """Print on the main rank; with `force` on every rank that calls, each line prefixed with `[rank k]`."""
    if force and comm.world_size() > 1:
        print("\n".join(f"[rank {comm.rank()}] {line}" for line in text.split("\n")), flush=True)
    elif comm.rank() == 0:
        print(text, flush=True)


def warn(text: str, force: bool = False) -> None:
    """As `say`, marked as a warning."""
    say(f"warning: {text}", force)


def errors_without_traceback() -> None:
    """From now on an uncaught error of ours ends this process with its message and the user's line alone."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if not isinstance(error, RankwiseError):
            before(kind, error, tb)
            return
        main = getattr(sys.modules["__main__"], "__file__", None)
        lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(tb) if frame.filename == main]
        print(f"error: {error}" + (f"\n  at {lines[-1]}" if lines else ""), file=sys.stderr)

    if getattr(before, "_of_rankwise", False):
        return
    hook._of_rankwise = True  # type: ignore[attr-defined]
    sys.excepthook = hook
