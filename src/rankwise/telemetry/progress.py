"""The progress of a loop: the progress line of a terminal, and the text for lines of the log.

The agent, which owns the terminal, draws the progress line. Without an agent it is drawn here.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

from rankwise.dist import log
from rankwise.host.terminal import Terminal, progress_line
from rankwise.host.text import clock, rate, stamp
from rankwise.ipc.shared_page import Row

_INTERVAL_S = 0.1
_TEXT = 120  # characters: neither a terminal nor the page has room for more
_TOLD, _TOLD_EVERY_S = 10, 1.0
"""Of epochs, and of evaluations within them, this many are printed, and then at most one per interval."""


@dataclass
class _Printed:
    """What was printed of epochs, or of evaluations."""

    times: int = 0
    at_s: float = 0.0
    asked: int = -1
    """The step that was asked for last, and the answer."""

    answer: bool = False
    said_short: bool = False


class Progress:
    """For one loop. `row`: the row of this rank in the agent's page."""

    def __init__(self, row: Row | None) -> None:
        self._row = row
        self._terminal = None if row is not None else Terminal(sys.stderr)
        self.begin(None, 0)

    def begin(self, total: int | None, initial: int) -> None:
        """The loop starts now. `total`: all steps, None if unknown; `initial`: steps done in earlier attempts."""
        self._total = total
        self._initial = initial
        self._began = time.monotonic()
        self.next_s = self._began
        """When `show` will show something again, by `time.monotonic`."""
        self._pace_since = self._began, initial
        self._told: dict[str, _Printed] = {}

    def explain(self) -> None:
        """This loop reports itself why it is slow: the agent need not."""
        if self._row is not None:
            self._row.explain()

    def place(self, done: int) -> str:
        """`step 110/800`; `step 110` if the total is unknown."""
        return f"step {done}" if self._total is None else f"step {done}/{self._total}"

    def pace(self, done: int) -> str:
        """`7.61 steps/s, 0:01:31 left, 2026-11-22 14:02:11`.

        The rate is measured since the last call, so a log shows when a run becomes slower. The time left is computed from all
        steps since `begin`, so one evaluation or save hardly changes it.
        """
        now = time.monotonic()
        since, before = self._pace_since
        self._pace_since = now, done
        parts = [rate(done - before, now - since)] if done > before else []
        if self._total is not None and self._initial < done < self._total:
            left_s = (self._total - done) * (now - self._began) / (done - self._initial)
            parts.append(f"{clock(left_s)} left")
        return ", ".join([*parts, stamp(time.time())])

    def show(self, done: int, label: str, text: str) -> None:
        """Show the progress, at most ten times per second."""
        now = time.monotonic()
        if now < self.next_s:
            return
        self.next_s = now + _INTERVAL_S
        progress = {
            "done": done,
            "total": self._total,
            "initial": self._initial,
            "elapsed_s": now - self._began,
            "label": label[:_TEXT],
            "text": text[:_TEXT],
        }
        if self._row is not None:
            self._row.say(json.dumps(progress))
        elif self._terminal is not None and self._terminal.is_tty:
            self._terminal.status(progress_line(progress, self._terminal.columns))

    def tells(self, kind: str, step: int) -> bool:
        """Whether to print what ends with this step. `kind`: "epoch", also for an evaluation at its end, or "evaluation". Short
        ones would fill the screen."""
        told = self._told.setdefault(kind, _Printed())
        if step != told.asked:
            now = time.monotonic()
            told.asked, told.answer = step, told.times < _TOLD or now - told.at_s >= _TOLD_EVERY_S
            if told.answer:
                told.times, told.at_s = told.times + 1, now
            elif not told.said_short:
                told.said_short = True
                self.say(f"{kind}s are short: from here on one per second is printed; metrics.jsonl has all")
        return told.answer

    def say(self, text: str) -> None:
        """Print a line above the progress line, on the main rank."""
        if self._terminal is not None:
            self._terminal.status("")
        log.say(text)

    def close(self) -> None:
        if self._row is not None:
            self._row.say("")
        elif self._terminal is not None:
            self._terminal.status("")
