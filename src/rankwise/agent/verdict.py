"""Which rank is the cause. The order of deaths lies: evidence is ranked.

A rank that dies takes its peers with it within milliseconds, and a large process takes longer to go than a small one, so the
first death seen is often a follower's. `judge` is pure: it reads what was collected and names one.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

FOLLOWER_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Read error",
    "Timed out waiting",
    "Broken pipe",
    "failed to pass monitoredBarrier",
    "Failed to recv, got 0 bytes",
)
"""What a rank says whose peer is gone."""


_USUAL: dict[int, str] = {
    signal.SIGKILL: "often the kernel's out-of-memory killer",
    signal.SIGXCPU: "its CPU time limit (ulimit -t)",
    signal.SIGBUS: "often a full /dev/shm, or a mapped file that was cut",
}


@dataclass(frozen=True)
class Evidence:
    """One rank's end."""

    rank: int
    exit_code: int | None
    """None if a signal ended it."""

    signum: int | None
    sent: bool
    """Whether the agent had sent it a signal before it ended."""

    ended: float
    """The agent's clock."""

    exception: str | None = None
    """`Type: message` of the exception that ended it, if one did."""

    where: str | None = None
    traceback: str | None = None
    raised: float | None = None
    """The rank's own clock when it raised; better than the order of reaping."""

    step: int | None = None
    remark: str | None = None
    """What else is known of the reason."""

    @property
    def follows(self) -> bool:
        """Whether this end only says that a peer is gone."""
        return self.exception is not None and any(sign in self.exception for sign in FOLLOWER_SIGNS)


def judge(ends: Sequence[Evidence]) -> Evidence | None:
    """The cause among the ranks that have ended, None if none of them failed.

    First a signal that was not ours, then an exception that is not a follower's, then a status other than 0, then a rank
    that left with 0 while others failed for want of it, then the earliest follower.
    """
    failed = [e for e in ends if not e.sent and (e.signum is not None or e.exit_code != 0)]
    if not failed:
        failed = [e for e in ends if e.signum is not None or e.exit_code != 0]
    if not failed:
        return None
    classes = (
        [e for e in failed if e.signum is not None and not e.sent],
        [e for e in failed if e.exception is not None and not e.follows],
        [e for e in failed if e.exception is None and e.exit_code],
        [e for e in ends if e.exit_code == 0] if any(e.follows for e in failed) else [],
        failed,
    )
    found = next(c for c in classes if c)
    return min(found, key=lambda e: (e.raised if e.raised is not None else e.ended, e.rank))


def exit_status(end: Evidence) -> int:
    """As a shell reports it; a rank that left early with 0 is a failure all the same."""
    if end.signum is not None:
        return 128 + end.signum
    return end.exit_code or 1


def summary(end: Evidence) -> str:
    """One line: what happened to which rank, where, at which step."""
    at = f" at step {end.step}" if end.step else ""
    where = f" ({end.where})" if end.where else ""
    if end.signum is not None:
        hint = end.remark or _USUAL.get(end.signum)
        return f"rank {end.rank} was killed by {signal_name(end.signum)}{at}{f': {hint}' if hint else ''}"
    if end.exception is not None:
        return f"rank {end.rank} raised {_first_line(end.exception)}{at}{where}"
    if end.exit_code == 0:
        return f"rank {end.rank} left with status 0{at} while the other ranks still expected it"
    return f"rank {end.rank} left with status {end.exit_code}{at}"


def signal_name(signum: int) -> str:
    """`SIGKILL`, or `signal 35` for one without a name (real-time signals)."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _first_line(text: str, width: int = 160) -> str:
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= width else line[: width - 3] + "..."
