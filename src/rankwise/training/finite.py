"""Learning rates and weights must be finite: otherwise the training stops with an error, before they are saved.

check_rates(state);  weights.check(state, "since step 41")
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from rankwise.dist import comm
from rankwise.errors import StepError
from rankwise.training.optimizer import named_parameters
from rankwise.training.state import TrainState


def check_rates(state: TrainState) -> None:
    """An action. Raises StepError for a learning rate that is nan or inf."""
    for number, group in enumerate(state.optimizer.param_groups):
        rate = group.get("lr", 0.0)
        # Not for a tensor: if it is on a GPU, the CPU would wait for the GPU.
        if not isinstance(rate, torch.Tensor) and not math.isfinite(rate):
            where = f" of group {number}" if len(state.optimizer.param_groups) > 1 else ""
            raise StepError(
                f"the learning rate{where} is {float(rate)} after step {state.step}; check the scheduler, or how "
                "the script computes it"
            )


class Weights:
    """`finite_at`: the last step after which the weights were checked and finite."""

    def __init__(self) -> None:
        self.finite_at = 0

    def check(self, state: TrainState, since: str) -> None:
        """Collective. Raises StepError on all ranks if a trained parameter is not finite on any rank."""
        named = named_parameters(state.model, state.optimizer)
        bad = _first_not_finite({name: p.detach() for name, p in named.items() if p.requires_grad})
        told = [(rank, name) for rank, name in enumerate(comm.all_gather_object(bad)) if name is not None]
        if told:
            where = "" if len(told) == comm.world_size() else f" on rank {told[0][0]}"
            raise StepError(
                f"the weights are not finite{where}, {since}: {told[0][1]} has nan or inf, and was finite after step "
                f"{self.finite_at}; check the learning rate and the optimizer's settings. Checkpoints up to that step are kept"
            )
        self.finite_at = state.step


def _first_not_finite(named: Mapping[str, torch.Tensor]) -> str | None:
    """One pass without a copy; waits once per device. If a sum is finite, its terms are finite too. If it is not, the terms are
    checked, because a large sum may overflow."""
    devices: dict[torch.device, list[str]] = {}
    for name, tensor in named.items():
        devices.setdefault(tensor.device, []).append(name)
    suspects = set()
    for names in devices.values():
        finite = torch.stack([named[name].sum().float() for name in names]).isfinite().tolist()
        suspects |= {name for name, one in zip(names, finite, strict=True) if not one}
    return next((name for name in named if name in suspects and not named[name].isfinite().all()), None)
