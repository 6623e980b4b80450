"""The protocol of the ways to add gradients over ranks, and the tail of the gradient message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from rankwise.dist import private_names

Count = float | torch.Tensor

_BITS = 12  # per limb: the sum of a limb over 4096 ranks is exact in float32
_LIMBS = 5
_UNITS = [2.0 ** (_BITS * k) for k in range(_LIMBS)]
ADDED_TO_NORM = 1e-6
"""Before a division by it, to clip: like torch's clip_grad_norm_."""

_NONE = torch.zeros((), dtype=torch.float64, device="cpu")


class Sums(NamedTuple):
    """The numbers after the gradients in a message, summed over ranks."""

    total: float
    """The sum of the counts."""

    complete: float
    """The number of ranks that have a gradient for every parameter."""

    changed: float
    """The number of ranks on which the set of trained parameters has changed; this message still has the old set."""


class Tail(Protocol):
    """The count of a step, and which parameters got a gradient."""

    def write(self, count: Count, touched: Sequence[bool] | None, changed: bool) -> None:
        """Write this rank's part. `touched`: which parameters got a gradient; None for all."""

    def read(self) -> Sums:
        """The sums. Waits for the device."""

    def there(self) -> tuple[Count, torch.Tensor] | None:
        """(the sum of the counts, the number of ranks on which the set of trained parameters has changed), without a wait for
        the device; of a count that is here, the second one has no meaning. None if this rank does not know that every parameter
        has a gradient on some rank, or has changed its set."""

    def without_gradient(self) -> list[int]:
        """The parameters that got no gradient on any rank. Waits for the device: call this only if no rank has all
        gradients."""


class LocalTail:
    """The Tail of a single rank."""

    def write(self, count: Count, touched: Sequence[bool] | None, changed: bool) -> None:
        self._count = count
        self._touched = touched
        self._changed = changed

    def read(self) -> Sums:
        return Sums(float(self._count), float(self._touched is None), float(self._changed))

    def there(self) -> tuple[Count, torch.Tensor] | None:
        if self._touched is not None or self._changed:
            return None
        count = self._count.reshape(()) if isinstance(self._count, torch.Tensor) else self._count
        return count, torch.zeros_like(count) if isinstance(count, torch.Tensor) else _NONE

    def without_gradient(self) -> list[int]:
        return [index for index, touched in enumerate(self._touched or ()) if not touched]


class RidingTail:
    """The end of a gradient message: `[ranks with a gradient for parameter 0, 1, ..., complete, changed, the count in parts]`.

    With it, the count of a step needs no separate message, and all ranks know which parameters got no gradient on any rank. The
    count is exact up to 2^53, also in a float32: its integer part is sent in limbs of 12 bits, and each limb is summed exactly.
    """

    LENGTH = 2 + _LIMBS + 1
    """The number of elements that follow the one element per parameter."""

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view
        self._written: tuple[float, bool, bool] | None = None
        self._is_usual = False
        """Whether this rank has all gradients and trains what it did before."""

        self._ends = view[-self.LENGTH :]
        self._source = torch.zeros_like(self._ends)
        self._units = torch.tensor(_UNITS, dtype=torch.float64, device=view.device)

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def write(self, count: Count, touched: Sequence[bool] | None, changed: bool) -> None:
        """Write into the view, which must be zero before."""
        complete = touched is None
        self._is_usual = complete and not changed
        if isinstance(count, torch.Tensor):
            self._written = None
            self._source[0] = complete
            self._source[1] = changed
            self._source[2:] = _limbs_there(count, self._units)
        elif self._written != (count, complete, changed):
            self._written = (count, complete, changed)
            values = [float(complete), float(changed), *_limbs(count)]
            source = torch.tensor(values, dtype=self._ends.dtype, device="cpu")
            self._source = source.to(self._ends.device, non_blocking=True)  # made there, it would wait for the GPU
        self._ends.copy_(self._source)
        if touched is not None:
            self._view[: -self.LENGTH] = torch.tensor(touched, dtype=self._view.dtype, device="cpu")

    def read(self) -> Sums:
        complete, changed, *limbs, rest = self._ends.tolist()
        return Sums(sum(limb * unit for limb, unit in zip(limbs, _UNITS, strict=True)) + rest, complete, changed)

    def there(self) -> tuple[Count, torch.Tensor] | None:
        if not self._is_usual:
            return None
        ends = self._ends.to(torch.float64)
        return (ends[2:-1] * self._units).sum() + ends[-1], ends[1]

    def without_gradient(self) -> list[int]:
        return torch.nonzero(self._view[: -self.LENGTH] == 0).flatten().tolist()


def _limbs(count: float) -> list[float]:
    """The limbs of the integer part, the least first, and then the fraction. A value that is not finite is in the last limb."""
    if not math.isfinite(count):
        return [0.0] * _LIMBS + [count]
    whole = math.floor(count)
    limbs = [float((whole >> (_BITS * k)) & ((1 << _BITS) - 1)) for k in range(_LIMBS - 1)]
    return [*limbs, float(whole >> (_BITS * (_LIMBS - 1))), count - whole]


def _limbs_there(count: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """The same for a count on the device, so that nothing waits for it."""
    count = count.detach().to(torch.float64).reshape(())
    whole = count.floor()
    above = (whole / units).floor()
    limbs = above.clone()
    limbs[:-1] -= above[1:] * 2.0**_BITS
    return torch.cat([limbs, (count - whole).reshape(1)])


class Reduction(Protocol):
    """One way to add gradients. Between `release` and the next backward pass, no gradient of the last step remains."""

    parameters: list[nn.Parameter]
    """The parameters that require a gradient, each once. `Tail` uses the same order."""

    wait_s: float
    """Seconds that `reduce` has taken so far."""

    sent_bytes: int
    """The bytes that this rank has sent so far."""

    @property
    def begun(self) -> bool:
        """Whether a part of the message of this step may have been sent already."""

    def expect(self, count: Count, last: bool) -> None:
        """Called before the backward pass of a micro-batch with this count. `last`: it is the last of this rank's step, so the
        pass may send."""

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient that is not zero since `release`. May wait for the device."""

    def take_home(self) -> tuple[list[torch.Tensor | None], Count]:
        """Copies of this rank's own gradients (None for a parameter without one), and its count. Both are removed from here."""

    def drop(self) -> None:
        """Remove this rank's own gradients and its count. Cheap if there are none. Not called once `begun`."""

    def put(self, gradients: Sequence[torch.Tensor | None], count: Count) -> None:
        """Set these gradients as if a backward pass had computed them. Called at the start of a step."""

    def reduce(self, changed: bool = False) -> Tail:
        """Collective. Sum gradients and counts over ranks. Afterwards the gradients of the parameters are the sums."""

    def gradients(self) -> list[torch.Tensor]:
        """After `reduce`: all sums, in as few tensors as possible."""

    def applied(self, unused: Sequence[int]) -> None:
        """Called after `reduce` if the sums are used for a step; not if it is skipped. `unused`: the parameters that got no
        gradient on any rank; their sums are not used."""

    def release(self) -> None:
        """Called after the optimizer's step."""

    def describe(self) -> str:
        """The way in a few words, for the user."""


class SeparateGradients:
    """A base for Reductions in which each parameter's gradient is a separate tensor."""

    parameters: list[nn.Parameter]
    _count: Count = 0.0

    def has_gradients(self) -> bool:
        return any(p.grad is not None and bool(p.grad.any()) for p in self.parameters)

    def drop(self) -> None:
        self._count = 0.0
        self.release()

    def put(self, gradients: Sequence[torch.Tensor | None], count: Count) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._count = count

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def applied(self, unused: Sequence[int]) -> None:
        """Nothing to do."""

    def release(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def norm_of(gradients: list[torch.Tensor], at_least: torch.dtype) -> torch.Tensor:
    """The norm of all gradients together, as a tensor: this does not wait for the device."""
    if not gradients:
        return torch.zeros((), dtype=at_least, device="cpu")
    if len(gradients) == 1:
        [whole] = gradients
        is_exact = whole.dtype == at_least  # the common case: to pass the dtype takes longer
        norm: torch.Tensor = torch.linalg.vector_norm(
            whole, dtype=None if is_exact else torch.promote_types(whole.dtype, at_least)
        )
        return norm
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else at_least
    together: torch.Tensor = torch.linalg.vector_norm(torch.stack(private_names.norms(gradients, dtype)))
    return together
