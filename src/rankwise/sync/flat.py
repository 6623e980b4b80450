"""Gradients end to end in one buffer, and one all-reduce when all are there: for CPUs and for small models.

Gradients are views of the buffer (one a dtype and device). The layout is the same on every step and after every resume, and
with it the order of additions. A rank without a sample needs no forward pass: its buffer is zero.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from rankwise.sync.reduction import LocalTail, RidingTail, Tail
from rankwise.terminal import size


class FlatReduction:
    """A Reduction without overlap: nothing moves before `reduce`."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        # The most precise first: the tail rides in it.
        order = sorted(kinds.items(), key=lambda item: -torch.finfo(item[0][0]).bits)
        self.parameters = [p for _, group in order for p in group]
        self._together = dist.is_initialized()
        tail = len(self.parameters) + 2 if self._together else 0
        exact = not self._together or torch.finfo(order[0][0][0]).bits >= 32
        self._buffers = [_Buffer(group, tail if exact and i == 0 else 0) for i, (_, group) in enumerate(order)]
        first = self._buffers[0].flat
        # A message of its own when no gradient is exact enough to carry a count (a bf16 or fp16 model).
        self._apart = None if exact else torch.zeros(tail, dtype=torch.float32, device=first.device)
        self._tail: Tail = LocalTail()
        if self._together:
            self._tail = RidingTail(first[-tail:] if self._apart is None else self._apart)
        self._count: float | torch.Tensor = 0.0
        self.wait_s = 0.0

    def expect(self) -> None:
        pass

    def backward(self, loss_sum: torch.Tensor, seed: torch.Tensor, count: float | torch.Tensor) -> None:
        loss_sum.backward(seed)  # type: ignore[no-untyped-call]
        self._count = self._count + count

    def reduce(self) -> Tail:
        touched: list[bool] = []
        for buffer in self._buffers:
            touched += buffer.collect()
        self._tail.write(self._count, None if all(touched) else touched)
        self._count = 0.0
        if self._together:
            began = time.perf_counter()
            for buffer in self._buffers:
                dist.all_reduce(buffer.flat)
            if self._apart is not None:
                dist.all_reduce(self._apart)
            self.wait_s += time.perf_counter() - began
        return self._tail

    def gradients(self) -> list[torch.Tensor]:
        return [buffer.gradient for buffer in self._buffers]

    def release(self) -> None:
        for buffer in self._buffers:
            buffer.clear()
        if self._apart is not None:
            self._apart.zero_()

    def describe(self) -> str:
        whole = sum(b.flat.numel() * b.flat.element_size() for b in self._buffers)
        return f"one all-reduce of {size(whole)} a step"


class _Buffer:
    """The gradients of parameters of one dtype and device, end to end, and a tail."""

    def __init__(self, parameters: list[torch.nn.Parameter], tail: int) -> None:
        self._parameters = parameters
        sizes = [p.numel() for p in parameters]
        first = parameters[0]
        self.flat = torch.zeros(sum(sizes) + tail, dtype=first.dtype, device=first.device)
        self.gradient = self.flat[: sum(sizes)]
        # Not plain views: `.data` gives each a version counter of its own, which tells whether autograd has added to it.
        self._views = [piece.data.view_as(p) for piece, p in zip(torch.split(self.gradient, sizes), parameters, strict=True)]
        self.clear()

    def collect(self) -> list[bool]:
        """Bring home gradients that were put elsewhere (`optimizer.zero_grad()` unties them); which parameters have one."""
        touched = [view._version != version for view, version in zip(self._views, self._versions, strict=True)]
        for i, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if parameter.grad is not view:
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad.detach())
                touched[i] = parameter.grad is not None
                parameter.grad = view
        return touched

    def clear(self) -> None:
        self.flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
        self._versions = [view._version for view in self._views]
