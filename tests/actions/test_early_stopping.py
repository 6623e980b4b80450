"""A run ends when its metric no longer improves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from test_trainer import data, make_model, trainer
from torch import nn
from torch.utils.data import TensorDataset

from rankwise import Evaluate, TrainState
from rankwise.actions import EarlyStopping
from rankwise.dist import log
from rankwise.errors import ConfigError


def stopped_after(action: EarlyStopping, values: list[float], metric: str = "eval_loss") -> tuple[int, str]:
    """(the number of measurements before the stop, the reason); 0 if it did not stop."""
    model = nn.Linear(1, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    asked: list[int] = []
    state.on_stop = lambda: asked.append(state.step)
    for k, value in enumerate(values, start=1):
        state.step = 10 * k
        state.measure({metric: value})
        action(state)
        if asked:
            return k, state.stop_reason
        state.step += 1
        action(state)  # nothing was measured
    return 0, state.stop_reason


@pytest.mark.parametrize(
    ("values", "patience", "min_delta", "after"),
    [
        ([3.0, 2.0, 1.0, 0.5, 0.2], 2, 0.0, 0),
        ([3.0, 2.0, 2.5, 2.0, 1.0], 2, 0.0, 4),  # equal is not an improvement
        ([3.0, 2.0, 2.5, 1.0, 1.5, 0.9], 2, 0.0, 0),  # an improvement restarts the count
        ([3.0, 2.95, 2.94, 2.85], 2, 0.1, 3),
        ([3.0, math.nan, math.nan, 1.0], 2, 0.0, 3),
        ([math.nan, math.nan], 2, 0.0, 2),
        ([3.0, 4.0], 1, 0.0, 2),
    ],
)
def test_it_stops_after_so_many_measurements_without_a_better_one(
    values: list[float], patience: int, min_delta: float, after: int
) -> None:
    count, reason = stopped_after(EarlyStopping("eval_loss", patience, min_delta=min_delta), values)
    assert count == after
    if after:
        finite = [value for value in values[:after] if math.isfinite(value)]
        best = f"{finite[0] if min_delta else min(finite):.4g}" if finite else "none was finite"
        by = f" by more than {min_delta}" if min_delta else ""
        assert reason == f"eval_loss has not improved{by} in {patience} measurements; best {best}"


def test_more_may_be_better_and_must_be_said_of_what_is_no_loss() -> None:
    assert stopped_after(EarlyStopping("eval_f1", 2, larger_is_better=True), [0.1, 0.5, 0.4, 0.3], "eval_f1") == (
        4, "eval_f1 has not improved in 2 measurements; best 0.5",
    )  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"EarlyStopping\('eval_f1'\): is a larger value better\? Give larger_is_better=True or False"
    ):
        EarlyStopping("eval_f1")


def test_what_it_has_seen_is_resumed_but_not_of_another_metric() -> None:
    first = EarlyStopping("eval_loss", 2)
    assert stopped_after(first, [1.0, 2.0]) == (0, "")
    second, other = EarlyStopping("eval_loss", 2), EarlyStopping("test_loss", 2)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(first.state_dict())
    assert stopped_after(second, [3.0])[0] == 1
    assert stopped_after(other, [3.0, 2.9], "test_loss")[0] == 0


def ends(folder: Path, broken_at: int | None = None) -> tuple[int, bool, str]:
    """(steps, whether the script has stopped it, why) of a training on random labels that is evaluated on other samples."""

    def fails(state: TrainState) -> None:
        if state.step == broken_at:
            raise RuntimeError("broken")

    def once(breaks: bool) -> TrainState:
        actions = [EarlyStopping("eval_loss", patience=3), *([fails] if breaks else [])]
        evaluate = Evaluate(data(), every_steps=2)
        return trainer(
            folder, model=make_model(), max_epochs=None, max_steps=400, evaluate=evaluate, actions=actions,
            optimizer=lambda p: torch.optim.SGD(p, lr=3.0), every_steps=1,
        ).fit()  # fmt: skip

    if broken_at is not None:
        with pytest.raises(RuntimeError, match="broken"):
            once(True)
    state = once(False)
    return state.step, state.stopped, state.stop_reason


def test_all_ranks_stop_after_the_same_step_and_a_broken_run_stops_where_the_unbroken_one_does(tmp_path: Path) -> None:
    unbroken = on_ranks(2, ends, tmp_path / "unbroken")
    assert unbroken[0] == unbroken[1]
    steps, stopped, reason = unbroken[0]
    assert stopped
    assert 8 <= steps < 400
    assert reason.startswith("eval_loss has not improved in 3 measurements; best ")
    assert on_ranks(2, ends, tmp_path / "broken", steps - 1) == unbroken


def counted(folder: Path) -> tuple[int, dict[str, Any]]:
    """(the number of evaluations, what EarlyStopping has saved) of a training that stops after the second evaluation."""
    evaluated: list[int] = []

    def figures(_: Any, batch: Any) -> dict[str, Any]:
        evaluated.append(1)
        return {"loss": (1.0 * len(batch[0]), len(batch[0]))}

    stopping = EarlyStopping("eval_loss", patience=1)
    evaluate = Evaluate(TensorDataset(torch.zeros(1, 1)), figures, every_steps=2)
    trainer(folder, max_epochs=None, max_steps=9, evaluate=evaluate, actions=[stopping]).fit()
    return len(evaluated), stopping.state_dict()


def test_the_step_after_which_it_stops_is_evaluated_and_counted_once(tmp_path: Path) -> None:
    assert on_ranks(1, counted, tmp_path) == [(2, {"metric": "eval_loss", "best": 1.0, "worse": 1})]


@pytest.mark.parametrize(("metric", "warns"), [("eval_loss", True), ("loss", False)])
def test_a_metric_that_a_later_action_measures_is_never_seen_and_is_a_warning(
    metric: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(log, "warning_once", told.append)
    model = nn.Linear(1, 1)
    state, stopping = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)), EarlyStopping(metric)
    for state.step in range(1, 4):
        stopping(state)
        state.measure({metric: 1.0})  # for the training loss: a save
    assert any("put EarlyStopping after that action" in text for text in told) is warns
