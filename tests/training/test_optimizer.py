"""Preparing an optimizer for training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

from rankwise.dist.world import World
from rankwise.errors import ConfigError
from rankwise.training import optimizer as optimizers


def sgd() -> SGD:
    return SGD(nn.Linear(1, 1).parameters(), lr=0.1)


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers.comm, "world", lambda: World(0, 4, 0, 4, 0, source="test"))


def test_the_learning_rate_is_scaled_with_its_scheduler_and_the_line_says_so(four_ranks: None) -> None:
    optimizer = sgd()
    scheduler = StepLR(optimizer, step_size=1)
    optimizers.scale_lr(optimizer, "linear", scheduler)
    done = optimizers.scaled(optimizer)
    assert done is not None
    assert done.describe() == "learning rate 0.1 x 4 = 0.4 (linear in the ranks)"
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    assert scheduler.base_lrs == pytest.approx([0.4])
    optimizers.scale_lr(root := sgd(), "sqrt")
    assert root.param_groups[0]["lr"] == pytest.approx(0.2)


def test_what_makes_the_training_this_one_is_the_rate_before_it_was_scaled(four_ranks: None) -> None:
    optimizer = sgd()
    before = optimizers.settings(optimizer)
    optimizers.scale_lr(optimizer, "linear")
    assert optimizers.settings(optimizer) == before | {"lr_scale": "linear"}
    assert (before["lr"], before["lr_scale"]) == (0.1, "none")


def test_a_rate_that_is_not_scaled_needs_no_line_and_one_is_scaled_once(four_ranks: None) -> None:
    optimizer = sgd()
    assert optimizers.scaled(optimizer) is None
    optimizers.check_scaled(optimizer, 64)
    optimizers.scale_lr(optimizer, "linear")
    with pytest.raises(ConfigError, match=r"was called before for this optimizer \(linear\)"):
        optimizers.scale_lr(optimizer, "sqrt")
    with pytest.raises(ConfigError, match="is for batch_size: a fixed global batch of 64 needs the same"):
        optimizers.check_scaled(optimizer, 64)
    with pytest.raises(ConfigError, match=r"scale_lr\(rule='cubic'\): give one of 'linear', 'sqrt'"):
        optimizers.scale_lr(sgd(), "cubic")


def test_the_kernel_is_the_fused_one_unless_somebody_chose() -> None:
    model = nn.Linear(1, 1)
    left_open, chosen = AdamW(model.parameters()), AdamW(model.parameters(), fused=False)
    for optimizer in (left_open, chosen, torch.optim.Rprop(model.parameters())):
        optimizers.fuse(optimizer)
    assert optimizers.is_fused(left_open)
    assert not optimizers.is_fused(chosen)


@pytest.mark.parametrize("kind", [AdamW, torch.optim.SGD])
def test_a_parameter_whose_memory_has_gaps_keeps_the_kernel_that_is_right_for_it(kind: type[Optimizer]) -> None:
    """torch's fused kernel on a CPU ignores the gaps, and writes into them."""
    sliced, turned = nn.Parameter(torch.ones(4, 6)[:, :3]), nn.Parameter(torch.ones(4, 6).T)
    with_gaps, without = kind([sliced], lr=0.1), kind([turned], lr=0.1)
    for optimizer in (with_gaps, without):
        optimizers.fuse(optimizer)
    assert not optimizers.is_fused(with_gaps)
    assert optimizers.is_fused(without)


def test_the_schedulers_inside_of_others_get_the_scaled_rate_too(four_ranks: None) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    inner = [ConstantLR(optimizer), ExponentialLR(optimizer, 0.9), ConstantLR(optimizer)]
    chained: torch.optim.lr_scheduler.LRScheduler = ChainedScheduler(inner[1:], optimizer)
    chained.base_lrs = [0.1]
    outer = SequentialLR(optimizer, [inner[0], chained], milestones=[3])
    optimizers.scale_lr(optimizer, "linear", outer)
    assert all(scheduler.base_lrs == [0.4] for scheduler in (*inner, chained))
    assert optimizer.param_groups[0]["initial_lr"] == 0.4


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    model = nn.Linear(1, 1)
    mine, other = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)
    optimizers.check(model, mine, StepLR(mine, 1))
    optimizers.check(model, mine, SequentialLR(mine, [StepLR(mine, 1), StepLR(mine, 2)], [3]))
    with pytest.raises(ConfigError, match=r"^the scheduler StepLR does not belong to the Trainer's optimizer"):
        optimizers.check(model, mine, StepLR(other, 1))


class OfEpochs:
    """A scheduler like those of timm."""

    def step(self, epoch: int, metric: float | None = None) -> None:
        raise NotImplementedError


class OfSteps:
    def step(self, epoch: int | None = None, *others: Any, **more: Any) -> None:
        raise NotImplementedError


def test_a_scheduler_whose_step_requires_arguments_is_refused_before_the_first_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ConfigError, match=r"of OfEpochs requires epoch; .*: actions=\[lambda state: scheduler.step\(epoch=...\)\]"
    ):
        optimizers.check(model, optimizer, OfEpochs())
    for scheduler in (OfSteps(), ReduceLROnPlateau(optimizer), None):
        optimizers.check(model, optimizer, scheduler)


def test_a_scaled_rate_has_the_same_schedule_times_the_factor(four_ranks: None) -> None:
    """Whatever the scheduler keeps of the rates: the largest, the smallest, of each group."""
    kinds: list[Callable[[Optimizer], Any]] = [
        lambda o: OneCycleLR(o, [0.1, 0.2], total_steps=8),
        lambda o: CyclicLR(o, [0.01, 0.02], [0.1, 0.2], step_size_up=3),
        lambda o: CosineAnnealingLR(o, T_max=4, eta_min=0.03),
        lambda o: CosineAnnealingWarmRestarts(o, T_0=3, eta_min=0.03),
        lambda o: ReduceLROnPlateau(o, patience=0, min_lr=[0.02, 0.04]),
        lambda o: SWALR(o, [0.01, 0.05], anneal_epochs=4),
        lambda o: SequentialLR(o, [ConstantLR(o), CosineAnnealingLR(o, T_max=4, eta_min=0.03)], [2]),
    ]

    def rates(kind: Callable[[Optimizer], Any], is_scaled: bool) -> list[float]:
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.2)]
        optimizer = SGD(groups, momentum=0.9)
        scheduler = kind(optimizer)
        if is_scaled:
            optimizers.scale_lr(optimizer, "linear", scheduler)
        found = []
        for _ in range(7):
            found += [group["lr"] for group in optimizer.param_groups]
            optimizer.step()
            scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
        return found

    for kind in kinds:
        assert rates(kind, True) == pytest.approx([4 * rate for rate in rates(kind, False)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_trains_parameters_of_16_bits_on_a_cpu(dtype: torch.dtype, momentum: float) -> None:
    """torch's fused kernel leaves whole SIMD blocks as they are (pytorch/pytorch#191763)."""
    model = torch.nn.Linear(64, 1).to(dtype)
    before = model.weight.detach().clone()
    optimizer = SGD(model.parameters(), lr=0.5, momentum=momentum)
    optimizers.fuse(optimizer)
    model(torch.ones(1, 64, dtype=dtype)).sum().backward()
    optimizer.step()
    assert bool((model.weight != before).all())


def test_a_checkpoint_with_the_kernel_that_is_broken_here_does_not_bring_it_back(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(64, 1).bfloat16()
    old = SGD(model.parameters(), lr=0.5, fused=True)
    optimizers.fuse(old)
    assert capsys.readouterr().out == (
        "warning: torch's fused SGD leaves parameters in bf16 and fp16 on a CPU as they are (pytorch/pytorch#191763); "
        "give SGD(..., fused=False)\n"
    )
    new = SGD(model.parameters(), lr=0.5)
    new.load_state_dict(old.state_dict())
    optimizers.align_state(new)
    assert new.param_groups[0]["fused"] is False
