"""The protocol of a way to add up gradients over ranks, and the tail that rides in its message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Tail(Protocol):
    """What a step was over, and which parameters got a gradient."""

    def write(self, count: float | torch.Tensor, touched: Sequence[bool] | None) -> None:
        """This rank's part. `touched`: which parameters got a gradient; None for all."""

    def read(self) -> tuple[float, float]:
        """(ranks that have a gradient for each parameter, the count of all ranks). Waits for the device."""

    def without_gradient(self) -> list[int]:
        """Parameters that got a gradient on no rank. Waits for the device: ask only if no rank has all of them."""


class LocalTail:
    """The Tail of a rank that is alone."""

    def write(self, count: float | torch.Tensor, touched: Sequence[bool] | None) -> None:
        self._count = count
        self._touched = touched

    def read(self) -> tuple[float, float]:
        return float(self._touched is None), float(self._count)

    def without_gradient(self) -> list[int]:
        return [index for index, touched in enumerate(self._touched or ()) if not touched]


class RidingTail:
    """What rides at the end of a gradient message: `[gradients for parameter 0, 1, ..., ranks that have all of them, count]`.

    With it no message of its own says what a step was over, and a parameter that got no gradient on any rank is known.
    """

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view
        self._written: tuple[float, float] | None = None
        self._ends = view[-2:]
        self._source = torch.zeros_like(self._ends)

    def write(self, count: float | torch.Tensor, touched: Sequence[bool] | None) -> None:
        """Into a view that is zero."""
        everything = 1.0 if touched is None else 0.0
        if isinstance(count, torch.Tensor):
            self._written = None
            self._source[0] = everything
            self._source[1] = count
        elif self._written != (everything, count):
            self._written = (everything, count)
            self._source = torch.tensor(self._written, dtype=self._ends.dtype, device=self._ends.device)
        self._ends.copy_(self._source)
        if touched is not None:
            self._view[:-2] = torch.tensor(touched, dtype=self._view.dtype)

    def read(self) -> tuple[float, float]:
        complete, count = self._ends.tolist()
        return complete, count

    def without_gradient(self) -> list[int]:
        return torch.nonzero(self._view[:-2] == 0).flatten().tolist()


class Reduction(Protocol):
    """One way. Between `release` and the next backward pass no gradient is left of the step before."""

    parameters: list[torch.nn.Parameter]
    """Those that require a gradient, each once; `Tail` counts in this order."""

    wait_s: float
    """Seconds that `reduce` has taken so far."""

    def expect(self) -> None:
        """The backward pass of this rank's last micro-batch of the step comes next."""

    def backward(self, loss_sum: torch.Tensor, seed: torch.Tensor, count: float | torch.Tensor) -> None:
        """Add this micro-batch's gradient, times `seed`, and its count."""

    def reduce(self) -> Tail:
        """Collective. Sum gradients and counts over ranks; parameters hold the sums as their gradients."""

    def gradients(self) -> list[torch.Tensor]:
        """After `reduce`: all sums, in as few tensors as they lie in."""

    def release(self) -> None:
        """After the optimizer's step."""

    def describe(self) -> str:
        """In a few words, for people."""
