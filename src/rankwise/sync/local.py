"""The steps of a single rank: a part of strategies whose ranks step alone and average from time to time.

local = Local().attach(model, optimizer, clip_norm=1.0)      # collective: all begin with rank 0's values
local.step().mine
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rankwise.dist import comm
from rankwise.sync.all_reduce import AllReduce
from rankwise.training.digest import digests


class Local(AllReduce):
    """Each rank has its own mean gradient, clipping and loss scale, and skips its own step if its gradient is not finite. Sends
    only in `attach` and `follow`. `exact_first`: behaves like AllReduce until `part` is called."""

    def __init__(self, exact_first: bool = False) -> None:
        super().__init__()
        self.is_exact = exact_first
        self.came: dict[str, str] = {}
        """Digests, by name, of tensors that are new since this rank steps alone: other ranks may have other values."""
        self.moved: dict[str, torch.Tensor] = {}
        """What was trained at any time since `begin_period`, by name, also what is frozen again."""

    @property
    def _together(self) -> bool:
        return self.is_exact and super()._together

    def switch(self, exact: bool) -> None:
        """Local, between two steps: from now on each rank steps alone; or all together, if an earlier checkpoint is loaded."""
        self.is_exact = exact
        self._reduction.release()
        for parameter in self._reduction.parameters:
            parameter.grad = None
        self._waited_s += self._reduction.wait_s
        self._sent_before += self._reduction.sent_bytes
        self._reduction = self._new_reduction()

    def begin_period(self) -> None:
        """The replicas are equal now."""
        self.came.clear()
        self.moved = self.trained_parameters()

    def _follow(self, told: bool) -> None:
        if told or self.is_exact:
            super()._follow(told)
        else:
            self.came |= digests(self._trained.new())
            with comm.alone():
                super()._follow(told)
        self.moved |= self.trained_parameters()

    def own_state_dict(self) -> dict[str, Any]:
        """What differs between ranks that step alone, besides tensors: the loss scale."""
        return {"loss_scale": self._loss_scale.state_dict()} if self._loss_scale is not None else {}

    def load_own_state_dict(self, state: Mapping[str, Any]) -> None:
        """Call this after `load_state_dict`. Older checkpoints have more in it, which is that of all ranks."""
        self._load_loss_scale(state)

    @property
    def sent_bytes(self) -> int:
        """The bytes sent in the exact steps."""
        return self._sent_before + self._reduction.sent_bytes

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of the model and the optimizer, also frozen ones."""
        return self._trained.named()

    def trained_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that require a gradient."""
        return {name: p for name, p in self._trained.named().items() if p.requires_grad}
