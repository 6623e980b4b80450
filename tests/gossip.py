"""Gossip averaging (Blot et al. 2016, arXiv:1611.09726), written with the protocol alone: every few steps each rank averages
its parameters with those of one neighbour, so there is no common average until somebody needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rankwise.dist import comm
from rankwise.sync import Held, Local, StepResult


class Gossip:
    promise = "averaged"
    held = Held("own", "own", "own")

    def __init__(self, every: int = 3) -> None:
        self.every, self.steps, self.sent_s = every, 0, 0.0
        self.own: dict[str, Any] | None = None

    @property
    def wait_s(self) -> float:
        return self.sent_s

    def attach(self, model: nn.Module, optimizer: Any, **given: Any) -> Gossip:
        self.model, self.optimizer = model, optimizer
        self.local = Local().attach(model, optimizer, **given)
        return self

    def follow(self) -> None:
        self.local.follow()

    def meet(self) -> None:
        self.local.meet()

    def backward(self, loss_sum: torch.Tensor, count: Any, *, last: bool = False) -> None:
        self.local.backward(loss_sum, count, last=last)

    def step(self) -> StepResult:
        mine = self.local.step().mine
        self.steps += 1
        if self.steps % self.every == 0 and not comm.is_alone():
            far = 1 + (self.steps // self.every - 1) % (comm.world_size() - 1)  # another neighbour each time
            for parameter in self.model.parameters():
                parts = [torch.empty_like(parameter) for _ in range(comm.world_size())]
                dist.all_gather(parts, parameter.detach())
                with torch.no_grad():
                    parameter.copy_((parameter + parts[(comm.rank() + far) % comm.world_size()]) / 2)
        return StepResult(mine, None)

    @contextlib.contextmanager
    def averaged(self, module: nn.Module | None = None) -> Iterator[None]:
        tensors = (self.model if module is None else module).state_dict()
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        self._average(tensors)
        if module is None:
            self.own = {"model": kept, "optimizer": self.optimizer.state_dict()}
        try:
            yield
        finally:
            self.own = None
            for name, tensor in tensors.items():
                tensor.copy_(kept[name])

    def _average(self, tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            comm.all_reduce(tensor, "mean") if tensor.is_floating_point() else comm.broadcast([tensor])

    def finish(self) -> None:
        self._average(self.model.state_dict())

    def check_length(self, steps: int) -> None:
        pass

    def figures(self) -> dict[str, float]:
        return {}

    def describe(self) -> str:
        return f"gossip with one neighbour every {self.every} steps"

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "local": self.local.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.local.load_state_dict(state["local"])

    def rank_state_dict(self) -> dict[str, Any] | None:
        return self.own

    def load_rank_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
