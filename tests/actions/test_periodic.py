"""Actions with triggers: when they run."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from rankwise.actions.periodic import every
from rankwise.errors import ConfigError
from rankwise.training.state import TrainState


@pytest.fixture
def state() -> TrainState:
    model = nn.Linear(1, 1)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))


def fired(state: TrainState, moments: list[dict[str, Any]], **triggers: Any) -> list[int]:
    """The moments at which an action with these triggers is called."""
    called: list[int] = []
    now = -1
    action = every(lambda s: called.append(now), **triggers)
    for now, moment in enumerate(moments):  # noqa: B007  # read by the lambda
        state.epoch_ended = state.last = False
        for name, value in moment.items():
            setattr(state, name, value)
        action(state)
    return called


def steps(n: int) -> list[dict[str, Any]]:
    return [{"step": s, "epoch": s // 3, "epoch_ended": s % 3 == 0, "last": s == n} for s in range(1, n + 1)]


def test_every_so_many_steps(state: TrainState) -> None:
    assert fired(state, steps(10), steps=3) == [2, 5, 8]
    assert fired(state, steps(10), steps=1) == list(range(10))
    assert fired(state, steps(10), steps=11) == []


def test_every_so_many_epochs(state: TrainState) -> None:
    assert fired(state, steps(10), epochs=1) == [2, 5, 8]
    assert fired(state, steps(10), epochs=2) == [5]


def test_at_the_end_once_though_two_triggers_are_due(state: TrainState) -> None:
    assert fired(state, steps(10), at_end=True) == [9]
    assert fired(state, steps(9), steps=3, epochs=1, at_end=True) == [2, 5, 8]


def test_after_a_stop_by_the_script_once_and_again_in_the_next_loop(state: TrainState) -> None:
    called: list[str] = []
    both, final = (every(lambda _, n=n: called.append(n), steps=s, at_end=True) for n, s in (("both", 2), ("final", None)))
    often = every(lambda _: called.append("often"), steps=2)
    for _ in range(2):
        for action in (both, final, often):
            action.begin(by_gate=False)
            state.step = 4
            action(state)
            action.at_end(state)
    assert called == ["both", "final", "often"] * 2


def test_an_action_that_would_never_be_called_is_an_error() -> None:
    for triggers in ({}, {"steps": 0}, {"epochs": 0}, {"seconds": -1.0}):
        with pytest.raises(ConfigError):
            every(lambda state: None, **triggers)


def test_seconds_are_those_of_the_agreed_clock(state: TrainState) -> None:
    clock = [{"clock_s": s} for s in (0.0, 5.0, 9.9, 10.0, 10.0, 19.9, 31.0, 31.0, 41.0)]
    assert fired(state, clock, seconds=10.0) == [3, 6, 8]


def test_two_actions_of_one_function_have_their_own_clocks(state: TrainState) -> None:
    called: list[str] = []
    fast = every(lambda s: called.append("fast"), seconds=1)
    slow = every(lambda s: called.append("slow"), seconds=3)
    for second in range(1, 7):
        state.clock_s = second
        fast(state)
        slow(state)
    assert called.count("fast") == 6
    assert called.count("slow") == 2


def test_the_figures_of_a_run_survive_a_file_and_share_nothing(state: TrainState) -> None:
    state.step, state.epoch, state.metrics = 7, 2, {"loss": 0.5}
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    record = torch.load(file, weights_only=True)
    state.metrics["loss"] = 0.1
    other = TrainState(state.model, state.optimizer)
    other.load_state_dict(record)
    assert (other.step, other.epoch, other.metrics) == (7, 2, {"loss": 0.5})
    other.metrics["loss"] = 3.0
    assert record["metrics"] == {"loss": 0.5}
