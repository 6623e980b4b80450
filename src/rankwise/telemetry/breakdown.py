"""Where the time of a run goes: each part measures its own waits; the rest is computing.

breakdown = TimeBreakdown({"data wait": lambda: loader.wait_s, "all-reduce": lambda: sync.wait_s})
span = breakdown.since_last();  print(span.text())
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rankwise.host.text import clock


@dataclass(frozen=True)
class Span:
    """Seconds of wall-clock time, and of its parts; they add up."""

    elapsed_s: float
    parts_s: Mapping[str, float]

    @property
    def computing_s(self) -> float:
        return max(self.elapsed_s - sum(self.parts_s.values()), 0.0)

    def text(self) -> str:
        """`0:28:58 elapsed (97.1% computing, 0.4% data wait, 2.5% all-reduce)`; parts with almost no time are skipped."""
        whole = self.elapsed_s or 1.0
        shares = [f"{100 * self.computing_s / whole:.1f}% computing"]
        shares += [f"{100 * s / whole:.1f}% {name}" for name, s in self.parts_s.items() if s / whole >= 0.0005]
        return f"{clock(self.elapsed_s)} elapsed ({', '.join(shares)})"


class TimeBreakdown:
    """`sources`: for each part, a function that returns its seconds so far."""

    def __init__(self, sources: Mapping[str, Callable[[], float]]) -> None:
        self.sources = sources
        self.restart()

    def restart(self) -> None:
        """Start again from now."""
        self._last = self._first = self._now()

    def _now(self) -> tuple[float, dict[str, float]]:
        return time.perf_counter(), {name: source() for name, source in self.sources.items()}

    def since_last(self) -> Span:
        """The time since the last call."""
        before, self._last = self._last, self._now()
        return _between(before, self._last)

    def since_start(self) -> Span:
        return _between(self._first, self._now())


def _between(a: tuple[float, dict[str, float]], b: tuple[float, dict[str, float]]) -> Span:
    return Span(b[0] - a[0], {name: b[1][name] - a[1][name] for name in b[1]})
