"""How long a loop over a Loader waits for its batches, for the loop and for the agent."""

from __future__ import annotations

import time

from rankwise.host.wait_cost import WaitCost
from rankwise.ipc.shared_page import Row


class Waits:
    """The waits of one loop. `row`: where the agent reads them.

    waits.begin(); step = next(steps); wait_s += waits.end(batches=2)
    """

    def __init__(self, row: Row | None) -> None:
        self._row, self._cost = row, WaitCost()
        self._known_ns = 0
        self._began = 0.0

    def begin(self) -> None:
        if self._row is not None:
            self._known_ns = self._row.data_wait_ns
            self._cost.begin()
        self._began = time.perf_counter()

    def end(self, batches: int) -> float:
        """In seconds."""
        waited_s = time.perf_counter() - self._began
        if self._row is not None:
            # A loop over torch's DataLoader inside the wait, or the start of workers, has told the agent of its part.
            told_ns = self._row.data_wait_ns - self._known_ns
            self._row.add_data_wait(max(self._cost.end() - told_ns, 0), batches)
        return waited_s
