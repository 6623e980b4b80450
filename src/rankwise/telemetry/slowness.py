"""Why a training is slow: which ranks the others wait for, which part of the time is large, and whether steps take longer.

watch = SlowWatch(hosts=["node1", "node1", "node2", "node2"])
line = watch.add(spent_by_rank, steps, time.monotonic())     # at each log interval, on the main rank; None: nothing to print

This module only compares numbers, which the Log sends with its metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankwise.host.text import listed, numbered, rounded
from rankwise.telemetry.breakdown import Span

PARTS = ("data wait", "all-reduce", "slower ranks", "saving", "actions", "evaluation")
"""What is measured of each rank. The wait for others is in `all-reduce` or, once it is known, in `slower ranks`."""

Found = tuple[str, str]
"""A reason, for `Reports`, and the text for the user."""

_WINDOW_S = 10.0
_WAITED = 0.2
"""If the other ranks wait this share of the time for some, these are reported."""

MOSTLY = 0.3
"""A part that takes this share of the time on all ranks is reported."""

_LONGER = 2.0
_LEAST_GAP_S = 60.0
_SAME_GAP_S = 600.0
_MOST_RANKS = 8
_WHAT_HELPS = {
    "data wait": (
        "raise num_workers of the Loader, set persistent_workers=True if epochs are short, or make the samples cheaper to read"
    ),
    "saving": "save less often, Checkpoints(every_s=...), or on a faster disk",
    "actions": "call them less often, rankwise.every(action, steps=100)",
}


@dataclass(frozen=True)
class Spent(Span):
    """The seconds of one rank over some steps."""

    processor_s: float
    """The processor time of all its threads."""

    def __add__(self, other: Spent) -> Spent:
        parts = {name: s + other.parts_s.get(name, 0.0) for name, s in self.parts_s.items()}
        return Spent(self.elapsed_s + other.elapsed_s, parts, self.processor_s + other.processor_s)

    @property
    def waited_s(self) -> float:
        """For the other ranks, and for the network."""
        return self.parts_s.get("all-reduce", 0.0) + self.parts_s.get("slower ranks", 0.0)

    def seconds(self, part: str) -> float:
        return self.computing_s if part == "computing" else self.parts_s.get(part, 0.0)


class Reports:
    """What may be printed now: at most one line per minute, and the same less and less often."""

    def __init__(self) -> None:
        self._next = 0.0
        self._told: dict[str, tuple[float, float]] = {}
        """By what was reported: when it may be reported again, and how long to wait after that."""

    def line(self, found: Found | None, now: float) -> str | None:
        if found is None or now < self._next:
            return None
        what, text = found
        again, gap = self._told.get(what, (0.0, _SAME_GAP_S))
        if now < again:
            return None
        self._told[what], self._next = (now + gap, 2 * gap), now + _LEAST_GAP_S
        return f"slow: {text}"


class SlowWatch:
    """`hosts`: that of each rank; empty if they are not known, or if there is only one."""

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self._hosts = hosts
        self._began = False
        self._ranks: list[Spent] = []
        self._steps = 0
        self._least_s = 0.0
        """The shortest time in which a step was computed so far, as the mean of a window and of all ranks."""

        self._reports = Reports()

    def add(self, ranks: Sequence[Spent], steps: int, now: float) -> str | None:
        """What to print, at most one line per minute. The first interval is ignored, because a training starts slowly."""
        if not self._began:
            self._began = True
            return None
        self._ranks = [a + b for a, b in zip(self._ranks, ranks, strict=True)] if self._ranks else list(ranks)
        self._steps += steps
        if self._ranks[0].elapsed_s < _WINDOW_S:
            return None
        found = waited_for(self._ranks, self._hosts) or late_data(self._ranks, self._hosts) or large_part(self._ranks)
        found = found or self._longer()
        self._ranks, self._steps = [], 0
        return self._reports.line(found, now)

    def _longer(self) -> Found | None:
        """Whether a step computes much longer than it did."""
        step_s = sum(rank.computing_s for rank in self._ranks) / len(self._ranks) / self._steps
        before, self._least_s = self._least_s, min(step_s, self._least_s or step_s)
        if not before or step_s < _LONGER * before:
            return None
        return "longer", (
            f"computing a step takes {rounded(step_s)} s, {rounded(step_s / before, 2)} times as long as before: something "
            "grows (a list, losses added up without .detach()), or another program uses the same processors"
        )


def waited_for(ranks: Sequence[Spent], hosts: Sequence[str] = ()) -> Found | None:
    """The ranks that the others wait for, and why they are slower; None if there are none. A rank that is always late waits
    least for the others."""
    waits = [rank.waited_s for rank in ranks]
    least, most = min(waits), max(waits)
    slow = [rank for rank, wait in enumerate(waits) if wait - least <= 0.25 * (most - least)]
    others = [rank for rank in range(len(ranks)) if rank not in slow]
    if not others:
        return None
    elapsed_s = sum(rank.elapsed_s for rank in ranks) / len(ranks)
    waited = sum(waits[rank] - least for rank in others) / len(others) / elapsed_s
    if waited < _WAITED:
        return None
    who = named(slow, hosts)
    are, them = ("is", "it") if len(slow) == 1 else ("are", "them")
    part, why = _why([ranks[rank] for rank in slow], [ranks[rank] for rank in others], "it" if len(slow) == 1 else "they")
    text = f"{who} {are} slower than the others, which wait {_percent(waited)} of the time for {them}; {why}"
    return f"{slow} {part}", text


def late_data(ranks: Sequence[Spent], hosts: Sequence[str] = ()) -> Found | None:
    """The same where nothing is known of the wait for other ranks, because GPUs wait and the script does not: the ranks whose
    data is late."""
    shares = [_mean([rank], "data wait") for rank in ranks]
    least, most = min(shares), max(shares)
    slow = [rank for rank, share in enumerate(shares) if most - share <= 0.25 * (most - least)]
    if most - least < _WAITED or len(slow) == len(ranks):
        return None
    they = "it" if len(slow) == 1 else "they"
    why = _late([ranks[rank] for rank in slow], [ranks[rank] for rank in range(len(ranks)) if rank not in slow], they)
    return f"{slow} late data", f"all ranks wait for {named(slow, hosts)}; {why}"


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`ranks 2, 3 (on node2)`. `hosts`: that of each rank of the run; empty if they need not be named."""
    on = listed(dict.fromkeys(hosts[rank] for rank in ranks), 3, last=" and ") if hosts else ""
    return f"{numbered('rank', ranks, _MOST_RANKS, ranges=True)}{f' (on {on})' if on else ''}"


def _late(slow: Sequence[Spent], others: Sequence[Spent], they: str) -> str:
    a, b = _mean(slow, "data wait"), _mean(others, "data wait")
    their, s = ("its", "s") if they == "it" else ("their", "")
    means = f"{their} disk or loader workers are slower, or {their} samples larger"
    return f"{they} wait{s} {_percent(a)} of the time for data, the others {_percent(b)}: {means}"


def _why(slow: Sequence[Spent], others: Sequence[Spent], they: str) -> tuple[str, str]:
    """The part of the time that is longest in comparison with the others, and what that means."""
    parts = ("computing", "data wait", "saving", "actions", "evaluation")
    part = max(parts, key=lambda name: _mean(slow, name) - _mean(others, name))
    a, b = _mean(slow, part), _mean(others, part)
    s = "s" if they == "it" else ""
    if part == "data wait":
        return part, _late(slow, others, they)
    if part != "computing":
        return part, f"{they} spend{s} {_percent(a)} of the time on {part}, the others {_percent(b)}: all ranks wait for this"
    used, usual = _processor(slow), _processor(others)
    if used < 0.7 * usual:
        return part, (
            f"while {they} compute{s}, {they} ha{'s' if s else 've'} a processor for {_percent(used)} of the time, the others "
            f"for {_percent(usual)}: another program, a CPU limit or swapping slows {'it' if s else 'them'}, or the script "
            "waits for something there"
        )
    return part, (
        f"{they} compute{s} {rounded(a / max(b, 1e-9), 2)} times as long: larger batches, a slower device, or work that the "
        "others do not have"
    )


def _mean(ranks: Sequence[Spent], part: str) -> float:
    """The share of a part in the time of these ranks."""
    return sum(rank.seconds(part) for rank in ranks) / sum(rank.elapsed_s for rank in ranks)


def _processor(ranks: Sequence[Spent]) -> float:
    """Processor time per second of computing."""
    return sum(rank.processor_s for rank in ranks) / max(sum(rank.computing_s for rank in ranks), 1e-9)


def large_part(ranks: Sequence[Spent]) -> Found | None:
    """A part that takes much of the time of all ranks, and what helps."""
    part = max(_WHAT_HELPS, key=lambda name: _mean(ranks, name))
    share = _mean(ranks, part)
    return (part, f"{_percent(share)} of the time is {part}: {_WHAT_HELPS[part]}") if share >= MOSTLY else None


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
