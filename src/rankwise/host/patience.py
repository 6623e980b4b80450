"""A wait that reports at intervals what it waits for, and finally gives up.

patience = Patience(give_up_s=300, say_after_s=10, say_every_s=10)
while not here():
    if patience.is_over: raise ...
    if patience.due(): say(f"has waited {patience.waited_s:.0f} s")
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Patience:
    """The wait begins when this object is made. `clock`: a monotonic clock, in seconds."""

    def __init__(
        self, give_up_s: float, say_after_s: float, say_every_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`say_every_s`: the interval after the first report; by default there is only one."""
        self._give_up_s = give_up_s
        self._next_s = say_after_s
        self._every_s = say_every_s
        self._clock = clock
        self._began = clock()

    @property
    def waited_s(self) -> float:
        return self._clock() - self._began

    @property
    def is_over(self) -> bool:
        return self.waited_s > self._give_up_s

    def due(self) -> bool:
        """Whether it is time to report; True once per interval."""
        if (now_s := self.waited_s) <= self._next_s:
            return False
        self._next_s = now_s + self._every_s
        return True
