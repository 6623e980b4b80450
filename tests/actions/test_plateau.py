"""A scheduler that is stepped on a metric: which one, and whether anything will measure it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from rankwise.actions.plateau import check_metric, step_plateau
from rankwise.errors import ConfigError
from rankwise.training.state import TrainState


@pytest.fixture
def state() -> TrainState:
    model = nn.Linear(1, 1)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=1)


def test_it_steps_on_a_figure_of_this_very_step_alone(state: TrainState) -> None:
    scheduler = ReduceLROnPlateau(state.optimizer, patience=0)
    step = step_plateau(scheduler, "eval_loss")
    state.measure({"eval_loss": 1.0})
    step(state)
    state.step = 2
    step(state)  # nothing was measured: no bad epoch
    assert state.optimizer.param_groups[0]["lr"] == 0.1
    state.measure({"eval_loss": 2.0})
    step(state)
    assert state.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_metric_that_nothing_measures_or_that_steps_nothing_is_an_error(state: TrainState) -> None:
    plateau, by_step = ReduceLROnPlateau(state.optimizer), StepLR(state.optimizer, 1)
    check_metric(plateau, None, evaluates=True, by_eval_fn=False, acts=False)
    check_metric(plateau, "mine", evaluates=False, by_eval_fn=False, acts=True)  # an action may measure it
    check_metric(by_step, None, evaluates=False, by_eval_fn=False, acts=False)
    with pytest.raises(ConfigError, match="give eval_data"):
        check_metric(plateau, None, evaluates=False, by_eval_fn=False, acts=False)
    with pytest.raises(ConfigError, match="which metric steps ReduceLROnPlateau"):
        check_metric(plateau, None, evaluates=True, by_eval_fn=True, acts=False)
    for scheduler in (by_step, None):
        with pytest.raises(ConfigError, match="leave it out for another scheduler"):
            check_metric(scheduler, "eval_loss", evaluates=True, by_eval_fn=False, acts=False)
