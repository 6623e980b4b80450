"""Gradients by torch's DistributedDataParallel, in buckets while the backward pass goes on: for large models on GPUs.

DDP's reducer is used, not its forward: the model stays the one it was (no `module.` prefix, its own methods), and a rank
without a sample, or with a parameter that got no gradient, joins in with zeros instead of an error. Its buckets are fixed at
once, not by the first step: otherwise a resumed run would add in another order than one that never stopped (seen on 3 ranks
and more), and the reducer would collect that order for ever.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.dist import private_names
from rankwise.host.text import size
from rankwise.sync.reduction import Count, RidingTail, SeparateGradients

BUCKET_BYTES = 25 * 2**20
"""DDP's default size of a bucket."""

_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers": False}


def is_possible() -> bool:
    """Whether this torch has what a DdpReduction needs."""
    return private_names.can_settle_buckets(dist.Reducer)  # type: ignore[attr-defined]


class DdpReduction(SeparateGradients):
    """A Reduction that overlaps with the backward pass of the last micro-batch."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        # The reducer uses its buckets in the given order, and a backward pass has the last layers' gradients first.
        self.parameters = list(reversed(parameters))
        ddp = DistributedDataParallel(
            nn.ParameterList(self.parameters), init_sync=False, gradient_as_bucket_view=True, **_NO_BUFFERS
        )
        ddp.register_comm_hook(None, lambda _, bucket: self._on_bucket(bucket))  # DDP would refuse annotations as text
        self._reducer = ddp.reducer
        private_names.settle_buckets(self._reducer)
        self._ddp = ddp  # kept as long as the reducer
        self._before: list[torch.Tensor | None] | None = None
        """The gradients when the last backward pass began: those that it replaced went to the reducer. None: not begun."""
        self._touched: list[bool] | None = None
        self._changed = False
        self._reduced = False
        self._count: Count = 0.0
        self._message: torch.Tensor | None = None
        """The last bucket and the tail behind it, in one."""
        self._tail: RidingTail | None = None
        self._apart: torch.Tensor | None = None
        """The tail in a message of its own, when the last bucket is not exact enough to carry a count (bf16, fp16)."""
        self.wait_s = 0.0
        self.sent_bytes = 0
        self._gradient_bytes = sum(p.nbytes for p in self.parameters)

    @property
    def begun(self) -> bool:
        return self._reduced or self._before is not None

    def expect(self, count: Count, last: bool) -> None:
        self._count = self._count + count
        if last:
            self._expect_all()

    def _expect_all(self) -> None:
        self._before = [p.grad for p in self.parameters]
        self._reducer.prepare_for_forward()
        self._reducer.prepare_for_backward([])

    def take_home(self) -> tuple[list[torch.Tensor | None], Count]:
        found = [p.grad.clone() if p.grad is not None else None for p in self.parameters]
        count, self._count = self._count, 0.0
        self.release()
        return found, count

    def reduce(self, changed: bool = False) -> RidingTail:
        began = time.perf_counter()
        self._changed = changed
        if not self._reduced:
            self._touched = [p.grad is not None for p in self.parameters]
            if self._before is None:  # no sample here, or a loop that did not mark its last micro-batch
                self._expect_all()
            assert self._before is not None
            _add_nothing([p for p, before in zip(self.parameters, self._before, strict=True) if p.grad is before])
        assert self._tail is not None
        assert self._reduced, "DDP's reducer has not sent all of its buckets"
        if self._apart is not None:
            self._apart.zero_()
            self._tail.write(self._count, self._touched, changed)
            dist.all_reduce(self._apart)
        self.sent_bytes += self._gradient_bytes + self._tail.nbytes
        self.wait_s += time.perf_counter() - began
        self._before = self._touched = None
        self._reduced = False
        self._count = 0.0
        return self._tail

    def _on_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """The reducer has all of this rank's gradients of a bucket; the last bucket comes last."""
        buffer = bucket.buffer()
        if not bucket.is_last():
            return _summed(buffer, buffer)
        self._reduced = True
        if self._tail is None:
            self._make_tail(buffer)
        assert self._tail is not None
        if self._message is None:
            return _summed(buffer, buffer)
        n = buffer.numel()
        self._message[:n].copy_(buffer)
        self._message[n:].zero_()
        self._tail.write(self._count, self._touched, self._changed)
        return _summed(self._message, self._message[:n])

    def _make_tail(self, buffer: torch.Tensor) -> None:
        length = len(self.parameters) + RidingTail.LENGTH
        if torch.finfo(buffer.dtype).bits >= 32:
            self._message = torch.zeros(buffer.numel() + length, dtype=buffer.dtype, device=buffer.device)
            self._tail = RidingTail(self._message[-length:])
        else:
            self._apart = torch.zeros(length, dtype=torch.float32, device=buffer.device)
            self._tail = RidingTail(self._apart)

    def describe(self) -> str:
        return f"DDP, {size(self._gradient_bytes)} in buckets of {BUCKET_BYTES >> 20} MB during the backward pass"


def _summed(message: torch.Tensor, result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Begin to sum `message` over ranks; the future holds `result`, a part of it, when that is done."""
    work = dist.all_reduce(message, async_op=True)
    assert work is not None
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: result)
    return future


def _add_nothing(parameters: Sequence[nn.Parameter]) -> None:
    """A backward pass that gives each parameter a gradient of zero, frozen ones too, as the reducer waits for one."""
    frozen = [p for p in parameters if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    with torch.enable_grad():
        torch.autograd.backward([p.reshape(-1)[:0].sum() for p in parameters])
    for parameter in frozen:
        parameter.requires_grad_(False)
