"""A step that is judged on the GPU: the optimizer's kernels are launched before the CPU knows whether the step is skipped.

    late = LateSteps(optimizer_step, parameter, mean_of=64.0, clip_norm=1.0)
    result = late.step(gradients, norm, tail)      # None: this step cannot be judged there
    late.settle()                                  # before the next step: its numbers have arrived by then

To read the norm of a gradient, the CPU waits until the GPU has computed it, and then the GPU waits until the CPU has launched
the rest. Where both take about as long, a step took 1.15 to 1.40 times as long (benchmarks/trainer_step). So the fused kernels
get a tensor that says whether the step is skipped (`found_inf`, made for torch's GradScaler), and the numbers are copied to the
CPU while it prepares the next step. The arithmetic is that of AllReduce._judge, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rankwise.dist import private_names
from rankwise.sync.reduction import ADDED_TO_NORM, Tail
from rankwise.sync.strategy import LateResult, Mine, Shared, StepResult
from rankwise.training.direct_step import DirectStep


def is_possible(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the steps of these parameters may be judged there: on one GPU. Not in bf16 and fp16, in which torch would round
    the factor of the gradients."""
    kinds = {(p.device, p.dtype) for p in parameters}
    return len(kinds) == 1 and all(d.type == "cuda" and dtype in (torch.float32, torch.float64) for d, dtype in kinds)


class Arrival:
    """Numbers on their way from the device, to pinned memory."""

    def __init__(self, device: torch.device, numbers: int) -> None:
        self._here = torch.zeros(numbers, dtype=torch.float64, device="cpu", pin_memory=True)
        cuda: Any = torch.cuda
        self._device, self._event = device, cuda.Event()

    def send(self, numbers: torch.Tensor) -> None:
        """Start to copy these into the first places. Does not wait."""
        self._here[: len(numbers)].copy_(numbers, non_blocking=True)
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> list[float]:
        """All places, when the numbers that were sent last have arrived."""
        self._event.synchronize()
        numbers: list[float] = self._here.tolist()
        return numbers


class LateSteps:
    """`apply`: the optimizer's step. `parameter`: any that is trained. `mean_of`: what the gradients are multiplied by, besides
    the division by the count. `clip_norm`: the largest norm of the mean gradient. `on_change`: called if another rank has
    changed what it trains."""

    def __init__(
        self, apply: DirectStep, parameter: torch.Tensor, mean_of: float, clip_norm: float, on_change: Callable[[], None]
    ) -> None:
        self._apply, self._mean_of, self._clip_norm, self._on_change = apply, mean_of, clip_norm, on_change
        self._clips = math.isfinite(clip_norm)
        self._dtype, device = parameter.dtype, parameter.device
        self._found_inf = torch.zeros((), dtype=torch.float32, device=device)
        # A number divided by a tensor is a product with its reciprocal in torch: other bits.
        self._mean_there, self._clip_there = (
            torch.tensor(value, dtype=torch.float64, device=device) for value in (mean_of, clip_norm)
        )
        self._arrival = Arrival(device, 3)
        self._open: LateResult | None = None

    def step(self, gradients: list[torch.Tensor], norm: torch.Tensor, tail: Tail) -> LateResult | None:
        """Judge, clip and step. `norm`: of the gradients, in float64. None if this rank must know more before the step: torch's
        Python runs it (the first one, one that a profiler or a hook sees), or a parameter may have no gradient on any rank."""
        sums = tail.there() if gradients else None
        launches = self._apply.launches() if sums is not None else None
        if sums is None or launches is None:
            return None
        total, changed = sums
        if isinstance(total, torch.Tensor):
            self._judge_there(gradients, norm, total, changed)
        elif 0 < total < math.inf:
            self._judge(gradients, norm, total)
        else:
            return None
        self._apply.launch(launches, found_inf=self._found_inf)
        self._open = LateResult(partial(self._read, None if isinstance(total, torch.Tensor) else total))
        return self._open

    def _judge(self, gradients: list[torch.Tensor], norm: torch.Tensor, total: float) -> None:
        """The count is here."""
        factor = self._mean_of / total
        self._found_inf.copy_(norm * 0 != 0)  # nan is not 0
        self._arrival.send(norm.reshape(1))
        if self._clips:
            private_names.scale(gradients, self._clipped(norm, factor))
        elif factor != 1.0:
            private_names.scale(gradients, factor)

    def _judge_there(
        self, gradients: list[torch.Tensor], norm: torch.Tensor, total: torch.Tensor, changed: torch.Tensor
    ) -> None:
        """The count is there, because the ranks have summed it there or step_fn has computed it."""
        is_used = (norm * 0 + total * 0 == 0) & (total > 0) & (changed == 0)
        self._found_inf.copy_(is_used.logical_not())
        self._arrival.send(torch.stack([norm, total, changed]))
        private_names.scale(gradients, self._clipped(norm, self._mean_there / total))

    def _clipped(self, norm: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        of_mean = norm * factor
        clipped = factor * (self._clip_there / (of_mean + ADDED_TO_NORM))
        return torch.where(of_mean > self._clip_there, clipped, factor).to(self._dtype)

    def settle(self) -> None:
        """Collective if a rank has changed what it trains: then all ranks raise. Waits for the numbers of the last step."""
        if self._open is not None:
            self._open.read()

    def _read(self, total: float | None) -> StepResult:
        """`total`: the count, if it was here."""
        self._open = None
        norm, there, changed = self._arrival.wait()
        if total is None:
            total = there
            if changed:
                self._on_change()
        finite = math.isfinite(norm) and math.isfinite(total)
        norm *= self._mean_of / total if total > 0 else 0.0
        shared = Shared(total, norm, finite, int(not finite))
        return StepResult(Mine(total, norm, finite and total > 0), shared)
