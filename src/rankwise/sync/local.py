"""The steps of a rank alone: a part of strategies whose ranks step alone and average now and then.

local = Local().attach(model, optimizer, clip_norm=1.0)      # collective: all begin with rank 0's values
local.step().mine
"""

from __future__ import annotations

import torch
from torch import nn

from rankwise.dist import comm
from rankwise.sync.all_reduce import AllReduce
from rankwise.training.digest import digests


class Local(AllReduce):
    """Own mean, own clip, own loss scale; a gradient that is not finite skips only this rank's step. Sends only in `attach` and
    `follow`. `exact_first`: until `part` it is an AllReduce."""

    def __init__(self, exact_first: bool = False) -> None:
        super().__init__()
        self.is_exact = exact_first
        self.came: dict[str, str] = {}
        """Digests of tensors that are new since this rank steps alone, by name: other ranks may have others."""

    @property
    def _together(self) -> bool:
        return self.is_exact and super()._together

    def part(self) -> None:
        """Local, between two steps: from now on each rank steps alone."""
        self.is_exact = False
        self._reduction.release()
        for parameter in self._reduction.parameters:
            parameter.grad = None
        self._waited_s += self._reduction.wait_s
        self._sent_before += self._reduction.sent_bytes
        self._reduction = self._new_reduction()

    def _follow(self, told: bool) -> None:
        if told or self.is_exact:
            super()._follow(told)
            return
        self.came |= digests(self._trained.new())
        with comm.alone():
            super()._follow(told)

    @property
    def sent_bytes(self) -> int:
        """In its exact steps."""
        return self._sent_before + self._reduction.sent_bytes

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All of the model and the optimizer, frozen ones too."""
        return self._trained.named()

    def trained_parameters(self) -> dict[str, torch.Tensor]:
        """Those that require a gradient."""
        return {name: p for name, p in self._trained.named().items() if p.requires_grad}
