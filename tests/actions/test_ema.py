"""The averaged model: what it contains, what changes it, and that a resumed run continues with it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from ranks import on_ranks
from test_trainer import data, make_model, trainer
from torch import nn

from rankwise import Evaluate, TrainState, every
from rankwise.actions import EMA
from rankwise.dist import log
from rankwise.errors import ConfigError

Weights = dict[str, np.ndarray[Any, Any]]
DECAY = 0.8


def copied(module: nn.Module) -> Weights:
    return {name: tensor.detach().clone().numpy() for name, tensor in module.state_dict().items()}


def followed(folder: Path, stop: int | None = None) -> tuple[list[Weights], list[Weights], list[tuple[int, float]]]:
    """(the weights of the model after each step, those of the average, the metrics of the average). With `stop`, a first run
    ends after this step, and the results are those of a second run that resumes."""
    trained, averaged, measured = [], [], []

    def note(state: TrainState) -> None:
        trained.append(copied(state.model))
        averaged.append(copied(ema.model))
        if "ema_loss" in state.new_metrics:
            measured.append((state.step, state.new_metrics["ema_loss"]))

    for steps in (stop, 8):
        if steps is None:
            continue
        trained, averaged, measured = [], [], []
        model = make_model()
        ema = EMA(model, decay=DECAY)
        actions = [ema, Evaluate(data(), model=ema, name="ema", every_steps=3), note]
        trainer(folder, model=model, max_epochs=None, max_steps=steps, actions=actions).fit()
    return trained, averaged, measured


@pytest.mark.parametrize("n", [2, 1])
@pytest.mark.one_in(2)
def test_it_is_the_moving_average_of_the_weights_and_evaluated_as_such_on_any_number_of_ranks(n: int, tmp_path: Path) -> None:
    for trained, averaged, measured in on_ranks(n, followed, tmp_path):
        expected = dict(trained[0])
        for k, weights in enumerate(trained):
            if k:
                expected = {name: DECAY * expected[name] + (1 - DECAY) * weights[name] for name in weights}
            for name in weights:
                np.testing.assert_allclose(averaged[k][name], expected[name], rtol=1e-5, atol=1e-6)
        assert [step for step, _ in measured] == [3, 6, 8]
        model, (x, y, _) = make_model(), data().tensors  # type: ignore[attr-defined]
        model.load_state_dict({name: torch.tensor(values) for name, values in averaged[2].items()})
        assert measured[0][1] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-5)


@pytest.mark.parametrize("n", [2, 1])
@pytest.mark.one_in(2)
def test_a_resumed_run_goes_on_with_the_same_average_bit_for_bit(n: int, tmp_path: Path) -> None:
    unbroken = on_ranks(n, followed, tmp_path / "unbroken")
    resumed = on_ranks(n, followed, tmp_path / "resumed", 5)
    for (_, whole, figures), (_, second, later) in zip(unbroken, resumed, strict=True):
        assert len(second) == 3
        for before, after in zip(whole[5:], second, strict=True):
            assert all(np.array_equal(before[name], after[name]) for name in before)
        assert later == figures[1:]


def state_of(model: nn.Module) -> TrainState:
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_step_that_was_skipped_moves_nothing_and_one_before_it_does_not_count() -> None:
    model = nn.Linear(2, 1)
    ema, state = EMA(model, decay=0.5), state_of(model)
    now_and_then = every(ema, steps=2)
    for step in (1, 2):
        state.step, state.skipped = step, step == 1
        now_and_then(state)
    before = copy.deepcopy(ema.model)
    assert torch.equal(before.weight, model.weight)  # type: ignore[arg-type]
    with torch.no_grad():
        model.weight.add_(1.0)
    state.step, state.skipped = 4, True
    now_and_then(state)
    assert torch.equal(ema.model.weight, before.weight)  # type: ignore[arg-type]
    state.step, state.skipped = 6, False
    now_and_then(state)
    torch.testing.assert_close(ema.model.weight, before.weight + 0.5)  # type: ignore[operator]


def test_buffers_are_copied_and_a_model_with_another_layer_is_an_error_that_says_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ema, state = EMA(model), state_of(model)
    model(torch.randn(4, 2))
    ema(state)
    averaged: Any = ema.model
    assert torch.equal(averaged[1].running_mean, model[1].running_mean)
    model[0] = nn.Linear(2, 3)
    with pytest.raises(
        ConfigError, match=r"the action ema: the model's parameters have changed since EMA\(model\) was created"
    ):
        ema(state)


class LateTable(nn.Module):
    """It creates a buffer in its first pass."""

    table: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None)
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        found: torch.Tensor = self.linear(self.norm(x) + self.table)
        return found


def test_a_buffer_that_the_first_pass_creates_is_in_the_average_too() -> None:
    model = LateTable()
    ema = EMA(model, DECAY)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model(torch.randn(8, 4) + 5)
        ema(state)
    assert torch.equal(ema.model.table, model.table)  # type: ignore[arg-type]
    assert torch.equal(ema.model.norm.running_mean, model.norm.running_mean)  # type: ignore[union-attr, arg-type]


def with_an_average_that_nothing_updates(folder: Path) -> list[str]:
    told: list[str] = []
    with mock.patch.object(log, "warning_once", told.append):
        for name in ("forgotten", "given"):
            model = make_model()
            ema = EMA(model)
            evaluation = Evaluate(data(), model=ema, name=name, every_steps=1)
            actions = [evaluation, ema] if name == "given" else [evaluation]
            trainer(folder / name, model=model, max_epochs=None, max_steps=3, actions=actions).fit()
    return told


def test_an_average_that_is_evaluated_and_is_no_action_is_a_warning(tmp_path: Path) -> None:
    [told] = on_ranks(1, with_an_average_that_nothing_updates, tmp_path)
    assert {text for text in told if "actions" in text} == {
        "Evaluate(name='forgotten'): its EMA has averaged no step so far, so this measures the initial model; add it to "
        "actions=[...]"
    }
