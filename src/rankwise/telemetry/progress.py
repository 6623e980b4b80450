"""The progress line: given to the agent, which owns the terminal; drawn here where there is no agent."""

from __future__ import annotations

import json
import sys
import time

from rankwise import log
from rankwise.page import Row
from rankwise.terminal import Terminal, progress_line

_INTERVAL_S = 0.1
_TEXT = 120  # characters: no terminal has room for more beside the bar, nor has the page


class Progress:
    """Of one loop; `row` is this rank's in its agent's page."""

    def __init__(self, row: Row | None) -> None:
        self._row = row
        self._terminal = None if row is not None else Terminal(sys.stderr)
        self.begin(None, 0)

    def begin(self, total: int | None, initial: int) -> None:
        """The loop starts now. `total`: steps in all, None if unknown; `initial`: steps done in earlier lives."""
        self._total = total
        self._initial = initial
        self._began = time.monotonic()
        self._next = self._began

    def show(self, done: int, label: str, text: str) -> None:
        """Ten times a second at most; costs a look at the clock in between."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _INTERVAL_S
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
