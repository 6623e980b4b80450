"""Which rank is the cause. The order in which ranks die is misleading, so kinds of evidence are ranked instead.

When a rank dies, its peers fail within milliseconds, and a large process takes longer to exit than a small one. So the first
death seen is often a follower's, a rank that failed because a peer was gone. `judge` is pure: it takes the evidence and returns
one rank.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rankwise.agent import exception_text
from rankwise.host.text import cut, printable

FOLLOWER_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Read error",
    "Timed out waiting",
    "Broken pipe",
    "failed to pass monitoredBarrier",
    "Failed to recv, got 0 bytes",
)
"""Messages of a rank whose peer is gone."""

_PYTHONS_OWN = re.compile(r"\w*Error: \[Errno \d+\] ")
"""An error of a connection made in Python; connections of process groups and of torch's store are made by torch."""

_USUAL: dict[int, str] = {
    signal.SIGKILL: "often the kernel's out-of-memory killer",
    signal.SIGXCPU: "its CPU time limit (ulimit -t)",
    signal.SIGBUS: "often a full /dev/shm, or a mapped file that was truncated",
}


@dataclass(frozen=True)
class Evidence:
    """How one rank ended."""

    rank: int
    exit_code: int | None
    """None if a signal ended it, or if it cannot be killed."""

    signum: int | None
    sent: bool
    """Whether the agent had sent it a signal before it ended."""

    ended: float
    """When, by the agent's clock."""

    exception: str | None = None
    """`Type: message` of the exception that ended it, if one did."""

    where: str | None = None
    traceback: str | None = None
    raised: float | None = None
    """When it raised, by the rank's own clock; more reliable than the order of reaping."""

    step: int | None = None
    remark: str | None = None
    """What else is known about the reason."""

    stuck: str | None = None
    """`state D in WCHAN` if SIGKILL did not end the process; it has no exit code and no signal."""

    lost: str | None = None
    """Why its node can no longer be reached; nothing else is known of such a rank."""

    @property
    def killed_by(self) -> int | None:
        """The signal that ended it. None if it had raised, and was still exiting when the agent's signal came."""
        return None if self.sent and self.exception is not None else self.signum

    @property
    def follows(self) -> bool:
        """Whether this end only shows that a peer is gone."""
        return self._says_so and not _PYTHONS_OWN.match(self.exception or "")

    @property
    def may_follow(self) -> bool:
        """Whether it shows this of a connection that may not be one between ranks: a download, a database."""
        return self._says_so and not self.follows

    @property
    def _says_so(self) -> bool:
        return self.exception is not None and any(sign in self.exception for sign in FOLLOWER_SIGNS)

    @property
    def failed(self) -> bool:
        return self.signum is not None or self.exit_code != 0


def judge(ends: Sequence[Evidence]) -> Evidence | None:
    """The cause among the ranks that have ended, None if none of them failed.

    In this order: a signal that the agent did not send; an exception that is not a follower's; a status other than 0; a lost
    node; a rank that cannot be killed; a rank that exited with 0 while others failed because it was missing; a broken
    connection that may not be to a rank; the earliest follower.
    """
    failed = [e for e in ends if e.failed and (not e.sent or e.stuck)] or [e for e in ends if e.failed]
    if not failed:
        return None
    classes = (
        [e for e in failed if e.signum is not None and not e.sent],
        [e for e in failed if e.exception is not None and not e.follows and not e.may_follow],
        [e for e in failed if e.exception is None and e.exit_code],
        [e for e in failed if e.lost],
        [e for e in failed if e.stuck],
        [e for e in ends if e.exit_code == 0] if any(e.follows or e.may_follow for e in failed) else [],
        [e for e in failed if e.may_follow],
        failed,
    )
    found = next(c for c in classes if c)
    first = min(found, key=lambda e: (e.raised if e.raised is not None else e.ended, e.rank))
    return (_with_the_odd_model(ends) if first.exception is not None else None) or first


def _with_the_odd_model(ends: Sequence[Evidence]) -> Evidence | None:
    """If DDP found models of different size, every rank raises: the cause is the rank whose model differs from most others."""
    counts = exception_text.parameter_counts({e.rank: e.exception for e in ends if e.exception is not None})
    if not counts:
        return None
    usual = Counter(counts.values()).most_common(1)[0][0]
    odd, number = next((rank, number) for rank, number in sorted(counts.items(), reverse=True) if number != usual)
    other = min(rank for rank, number in counts.items() if number == usual)
    end = next((e for e in ends if e.rank == odd), None)
    said = f"RuntimeError: its model differs from that of rank {other}: {number} parameters instead of {usual}"
    return replace(end, exception=said) if end is not None and end.exception is not None else None


def exit_status(end: Evidence) -> int:
    """As a shell reports it; 1 for a rank that exited early with 0, which is a failure too."""
    if end.killed_by is not None:
        return 128 + end.killed_by
    return end.exit_code or 1


def summary(culprit: Evidence, ends: Sequence[Evidence] = ()) -> str:
    """One line: what happened to which rank, where, at which step. `ends`: all ranks, to see whether the same happened to
    all."""
    stuck = unkillable([e for e in ends if e is not culprit or e.exception is not None])
    how = (culprit.exception, None if culprit.exception is not None else culprit.exit_code)
    alike = any(how) and len(ends) > 1 and all((e.exception, e.exit_code if how[1] else None) == how for e in ends)
    return (f"all {len(ends)} ranks" if alike else f"rank {culprit.rank}") + f" {_what(culprit)}{_missed(culprit, ends)}{stuck}"


def _missed(culprit: Evidence, ends: Sequence[Evidence]) -> str:
    """Where the others were when the culprit exited: `while rank 0 waited for it in all_reduce (train.py:88)`."""
    aborted = culprit.signum == signal.SIGABRT  # by gloo, because of what another rank has sent
    if not aborted and (culprit.exit_code is None or culprit.exception is not None):
        return ""
    waiting = next((e for e in ends if e.follows and e.rank != culprit.rank), None)
    if waiting is None:
        return " while other ranks still waited for it" if culprit.exit_code == 0 else ""
    collective = exception_text.collective_of(waiting.traceback or "")
    where = f" ({waiting.where})" if waiting.where else ""
    if aborted:
        return f"; rank {waiting.rank} was in {collective or 'a collective'}{where}"
    return f" while rank {waiting.rank} waited for it{f' in {collective}' if collective else ''}{where}"


def unkillable(ends: Sequence[Evidence]) -> str:
    """The ranks that cannot be killed, each after a `; `; empty if there are none."""
    return "".join(f"; {_cannot_be_killed(e)}" for e in ends if e.stuck)


def _cannot_be_killed(end: Evidence) -> str:
    return f"rank {end.rank} cannot be killed ({end.stuck}): ask the administrator of the host"


def _what(end: Evidence) -> str:
    at = f" at step {end.step}" if end.step else ""
    if end.killed_by is not None:
        usual = _USUAL.get(end.killed_by) if not end.remark else None
        known = "; ".join(text for text in (end.where, usual) if text)
        remark = f": {end.remark}" if end.remark else ""
        return f"was killed by {signal_name(end.killed_by)}{at}{f' ({known})' if known else ''}{remark}"
    if end.exception is not None:
        ours = (end.traceback or "").startswith("error: ")  # of rankwise: the console shows no other text of it
        said = _first_line(end.exception, None if ours else 320)
        # In brackets: a message that ends with a full stop, or with "start", would swallow it.
        place = ", ".join(text for text in (at.strip(), end.where) if text)
        return f"raised {said}{f' ({place})' if place else ''}{f'; {end.remark}' if end.remark else ''}"
    if end.stuck:
        return f"cannot be killed ({end.stuck}){at}: ask the administrator of the host"
    if end.lost:
        return f"was lost with its node: {end.lost}"
    return f"exited with status {end.exit_code}{at}"


def signal_name(signum: int) -> str:
    """`SIGKILL`, or `signal 35` for one without a name (real-time signals)."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _first_line(text: str, width: int | None) -> str:
    lines = [line.strip() for line in printable(text).splitlines() if line.strip()] or [""]
    # The reason of torch's `Error(s) in loading ...:` is on the next line.
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return line if width is None else cut(line, width)
