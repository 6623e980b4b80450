"""When a loop saves, and what happens if a save fails."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankwise.checkpoint.saving import Saving
from rankwise.errors import CheckpointError
from rankwise.training.state import TrainState


class Recorder:
    """Replaces Checkpoints: records which steps were saved, and raises the errors that it has."""

    def __init__(self, keep_best: str | None = None, at_steps: Collection[int] = ()) -> None:
        self.keep_best, self.at_steps = keep_best, at_steps
        self.steps: list[int] = []
        self.metrics: list[Mapping[str, float]] = []
        self.save_errors: list[CheckpointError] = []
        self.wait_errors: list[CheckpointError] = []
        self.failure: BaseException | None = None
        self.left: BaseException | None = None

    def save(self, parts: Any, step: int, info: Mapping[str, Any], metrics: Mapping[str, float]) -> Path:
        if self.save_errors:
            raise self.save_errors.pop()
        self.steps.append(step)
        self.metrics.append(metrics)
        return Path(f"step-{step}")

    def wait(self) -> None:
        if self.wait_errors:
            raise self.wait_errors.pop()

    def is_best(self, figures: Mapping[str, float]) -> bool:
        return figures["eval_loss"] < 1.0

    def close(self) -> BaseException | None:
        return self.left


@pytest.fixture
def state() -> TrainState:
    model = nn.Linear(1, 1)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=1)


class Loop:
    """A Saving, with what it printed and requested."""

    def __init__(self, **given: Any) -> None:
        self.checkpoints = Recorder(**given)
        self.said: list[str] = []
        self.readied: list[int] = []
        self.saving = Saving(
            self.checkpoints,  # type: ignore[arg-type]
            self.said.append,
            ready=lambda state: self.readied.append(state.step),
            info=dict,
            ends=lambda state: state.last,
        )


def test_a_step_is_saved_once_and_made_ready_before(state: TrainState) -> None:
    loop = Loop()
    loop.saving(state)
    loop.saving(state)
    assert loop.checkpoints.steps == loop.readied == [1]
    assert loop.saving.folder == Path("step-1")
    loop.saving.begin(step=1, saved=False)
    assert loop.saving.folder is None
    loop.saving(state)
    assert loop.checkpoints.steps == [1, 1]


def test_a_resumed_step_is_not_saved_again(state: TrainState) -> None:
    loop = Loop()
    loop.saving.begin(step=1, saved=True)
    loop.saving(state)
    assert loop.checkpoints.steps == []


def test_a_save_that_fails_is_a_warning_and_at_the_end_an_error(state: TrainState) -> None:
    loop = Loop()
    loop.checkpoints.save_errors = [CheckpointError("disk full")]
    loop.saving(state)
    assert loop.said == ["warning: disk full; training continues"]
    loop.saving(state)  # the step is not saved, so it tries again
    assert loop.checkpoints.steps == [1]
    state.step, state.last = 2, True
    loop.checkpoints.save_errors = [CheckpointError("disk full")]
    with pytest.raises(CheckpointError, match="disk full"):
        loop.saving(state)


def test_a_save_behind_the_loop_that_failed_is_said_once_and_tried_again_at_the_end(state: TrainState) -> None:
    loop = Loop()
    loop.saving.hear(state)
    loop.saving(state)
    error = loop.checkpoints.failure = CheckpointError("disk full")
    for _ in range(3):
        loop.saving.hear(state)
    loop.checkpoints.wait_errors = [error]
    loop.saving.at_end(state)
    assert loop.said == ["warning: disk full; training continues"]
    assert loop.checkpoints.steps == [1, 1]


def test_at_the_end_the_step_is_saved_again_only_where_that_is_asked_for(state: TrainState) -> None:
    loop = Loop()
    loop.saving(state)
    loop.saving.at_end(state)
    assert loop.checkpoints.steps == [1]
    loop.saving.at_end(state, again=True)
    assert loop.checkpoints.steps == [1, 1]


def test_named_steps_and_the_best_evaluation_are_saved(state: TrainState) -> None:
    loop = Loop(at_steps={3}, keep_best="eval_loss")
    losses = {2: 2.0, 4: 0.5}
    for state.step in range(1, 6):
        if state.step in losses:
            state.measure({"eval_loss": losses[state.step]})
        for action in loop.saving.further():
            action(state)
    assert loop.checkpoints.steps == [3, 4]
    assert loop.checkpoints.metrics == [{}, {"eval_loss": 0.5}]


def test_a_resumed_run_may_first_evaluate_something_else_than_the_metric_of_its_best(state: TrainState) -> None:
    loop = Loop(keep_best="eval_loss")
    state.measure({"eval_loss": 0.5})
    resumed = TrainState(state.model, state.optimizer)
    resumed.load_state_dict(state.state_dict())
    resumed.step = 2
    resumed.measure({"eval_other": 3.0})
    loop.saving.if_best(resumed)
    assert loop.checkpoints.steps == []


@pytest.mark.parametrize("keep_best", [None, "loss"])
def test_the_training_loss_is_no_occasion_to_save(keep_best: str | None) -> None:
    assert Loop(keep_best=keep_best).saving.further() == []


def test_what_nobody_has_heard_of_is_said_when_the_loop_closes(state: TrainState, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    loop.saving.close()
    loop.checkpoints.left = loop.checkpoints.failure = CheckpointError("disk full")
    loop.saving.close()
    assert capsys.readouterr().out == "warning: disk full\n"
    loop.saving.hear(state)
    loop.saving.close()
    assert capsys.readouterr().out == ""
