"""The protocol of a synchronisation strategy. A new one is one new file; the loop learns nothing of it."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer


class StepResult(NamedTuple):
    """Equal on all ranks."""

    total: float
    """What the step's loss was over, all ranks together (samples, frames, tokens)."""

    grad_norm: float
    """Of the mean gradient, before clipping."""

    finite: bool
    """False: the gradient was not, and the step was left out on all ranks."""


class SyncStrategy(Protocol):
    """A loss sum and its count go in on each rank; the optimizer steps on the gradient of the whole global batch."""

    @property
    def wait_s(self) -> float:
        """Seconds that the loop has spent in communication so far, waiting for other ranks included."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Collective. Make the model equal on all ranks and ready to train; returns what the step function is given."""

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Around the forward and backward pass of one micro-batch; `last` is the step's last on this rank."""

    def backward(self, loss_sum: torch.Tensor, count: float | torch.Tensor) -> None:
        """Add this micro-batch's gradient. `loss_sum`: scalar; `count`: what it is over."""

    def step(self, model: nn.Module, optimizer: Optimizer) -> StepResult:
        """Collective. Reduce, judge, clip, step; gradients are zero afterwards."""

    def describe(self) -> str:
        """How, in a few words, for what is printed at the start; empty if there is nothing to say."""

    def equalise(self, model: nn.Module) -> None:
        """Collective. Make equal what ranks hold apart between steps (buffers), before evaluation and saving."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...
