"""A learning rate scheduler among the actions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR

from rankwise.actions.schedule import Schedule
from rankwise.dist import log
from rankwise.training.state import TrainState

TOLD = "warning: the Trainer steps the scheduler after each optimizer step, and the script does too; remove"


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    log._warned.clear()
    yield
    log._warned.clear()


def state_of_training() -> TrainState:
    model = nn.Linear(1, 1)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_it_steps_once_a_step_but_not_for_one_that_was_skipped(capfd: pytest.CaptureFixture[str]) -> None:
    state = state_of_training()
    inner = [LinearLR(state.optimizer, 0.5, 1.0, total_iters=2), StepLR(state.optimizer, 1, gamma=0.5)]
    schedule = Schedule(SequentialLR(state.optimizer, inner, [2]))
    rates = []
    for skipped in (False, True, False, False, True, False):
        state.step += 1
        state.optimizer.step()
        state.skipped = skipped
        schedule(state)
        rates.append(state.optimizer.param_groups[0]["lr"])
    assert rates == [0.75, 0.75, 1.0, 0.5, 0.5, 0.25]
    assert capfd.readouterr().out == ""


def test_one_that_the_script_steps_too_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    state = state_of_training()
    scheduler = StepLR(state.optimizer, 10)
    schedule = Schedule(scheduler)
    for _ in range(4):
        state.step += 1
        state.optimizer.step()
        schedule(state)
        scheduler.step()
    assert capfd.readouterr().out.count(TOLD) == 1


def test_one_that_a_checkpoint_has_set_back_is_not_stepped_by_the_script(capfd: pytest.CaptureFixture[str]) -> None:
    state = state_of_training()
    scheduler = StepLR(state.optimizer, 10)
    schedule = Schedule(scheduler)
    saved = scheduler.state_dict()
    for step in (1, 2, 1, 2, 3):
        if step == 1:
            scheduler.load_state_dict(saved)
        state.step = step
        state.optimizer.step()
        schedule(state)
    assert capfd.readouterr().out == ""
