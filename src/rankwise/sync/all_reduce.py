"""Every step the exact gradient of the whole global batch, by one flat all-reduce in which the count rides.

    sync = AllReduce(clip_norm=1.0);  model = sync.wrap(model)
    sync.backward(loss_sum, count);   sync.step(model, optimizer)

Gradients are views of one buffer (one a dtype and device) with one more element for the count, so that what a step was over is
known without a message of its own, and a rank without a sample needs no forward pass: its buffer is zero. The layout is the
same on every step and after every resume, and with it the order of additions.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from rankwise import comm
from rankwise.errors import ConfigError, StepError
from rankwise.precision import LossScale
from rankwise.sync.strategy import StepResult

_NOTHING = contextlib.nullcontext()


class AllReduce:
    """Exact data parallelism.

    `clip_norm`: largest global norm of the mean gradient; None or <= 0 does not clip. `nominal`: a constant, the same on
    all ranks, near the count of a step; the gradients that are summed are divided by it (a power of two changes no bit).
    `loss_scale` for fp16.
    """

    def __init__(self, clip_norm: float | None = None, nominal: float = 1.0, loss_scale: LossScale | None = None) -> None:
        self._clip_norm = clip_norm if clip_norm is not None and clip_norm > 0 else math.inf
        self._nominal = 2.0 ** round(math.log2(nominal))
        self._loss_scale = loss_scale
        self._buffers: list[_FlatGradient] = []
        self._apart: torch.Tensor | None = None
        """Where the count travels when no gradient is exact enough to carry it (a bf16 or fp16 model): a message of its own."""
        self._count: float | torch.Tensor = 0.0
        self._seed: torch.Tensor | None = None
        self.wait_s = 0.0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Collective. Rank 0's parameters and buffers everywhere; gradients become views of the flat buffers."""
        comm.broadcast([*model.parameters(), *model.buffers()])
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        if not kinds:
            raise ConfigError("the model has no parameter that requires a gradient: there is nothing to train")
        # The most precise first: the count rides in it.
        order = sorted(kinds.items(), key=lambda item: -torch.finfo(item[0][0]).bits)
        self._buffers = [_FlatGradient(parameters) for _, parameters in order]
        first = self._buffers[0].flat
        if torch.finfo(first.dtype).bits < 32:
            self._apart = torch.zeros(1, dtype=torch.float32, device=first.device)
        return model

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[object]:
        return _NOTHING  # nothing moves before `step`

    def backward(self, loss_sum: torch.Tensor, count: float | torch.Tensor) -> None:
        seed = self._seed
        if seed is None or seed.dtype != loss_sum.dtype or seed.device != loss_sum.device:
            self._seed = seed = self._new_seed(loss_sum)
        # A seed costs no node in the graph; dividing the loss would.
        loss_sum.backward(seed)  # type: ignore[no-untyped-call]
        self._count = self._count + count

    def _new_seed(self, loss_sum: torch.Tensor) -> torch.Tensor:
        if loss_sum.dim() != 0 or not loss_sum.requires_grad:
            raise StepError(
                f"the loss sum must be a scalar that depends on the parameters, but it has shape {tuple(loss_sum.shape)}"
                f"{'' if loss_sum.requires_grad else ' and needs no gradient'}; return (loss.sum(), count)"
            )
        scale = self._loss_scale.scale if self._loss_scale is not None else 1.0
        return torch.full((), scale / self._nominal, dtype=loss_sum.dtype, device=loss_sum.device)

    @torch.no_grad()
    def step(self, model: nn.Module, optimizer: Optimizer) -> StepResult:
        """Collective: one all-reduce a buffer (one for nearly every model), and nothing else.

        A gradient that is not finite, or over nothing, is left out on all ranks.
        """
        buffers = self._buffers
        for buffer in buffers:
            buffer.collect()
        carrier = buffers[0].flat if self._apart is None else self._apart
        carrier[-1] = self._count
        self._count = 0.0
        if dist.is_initialized():
            began = time.perf_counter()
            for buffer in buffers:
                dist.all_reduce(buffer.flat)
            if self._apart is not None:
                dist.all_reduce(self._apart)
            self.wait_s += time.perf_counter() - began
        result = self._judge(buffers, carrier)
        if result.finite and result.total > 0:
            optimizer.step()
        for buffer in buffers:
            buffer.flat.zero_()
        return result

    def _judge(self, buffers: list[_FlatGradient], carrier: torch.Tensor) -> StepResult:
        """Make the gradients those of the mean loss, clipped. All ranks see the same sums, so all decide alike."""
        count = float(carrier[-1])  # waits for the device: the one host sync of a step
        norm = math.hypot(*(float(torch.linalg.vector_norm(buffer.gradient)) for buffer in buffers))
        finite = math.isfinite(norm) and math.isfinite(count)
        loss_scale = self._loss_scale.scale if self._loss_scale is not None else 1.0
        factor = self._nominal / (loss_scale * count) if count > 0 else 0.0
        if self._loss_scale is not None:
            self._loss_scale.update(finite)
            self._seed = None
        norm *= factor
        if norm > self._clip_norm:
            factor *= self._clip_norm / (norm + 1e-6)  # as torch's clip_grad_norm_
        if finite and factor != 1.0:
            for buffer in buffers:
                buffer.gradient.mul_(factor)
        return StepResult(count, norm, finite)

    def equalise(self, model: nn.Module) -> None:
        """Collective. Rank 0's buffers (running statistics) everywhere; nothing for a model without buffers."""
        comm.broadcast(list(model.buffers()))

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scale": self._loss_scale.state_dict()} if self._loss_scale is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._loss_scale is not None and "loss_scale" in state:
            self._loss_scale.load_state_dict(state["loss_scale"])
            self._seed = None


class _FlatGradient:
    """The gradients of parameters of one dtype and device, end to end, and one element more."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        sizes = [p.numel() for p in parameters]
        first = parameters[0]
        self.flat = torch.zeros(sum(sizes) + 1, dtype=first.dtype, device=first.device)
        self.gradient = self.flat[:-1]
        pieces = torch.split(self.gradient, sizes)
        self._views = [v.view_as(p) for v, p in zip(pieces, parameters, strict=True)]
        self.collect()

    def collect(self) -> None:
        """Bring home gradients that were put elsewhere: `optimizer.zero_grad()` unties them."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not view:
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad)
                parameter.grad = view
