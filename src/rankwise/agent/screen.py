"""What the head prints, and what it keeps until it judges: the sink of its own node and of the others.

One thread writes to the terminal (outlet.py), so that no reader makes the agent wait.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence

from rankwise.agent.collective_check import Ledger
from rankwise.agent.event_loop import EventLoop
from rankwise.agent.outlet import Outlet
from rankwise.agent.stall import Observation
from rankwise.host.terminal import Terminal, message

_BUSY_BYTES = 1 << 20  # more output of this node's ranks waits in their logs
_MOST_WAITING_BYTES = 256 << 20  # of output, also from other nodes, and the rest of the logs at the end


class Screen:
    """The sink of the head: what a node reports goes to the terminal, or is kept until the head judges it."""

    def __init__(self, plain: bool) -> None:
        """`plain`: no status line, even on a terminal."""
        self._outlet = Outlet()
        self._terminal = Terminal(sys.stdout, plain, self._outlet.put)
        self._dropped_bytes = 0
        self._lost_reported = False
        self.ledger: Ledger | None = None
        self.standing: dict[int, tuple[float, float, Sequence[Observation], str]] = {}
        """By node that reports a stall: when it reported (monotonic), for how many seconds, where its ranks are, their
        stacks."""

    def say(self, text: str) -> None:
        self.show(message(text))

    def show(self, text: str) -> None:
        """Print `text` unchanged, for a person to read."""
        self._terminal.status("")  # the progress line returns with the next numbers
        with contextlib.suppress(OSError):
            line = text.rstrip("\n") + "\n"
            self._outlet.put(sys.stderr.fileno(), line.encode(sys.stderr.encoding, "backslashreplace"))

    @property
    def busy(self) -> bool:
        return self._outlet.waiting_bytes > _BUSY_BYTES

    def write(self, data: bytes) -> None:
        """Never waits: if the reader is far behind, the output of ranks is dropped here, and is in their logs."""
        if not data:  # the ranks have printed nothing, and may not be started yet
            return
        if self._outlet.waiting_bytes + len(data) > _MOST_WAITING_BYTES:
            self._dropped_bytes += len(data)
            return
        self._outlet.start()
        self._report_dropped()
        self._terminal.write(data)
        self._report_lost()

    def _report_lost(self) -> None:
        self._terminal.look()
        if self._terminal.lost is not None and not self._lost_reported:
            self._lost_reported = True
            self.say(f"the output of the ranks can no longer be shown here ({self._terminal.lost}); it is in their logs")

    def _report_dropped(self) -> None:
        if self._dropped_bytes:
            dropped_mb, self._dropped_bytes = self._dropped_bytes / 1e6, 0
            self.say(f"{dropped_mb:.1f} MB of the ranks' output, which nobody read in time, are only in their logs")

    def close(self, events: EventLoop) -> None:
        """Wait until everything is printed, or until this agent is asked to stop."""
        self._report_dropped()
        before = len(events.asked)

        def is_asked() -> bool:
            events.wait(0)
            return events.parent_ended or len(events.asked) > before

        self._outlet.drain(is_asked)
        self._report_lost()
        self._outlet.drain(is_asked)

    def progress(self, text: str) -> None:
        if text:
            self._outlet.start()
        if not text or not self.busy:  # the line is always removed
            self._terminal.progress(text)

    def end_line(self) -> None:
        self._terminal.end_line()

    def notes(self, notes: Sequence[tuple[int, str]]) -> None:
        if self.ledger is not None:
            self.ledger.add(notes)

    def stalled(self, index: int, since_s: float, observed: Sequence[Observation], stacks: str) -> None:
        self.standing[index] = (time.monotonic(), since_s, observed, stacks)
