"""Copies of what is trained, for the self-test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from rankwise.checks.twin import Twin


class Both(Optimizer):
    """As docs/own_loop.md shows it."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    def step(self, closure: Any = None) -> None:
        for each in self.optimizers:
            each.step()


@pytest.mark.filterwarnings("ignore:Seems like .optimizer.step:UserWarning")  # the scheduler's wrapper is not copied
def test_the_copy_of_an_optimizer_has_the_attributes_of_its_class_and_trains_the_copied_model() -> None:
    model = nn.Linear(3, 2)
    optimizer = Both(SGD([model.weight], lr=0.1), AdamW([model.bias], lr=0.1))
    scheduler = StepLR(optimizer, 1, gamma=0.5)  # replaces `step` of the object
    before = [p.detach().clone() for p in model.parameters()]
    with Twin(model, optimizer, scheduler) as twin:
        twin.model(torch.ones(4, 3)).square().sum().backward()
        twin.optimizer.step()
        twin.others[0].step()
    for parameter, copied, value in zip(model.parameters(), twin.model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert not torch.equal(copied, value)
    assert isinstance(twin.optimizer, Both)
    assert [each.param_groups[0]["lr"] for each in twin.optimizer.optimizers] == [0.05, 0.05]
    assert [each.param_groups[0]["lr"] for each in optimizer.optimizers] == [0.1, 0.1]
