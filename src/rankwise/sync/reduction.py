"""The protocol of a way to add gradients over ranks, and the tail of its message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

Count = float | torch.Tensor

_BITS = 12  # of a limb: its sum over 4096 ranks is exact in float32
_LIMBS = 5
_UNITS = [2.0 ** (_BITS * k) for k in range(_LIMBS)]


class Sums(NamedTuple):
    """The numbers after the gradients, summed over ranks."""

    total: float
    """Of the counts."""

    complete: float
    """Ranks that have a gradient for each parameter."""

    changed: float
    """The number of ranks that now train another set of parameters: this message has the old set."""


class Tail(Protocol):
    """The count of a step, and which parameters got a gradient."""

    def write(self, count: Count, touched: Sequence[bool] | None, changed: bool) -> None:
        """This rank's part. `touched`: which parameters got a gradient; None for all."""

    def read(self) -> Sums:
        """Waits for the device."""

    def without_gradient(self) -> list[int]:
        """Parameters that got a gradient on no rank. Waits for the device: ask only if no rank has all of them."""


class LocalTail:
    """The Tail of a rank that is alone."""

    def write(self, count: Count, touched: Sequence[bool] | None, changed: bool) -> None:
        self._count = count
        self._touched = touched
        self._changed = changed

    def read(self) -> Sums:
        return Sums(float(self._count), float(self._touched is None), float(self._changed))

    def without_gradient(self) -> list[int]:
        return [index for index, touched in enumerate(self._touched or ()) if not touched]


class RidingTail:
    """The end of a gradient message: `[ranks with a gradient for parameter 0, 1, ..., complete, changed, the count in parts]`.

    So the count of a step needs no separate message, and a parameter that got no gradient on any rank is known. The count is
    exact to 2^53 in a float32 too: its integer part is sent in limbs of 12 bits, each of which is summed exactly.
    """

    LENGTH = 2 + _LIMBS + 1
    """In addition to one element for each parameter."""

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view
        self._written: tuple[float, bool, bool] | None = None
        self._ends = view[-self.LENGTH :]
        self._source = torch.zeros_like(self._ends)
        self._units = torch.tensor(_UNITS, dtype=torch.float64, device=view.device)

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def write(self, count: Count, touched: Sequence[bool] | None, changed: bool) -> None:
        """Into a view that is zero."""
        complete = touched is None
        if isinstance(count, torch.Tensor):
            self._written = None
            self._source[0] = complete
            self._source[1] = changed
            self._source[2:] = _limbs_there(count, self._units)
        elif self._written != (count, complete, changed):
            self._written = (count, complete, changed)
            values = [float(complete), float(changed), *_limbs(count)]
            self._source = torch.tensor(values, dtype=self._ends.dtype, device=self._ends.device)
        self._ends.copy_(self._source)
        if touched is not None:
            self._view[: -self.LENGTH] = torch.tensor(touched, dtype=self._view.dtype)

    def read(self) -> Sums:
        complete, changed, *limbs, rest = self._ends.tolist()
        return Sums(sum(limb * unit for limb, unit in zip(limbs, _UNITS, strict=True)) + rest, complete, changed)

    def without_gradient(self) -> list[int]:
        return torch.nonzero(self._view[: -self.LENGTH] == 0).flatten().tolist()


def _limbs(count: float) -> list[float]:
    """Limbs of the integer part, the least first, then the fraction; values that are not finite are in the last."""
    if not math.isfinite(count):
        return [0.0] * _LIMBS + [count]
    whole = math.floor(count)
    limbs = [float((whole >> (_BITS * k)) & ((1 << _BITS) - 1)) for k in range(_LIMBS - 1)]
    return [*limbs, float(whole >> (_BITS * (_LIMBS - 1))), count - whole]


def _limbs_there(count: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """The same on the device, so that nothing waits for the count."""
    count = count.detach().to(torch.float64).reshape(())
    whole = count.floor()
    above = (whole / units).floor()
    limbs = above.clone()
    limbs[:-1] -= above[1:] * 2.0**_BITS
    return torch.cat([limbs, (count - whole).reshape(1)])


class Reduction(Protocol):
    """One way. Between `release` and the next backward pass no gradient is left of the step before."""

    parameters: list[nn.Parameter]
    """Those that require a gradient, each once; `Tail` counts in this order."""

    wait_s: float
    """Seconds that `reduce` has taken so far."""

    sent_bytes: int
    """The bytes that this rank has sent so far."""

    @property
    def begun(self) -> bool:
        """Whether a part of this step's message may be sent already."""

    def expect(self, count: Count, last: bool) -> None:
        """A backward pass follows, of a micro-batch of this count. `last`: of this rank's step, so that it may send."""

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient that is not zero since `release`. It may wait for the device."""

    def take_home(self) -> tuple[list[torch.Tensor | None], Count]:
        """Copies of this rank's own gradients, None for a parameter without one, and its count; they are removed from here."""

    def put(self, gradients: Sequence[torch.Tensor | None], count: Count) -> None:
        """Set these gradients as if a backward pass had made them; at the beginning of a step."""

    def reduce(self, changed: bool = False) -> Tail:
        """Collective. Sum gradients and counts over ranks; parameters hold the sums as their gradients."""

    def gradients(self) -> list[torch.Tensor]:
        """After `reduce`: all sums, in as few tensors as possible."""

    def release(self) -> None:
        """After the optimizer's step."""

    def describe(self) -> str:
        """In a few words, for people."""


class SeparateGradients:
    """For a Reduction in which each parameter's gradient is a tensor of its own."""

    parameters: list[nn.Parameter]
    _count: Count = 0.0

    def has_gradients(self) -> bool:
        return any(p.grad is not None and bool(p.grad.any()) for p in self.parameters)

    def put(self, gradients: Sequence[torch.Tensor | None], count: Count) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._count = count

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def release(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
