"""The steps of a rank by itself: what a strategy is made of whose ranks step alone and average now and then.

local = Local().attach(model, optimizer, clip_norm=1.0)      # collective: all begin with rank 0's values
local.step().mine
"""

from __future__ import annotations

import contextlib

from rankwise.dist import comm
from rankwise.sync.all_reduce import AllReduce


class Local(AllReduce):
    """Own mean, own clip, own loss scale; a gradient that is not finite skips this rank's step alone. Sends nothing but in
    `attach` and `follow`."""

    @property
    def _together(self) -> bool:
        return False

    def _follow(self, told: bool) -> None:
        with contextlib.nullcontext() if told else comm.alone():
            super()._follow(told)
