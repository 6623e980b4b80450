"""The gradients of a rank that sends none, left where autograd creates them: for ranks that step alone, and large tensors.

The first backward pass of a step sets the gradients, as in a plain loop, so nothing is added to zeros and nothing is cleared.
Many small tensors are faster in one buffer (flat.py): each separate gradient costs about 2 us per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import nn

from rankwise.sync.reduction import Count, LocalTail, SeparateGradients, Tail

_SMALL_BYTES = 32 << 10
"""For tensors of at least this mean size, this is as fast as one buffer (benchmarks/sync_calls)."""

_grad = attrgetter("grad")
_is_sparse = attrgetter("is_sparse")


def pays(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the parameters are large enough, on average."""
    return sum(p.numel() * p.element_size() for p in parameters) >= _SMALL_BYTES * len(parameters)


class InPlaceReduction(SeparateGradients):
    """A Reduction over this rank alone."""

    begun = False
    wait_s = 0.0
    sent_bytes = 0

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._tail = LocalTail()
        self._count: Count = 0.0
        self.release()

    def expect(self, count: Count, last: bool) -> None:
        self._count = self._count + count

    def take_home(self) -> tuple[list[torch.Tensor | None], Count]:
        found, count = list(map(_grad, self.parameters)), self._count
        self._count = 0.0
        self.release()
        return found, count

    def reduce(self, changed: bool = False) -> Tail:
        touched = [gradient is not None for gradient in map(_grad, self.parameters)]
        self._tail.write(self._count, None if all(touched) else touched, changed)
        self._count = 0.0
        return self._tail

    def gradients(self) -> list[torch.Tensor]:
        found = super().gradients()
        if any(map(_is_sparse, found)):  # dense, as when ranks sum them: an optimizer may treat sparse ones differently
            for parameter in self.parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
            return self.gradients()
        return found

    def describe(self) -> str:
        return "this rank's own"
