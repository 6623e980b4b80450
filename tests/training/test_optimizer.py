"""What is done to an optimizer before training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR, SequentialLR, StepLR

from rankwise.errors import ConfigError
from rankwise.training import optimizer as optimizers


def sgd() -> SGD:
    return SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def test_the_learning_rate_is_scaled_with_its_scheduler_and_the_line_says_so() -> None:
    optimizer = sgd()
    scheduler = StepLR(optimizer, step_size=1)
    line = optimizers.prepare(optimizer, scheduler, None, "linear", ranks=4)
    assert line == "learning rate 0.1 x 4 = 0.4 (linear in the ranks)"
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    assert scheduler.base_lrs == pytest.approx([0.4])


@pytest.mark.parametrize(("scale", "ranks"), [("none", 4), ("sqrt", 1)])
def test_a_rate_that_is_not_scaled_stays_and_needs_no_line(scale: str, ranks: int) -> None:
    optimizer = sgd()
    assert optimizers.prepare(optimizer, None, None, scale, ranks) == ""
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_rate_of_a_global_batch_that_does_not_depend_on_the_ranks_is_not_scaled() -> None:
    with pytest.raises(ConfigError, match="goes with batch_size: a global batch of 64 is the same"):
        optimizers.prepare(sgd(), None, None, "linear", 2, fixed_batch=64)
    with pytest.raises(ConfigError, match="choose one of none, linear, sqrt"):
        optimizers.prepare(sgd(), None, None, "cubic", 2)


def test_the_kernel_is_as_asked() -> None:
    optimizer = sgd()
    optimizers.prepare(optimizer, None, False, "none", 1)
    assert not optimizers.is_fused(optimizer)
    with pytest.raises(ConfigError, match="Rprop has no fused kernel"):
        optimizers.prepare(torch.optim.Rprop(nn.Linear(1, 1).parameters()), None, True, "none", 1)


def test_the_schedulers_inside_of_others_get_the_scaled_rate_too() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    inner = [ConstantLR(optimizer), ExponentialLR(optimizer, 0.9), ConstantLR(optimizer)]
    chained: torch.optim.lr_scheduler.LRScheduler = ChainedScheduler(inner[1:], optimizer)
    chained.base_lrs = [0.1]
    outer = SequentialLR(optimizer, [inner[0], chained], milestones=[3])
    optimizers.scale_lr(optimizer, outer, 4.0)
    assert all(scheduler.base_lrs == [0.4] for scheduler in (*inner, chained))
    assert optimizer.param_groups[0]["initial_lr"] == 0.4
