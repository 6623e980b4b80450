"""Gradients by torch's DistributedDataParallel, in buckets, during the backward pass: for large models on GPUs.

rankwise uses DDP's reducer, but not its forward: the model itself does not change (no `module.` prefix, its own methods), and a
rank without a sample, or with a parameter that got no gradient, takes part with zeros instead of an error. The buckets are
fixed at the start, not by the first step: otherwise a resumed run would add in another order than one that never stopped (seen
on 3 ranks and more), and the reducer would collect that order forever.
"""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.dist import private_names
from rankwise.errors import StepError
from rankwise.host.text import size
from rankwise.sync.reduction import Count, RidingTail, SeparateGradients

BUCKET_BYTES = 25 * 2**20
"""The size of a bucket, DDP's default."""

_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers": False}


def is_possible() -> bool:
    """Whether this torch has what a DdpReduction needs."""
    return private_names.can_settle_buckets(dist.Reducer)  # type: ignore[attr-defined]


class DdpReduction(SeparateGradients):
    """A Reduction that overlaps with the backward pass of the last micro-batch."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        # The reducer fills its buckets in the given order, and a backward pass computes the gradients of the last layers first.
        self.parameters = list(reversed(parameters))
        ddp = DistributedDataParallel(
            nn.ParameterList(self.parameters), init_sync=False, gradient_as_bucket_view=True, **_NO_BUFFERS
        )
        ddp.register_comm_hook(None, lambda _, bucket: self._on_bucket(bucket))  # a lambda: DDP refuses text as annotations
        self._reducer = ddp.reducer
        private_names.settle_buckets(self._reducer)
        self._ddp = ddp  # must live as long as the reducer
        self._before: list[torch.Tensor | None] | None = None
        """The gradients at the start of the last backward pass; if one was replaced since, the reducer has it. None: not
        started."""
        self._touched: list[bool] | None = None
        self._changed = False
        self._reduced = False
        self._count: Count = 0.0
        self._message: torch.Tensor | None = None
        """The last bucket and the tail after it, in one message."""
        self._tail: RidingTail | None = None
        self._apart: torch.Tensor | None = None
        """The tail, if it needs a separate message: the last bucket (bf16, fp16) is not exact enough to carry a count."""
        self._seen: set[torch.Tensor] | None = None
        """During the last backward pass, the parameters that have got their gradient."""
        self._watch()
        self.wait_s = 0.0
        self.sent_bytes = 0
        self._gradient_bytes = sum(p.nbytes for p in self.parameters)

    def _watch(self) -> None:
        """Notice a second gradient in one backward pass: of a layer in two reentrant checkpoints, each of which is a backward
        pass of its own. The reducer takes only the first, and may ignore the second."""
        this = weakref.ref(self)

        def look(parameter: torch.Tensor) -> None:
            here = this()
            if here is None or here._seen is None:
                return
            if parameter in here._seen:
                raise StepError(
                    "a parameter got two gradients in one backward pass: its layer is used in two reentrant checkpoints; give "
                    "checkpoint(..., use_reentrant=False), or use AllReduce(overlap=False)"
                )
            here._seen.add(parameter)

        for parameter in self.parameters:
            handle = parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove)

    @property
    def begun(self) -> bool:
        return self._reduced or self._before is not None

    def expect(self, count: Count, last: bool) -> None:
        self._count = self._count + count
        if last:
            self._expect_all()
            self._seen = set()

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
        self._changed, self._seen = changed, None
        if not self._reduced:
            self._touched = [p.grad is not None for p in self.parameters]
            if self._before is None:  # no sample on this rank, or a loop that did not mark its last micro-batch
                self._expect_all()
            assert self._before is not None
            _add_nothing([p for p, before in zip(self.parameters, self._before, strict=True) if p.grad is before])
        if not self._reduced:
            raise StepError(
                "the gradients were not sent: DDP's reducer lost the parameters, probably because the model was converted or "
                "moved after the strategy was attached; convert or move a copy of it, or use AllReduce(overlap=False)"
            )
        assert self._tail is not None
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
        """Called when the reducer has all gradients of a bucket on this rank; the last bucket comes last."""
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
    """Start to sum `message` over ranks. After that the future holds `result`, which is a part of `message`."""
    work = dist.all_reduce(message, async_op=True)
    assert work is not None
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: result)
    return future


def _add_nothing(parameters: Sequence[nn.Parameter]) -> None:
    """A backward pass that gives each parameter a gradient of zero, also frozen ones, because the reducer waits for each."""
    frozen = [p for p in parameters if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    with torch.enable_grad():
        torch.autograd.backward([p.reshape(-1)[:0].sum() for p in parameters])
    for parameter in frozen:
        parameter.requires_grad_(False)
