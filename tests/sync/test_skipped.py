"""Steps that are skipped: counted, the first ones printed, too many in a row an error."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from torch import nn

from rankwise.dist import comm
from rankwise.errors import StepError
from rankwise.sync import Shared
from rankwise.sync.skipped import SkippedSteps
from rankwise.training.finite import Weights
from rankwise.training.state import TrainState

NAN = Shared(total=8.0, grad_norm=float("nan"), finite=False, skipped=1)
NOTHING = Shared(total=0.0, grad_norm=0.0, finite=True, skipped=1)


@pytest.fixture
def state() -> TrainState:
    model = nn.Linear(1, 1)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def skipped(said: list[str]) -> SkippedSteps:
    return SkippedSteps(Weights(), said.append)


def skip(skipped: SkippedSteps, state: TrainState, steps: int, result: Shared = NAN) -> None:
    for _ in range(steps):
        state.step += 1
        skipped.add(state, result)


def test_the_first_three_are_printed_and_all_are_counted(skipped: SkippedSteps, state: TrainState, said: list[str]) -> None:
    skip(skipped, state, 5)
    assert state.steps_left_out == skipped.in_a_row == 5
    assert said == [
        "warning: step 1 is skipped on all ranks: the gradient is not finite (1 so far)",
        "warning: step 2 is skipped on all ranks: the gradient is not finite (2 so far)",
        "warning: step 3 is skipped on all ranks: the gradient is not finite (3 so far); later ones are only counted; "
        "100 in a row stop the run",
    ]


def _skipped_by_two_of_four() -> list[str]:
    said: list[str] = []
    model = nn.Linear(1, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state.step = 1
    SkippedSteps(Weights(), said.append).add(state, NAN, loss_is_finite=comm.rank() not in (1, 3))
    return said


def test_the_ranks_whose_loss_is_not_finite_are_reported() -> None:
    for said in on_ranks(4, _skipped_by_two_of_four):
        assert said == [
            "warning: step 1 is skipped on all ranks: the gradient is not finite, and neither is the loss of ranks 1, 3 "
            "(1 so far)"
        ]


def test_a_hundred_in_a_row_end_the_run_and_a_step_between_does_not(skipped: SkippedSteps, state: TrainState) -> None:
    skip(skipped, state, 99)
    skipped.in_a_row = 0
    skip(skipped, state, 99)
    with pytest.raises(StepError, match="for 100 steps in a row"):
        skip(skipped, state, 1)


def test_a_run_that_has_trained_nothing_is_an_error_in_its_last_step(skipped: SkippedSteps, state: TrainState) -> None:
    skip(skipped, state, 1, NOTHING)
    state.last = True
    with pytest.raises(StepError, match=r"the counts of all ranks add up to 0, in each of the 2 steps: nothing was trained"):
        skip(skipped, state, 1, NOTHING)


def test_a_resumed_run_whose_last_steps_are_skipped_has_trained_something(skipped: SkippedSteps, state: TrainState) -> None:
    state.step = 4
    skipped.begin()
    skip(skipped, state, 1, NOTHING)
    state.last = True
    skip(skipped, state, 1, NOTHING)
    assert state.steps_left_out == 2


def test_weights_that_are_not_finite_are_named_rather_than_the_gradient(skipped: SkippedSteps, state: TrainState) -> None:
    with torch.no_grad():
        state.model.weight.fill_(float("nan"))  # type: ignore[union-attr, operator]
    with pytest.raises(StepError, match="the weights are not finite, since step 0: weight"):
        skip(skipped, state, 1)


def test_a_result_of_several_steps_counts_as_many(skipped: SkippedSteps, state: TrainState, said: list[str]) -> None:
    for number in range(1, 7):
        state.step = 16 * number
        skipped.add(state, NAN._replace(steps=16))
    assert state.steps_left_out == skipped.in_a_row == 96
    assert said[0] == "warning: steps 1 to 16 are skipped on all ranks: the gradient is not finite (16 so far)"
    assert "steps 33 to 48 are skipped" in said[2]
    assert len(said) == 3
    state.step = 112
    with pytest.raises(StepError, match="for 100 steps in a row"):
        skipped.add(state, NAN._replace(steps=16))
