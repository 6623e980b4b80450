"""Every step the exact gradient of the whole global batch.

    sync = AllReduce(clip_norm=1.0);  model = sync.wrap(model)
    sync.backward(loss_sum, count);   sync.step(model, optimizer)

A loss sum is differentiated, not a mean: the sums of all ranks and the counts they are over add up, and one division gives the
mean's gradient, for any number of ranks, micro-batches and samples. Two ways of adding up: flat.py and ddp.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from rankwise import comm, log
from rankwise.errors import ConfigError, StepError
from rankwise.precision import LossScale
from rankwise.sync.ddp import BUCKET_BYTES, DdpReduction
from rankwise.sync.flat import FlatReduction
from rankwise.sync.reduction import Reduction, Tail
from rankwise.sync.strategy import StepResult

_NOTHING = contextlib.nullcontext()
_REDUCTIONS = ("auto", "flat", "ddp")
_NAMED = 4  # parameters without a gradient that are named one by one


class AllReduce:
    """Exact data parallelism.

    `clip_norm`: largest global norm of the mean gradient; None or <= 0 does not clip. `nominal`: a constant, the same on
    all ranks, near the count of a step; the gradients that are summed are divided by it (a power of two changes no bit).
    `loss_scale` for fp16. `reduction`: `flat`, one message after the backward pass; `ddp`, buckets during it; `auto` takes ddp
    on GPUs for more gradients than one of DDP's buckets holds. On a single rank nothing is sent.

    A parameter that got no gradient on any rank in a step is left alone, as in a loop on one device, and named once.
    """

    def __init__(
        self,
        clip_norm: float | None = None,
        nominal: float = 1.0,
        loss_scale: LossScale | None = None,
        reduction: str = "auto",
    ) -> None:
        if reduction not in _REDUCTIONS:
            raise ConfigError(f"reduction={reduction!r}; choose one of {', '.join(_REDUCTIONS)}")
        self._clip_norm = clip_norm if clip_norm is not None and clip_norm > 0 else math.inf
        self._nominal = 2.0 ** round(math.log2(nominal))
        self._loss_scale = loss_scale
        self._way = reduction
        self._seed: torch.Tensor | None = None
        self._names: dict[int, str] = {}
        self._told_unused = False

    @property
    def wait_s(self) -> float:
        return self._reduction.wait_s

    def wrap(self, model: nn.Module) -> nn.Module:
        """Collective. Rank 0's parameters and buffers everywhere; returns the model itself."""
        comm.broadcast([*model.parameters(), *model.buffers()])
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise ConfigError("the model has no parameter that requires a gradient: there is nothing to train")
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._reduction: Reduction = DdpReduction(model) if self._takes_ddp(parameters) else FlatReduction(parameters)
        return model

    def _takes_ddp(self, parameters: Sequence[nn.Parameter]) -> bool:
        if self._way != "auto" or not dist.is_initialized():
            return self._way == "ddp" and dist.is_initialized()
        size = sum(p.numel() * p.element_size() for p in parameters)
        return parameters[0].device.type != "cpu" and size > BUCKET_BYTES

    def describe(self) -> str:
        return f"gradients: {self._reduction.describe()}" if dist.is_initialized() else ""

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[object]:
        if last:
            self._reduction.expect()
        return _NOTHING

    def backward(self, loss_sum: torch.Tensor, count: float | torch.Tensor) -> None:
        seed = self._seed
        if seed is None or seed.dtype != loss_sum.dtype or seed.device != loss_sum.device:
            self._seed = seed = self._new_seed(loss_sum)
        # A seed costs no node in the graph; dividing the loss would.
        self._reduction.backward(loss_sum, seed, count)

    def _new_seed(self, loss_sum: torch.Tensor) -> torch.Tensor:
        if loss_sum.dim() != 0 or not loss_sum.requires_grad:
            raise StepError(
                f"the loss sum must be a scalar that depends on the parameters, but it has shape {tuple(loss_sum.shape)}"
                f"{'' if loss_sum.requires_grad else ' and needs no gradient'}; return (loss.sum(), count)"
            )
        scale = self._loss_scale.scale if self._loss_scale is not None else 1.0
        return torch.full((), scale / self._nominal, dtype=loss_sum.dtype, device=loss_sum.device)

    def step(self, model: nn.Module, optimizer: Optimizer) -> StepResult:
        """Collective: the gradient's reduction (one message, or DDP's buckets), in which all else rides, and nothing more.

        A gradient that is not finite, or over nothing, is left out on all ranks.
        """
        tail = self._reduction.reduce()
        result, complete = self._judge(self._reduction.gradients(), tail)
        if result.finite and result.total > 0:
            if not complete:
                self._leave_alone(tail.without_gradient())
            optimizer.step()
        self._reduction.release()
        return result

    def _judge(self, gradients: list[torch.Tensor], tail: Tail) -> tuple[StepResult, bool]:
        """Make the gradients those of the mean loss, clipped; (the result, whether each parameter has one). All ranks see the
        same sums, so all decide alike."""
        norm_there = _norm(gradients)
        complete, count = tail.read()  # waits for the device, once a step
        norm = norm_there.item()
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
            torch._foreach_mul_(gradients, factor)
        return StepResult(count, norm, finite), complete > 0

    def _leave_alone(self, indices: Sequence[int]) -> None:
        parameters = self._reduction.parameters
        for index in indices:
            parameters[index].grad = None
        if indices and not self._told_unused:
            self._told_unused = True
            names = [self._names[id(parameters[index])] for index in indices]
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            log.warn(
                f"{len(names)} of {len(parameters)} parameters got no gradient in this step, on any rank: "
                f"{', '.join(names[:_NAMED])}{more}; the optimizer leaves them alone (where that is meant, "
                "requires_grad_(False) before the optimizer is made says so)"
            )

    def equalise(self, model: nn.Module) -> None:
        """Collective. Rank 0's buffers (running statistics) everywhere; nothing for a model without buffers."""
        comm.broadcast(list(model.buffers()))

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scale": self._loss_scale.state_dict()} if self._loss_scale is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._loss_scale is not None and "loss_scale" in state:
            self._loss_scale.load_state_dict(state["loss_scale"])
            self._seed = None


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Of all together, in a type that holds it; nothing waits for it here."""
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    norms = torch._foreach_norm(gradients, 2, dtype)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
