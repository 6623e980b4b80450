"""A scheduler that is stepped on a metric."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, StepLR

from rankwise.actions import Plateau
from rankwise.actions.of_trainer import Actions
from rankwise.errors import ConfigError
from rankwise.training.state import TrainState


@pytest.fixture
def state() -> TrainState:
    model = nn.Linear(1, 1)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=1)


def test_it_steps_on_a_figure_of_this_very_step_alone(state: TrainState) -> None:
    step = Plateau(ReduceLROnPlateau(state.optimizer, patience=0), "eval_loss")
    state.measure({"eval_loss": 1.0})
    step(state)
    state.step = 2
    step(state)  # nothing was measured: no bad epoch
    assert state.optimizer.param_groups[0]["lr"] == 0.1
    state.measure({"eval_loss": 2.0})
    step(state)
    assert state.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_metric_that_an_evaluation_does_not_measure_is_an_error_that_names_those_it_does(state: TrainState) -> None:
    step = Plateau(ReduceLROnPlateau(state.optimizer), "eval_los")
    state.measure({"loss": 1.0})
    step(state)  # a metric of training: the evaluation comes later
    state.measure({"eval_loss": 1.0, "eval_accuracy": 0.5})
    with pytest.raises(ConfigError, match="nothing measures 'eval_los'; the evaluation has measured eval_loss, eval_accuracy"):
        step(state)


def test_a_metric_that_an_earlier_attempt_has_measured_is_not_reported_as_unknown(
    state: TrainState, capsys: pytest.CaptureFixture[str]
) -> None:
    plateau = Plateau(ReduceLROnPlateau(state.optimizer), "eval_loss")
    state.metrics = {"eval_loss": 1.0}  # as restored
    state.measure({"accuracy": 0.5})
    plateau(state)
    assert capsys.readouterr().out == ""


def test_another_evaluation_may_be_due_before_the_one_that_is_followed(
    state: TrainState, capsys: pytest.CaptureFixture[str]
) -> None:
    plateau = Plateau(ReduceLROnPlateau(state.optimizer, patience=0), "eval_loss")
    state.measure({"eval_test_loss": 1.0})
    plateau(state)
    assert capsys.readouterr().out.startswith("warning: Plateau waits for 'eval_loss', which nothing has measured so far")
    state.step = 2
    state.measure({"eval_loss": 1.0})
    plateau(state)
    state.step = 5
    state.measure({"eval_test_loss": 1.0, "eval_gap": 0.1})
    plateau(state)
    assert state.optimizer.param_groups[0]["lr"] == 0.1


def test_another_scheduler_is_refused(state: TrainState) -> None:
    with pytest.raises(ConfigError, match=r"^Plateau\(scheduler=.*\): give torch's ReduceLROnPlateau"):
        Plateau(StepLR(state.optimizer, 1))  # type: ignore[arg-type]


def test_a_scheduler_of_another_optimizer_is_an_error_because_it_would_change_nothing(state: TrainState) -> None:
    other = torch.optim.SGD(state.model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau does not belong to the Trainer's optimizer"):
        Plateau(ReduceLROnPlateau(other)).attach(SimpleNamespace(state=state))
    Plateau(ReduceLROnPlateau(state.optimizer)).attach(SimpleNamespace(state=state))


def test_it_can_be_saved_beside_the_scheduler_of_a_warm_up(state: TrainState) -> None:
    warm_up = LinearLR(state.optimizer, total_iters=2)
    plateau = Plateau(ReduceLROnPlateau(state.optimizer), name="plateau")
    assert {"scheduler": warm_up, "plateau": plateau}.items() <= Actions([plateau], warm_up).saved({}).items()
    with pytest.raises(
        ConfigError, match="Plateau has the name 'scheduler', which the Trainer itself uses; give it another: name="
    ):
        Actions([Plateau(ReduceLROnPlateau(state.optimizer))], warm_up).saved({})
