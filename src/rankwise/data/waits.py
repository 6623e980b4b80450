"""Tells the agent how long a loop over a Loader waits for its batches."""

from __future__ import annotations

import time

from rankwise.dist.world import World, row_for_waits
from rankwise.host.wait_cost import WaitCost
from rankwise.ipc.shared_page import Row


class ToldWaits:
    """The waits of one loop. `row`: where the agent reads them.

    began = waits.begin(); step = next(steps); waits.end(batches=2)
    """

    def __init__(self, row: Row) -> None:
        self._row, self._cost = row, WaitCost()
        self._known_ns = 0

    @classmethod
    def of(cls, world: World) -> ToldWaits | None:
        """None if no agent reads them."""
        row = row_for_waits(world)
        return cls(row) if row is not None else None

    def begin(self) -> float:
        """Returns the time, as time.perf_counter does."""
        self._known_ns = self._row.data_wait_ns
        self._cost.begin()
        return time.perf_counter()

    def end(self, batches: int) -> None:
        # A loop over torch's DataLoader inside the wait, or the start of workers, has told the agent of its part.
        told_ns = self._row.data_wait_ns - self._known_ns
        self._row.add_data_wait(max(self._cost.end() - told_ns, 0), batches)
