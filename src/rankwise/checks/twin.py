"""Copies of a model and of everything that trains it, which a check may train.

with Twin(model, optimizer) as twin:
    step_fn(twin.model, batch)[0].backward();  twin.optimizer.step()
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from rankwise.training.model import begin_training
from rankwise.training.optimizer import named_parameters, outside


def computed(model: nn.Module) -> dict[int, Any]:
    """A memo for copy.deepcopy: attributes of modules that are computed from parameters (`torch.nn.utils.weight_norm`), and
    that torch does not copy, as plain values. Each forward pass computes them again."""
    values = (value for module in model.modules() for value in vars(module).values())
    return {id(v): v.detach().clone() for v in values if isinstance(v, torch.Tensor) and not v.is_leaf}


def _add_own_attributes(twin: Optimizer, optimizer: Optimizer, memo: dict[int, Any]) -> None:
    """torch copies only the groups and the state; a subclass may have attributes of its own (the optimizers that it wraps).
    Not `step`: a scheduler replaces it by one that calls the original."""
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and not hasattr(type(twin), name):
            setattr(twin, name, copy.deepcopy(value, memo))


class Twin:
    """`others`: objects that refer to the optimizer, such as its scheduler.

    step_fn uses parameters outside the model (a loss with weights) directly, so they cannot be copied. Inside `with` they have
    the values and gradients of this twin, outside those of the user.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *others: Any) -> None:
        self._outside = list(outside(model, optimizer).values())
        memo: dict[int, Any] = {id(p): p for p in self._outside} | computed(model)
        self.model: nn.Module = copy.deepcopy(model, memo)
        self.optimizer: Optimizer = copy.deepcopy(optimizer, memo)
        _add_own_attributes(self.optimizer, optimizer, memo)
        self.others: list[Any] = [copy.deepcopy(each, memo) for each in others]
        begin_training(self.model)
        self._apart: list[tuple[torch.Tensor, torch.Tensor | None]] = [(p.detach().clone(), None) for p in self._outside]

    def named(self) -> dict[str, nn.Parameter]:
        """All parameters of the model, and others that the optimizer trains."""
        return named_parameters(self.model, self.optimizer)

    def __enter__(self) -> Self:
        self._exchange()
        return self

    def __exit__(self, *_: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        apart, self._apart = self._apart, [(p.data, p.grad) for p in self._outside]
        for parameter, (value, gradient) in zip(self._outside, apart, strict=True):
            parameter.data, parameter.grad = value, gradient
