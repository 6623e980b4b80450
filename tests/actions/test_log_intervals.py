"""The metrics of a log interval."""

from __future__ import annotations

import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import rankwise
from rankwise import Checkpoints, TrainState
from rankwise.actions import EarlyStopping, Log, Plateau
from rankwise.dist import comm
from rankwise.telemetry import slowness

Row = tuple[int, float, float]


def rows(folder: Path, fails_at: int = 0, **checkpoints: Any) -> list[Row]:
    """(step, loss, learning rate) at each log interval, until the script fails after the step `fails_at`."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: list[Row] = []

    def note(state: TrainState) -> None:
        if state.step == fails_at:
            raise ZeroDivisionError
        if "loss" in state.measured_now:
            found.append((state.step, state.metrics["loss"], optimizer.param_groups[0]["lr"]))

    def step(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return (model(batch[0]) - batch[0][:, :1].sin()).square().sum(), len(batch[0])

    plateau = Plateau(ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05), "loss")
    stop = EarlyStopping("loss", patience=1000)
    settings = {"global_batch_size": 8, "max_steps": 30, "run_dir": folder, "seed": 1}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(ZeroDivisionError):
        rankwise.Trainer(
            model, optimizer, step, TensorDataset(torch.randn(61, 4).double()), actions=[Log(5), plateau, stop, note],
            checkpoints=Checkpoints(**{"every_s": None, **checkpoints}), **settings,
        ).fit()  # fmt: skip
    return found


def saved_more_and_less_often(folder: Path) -> dict[str, list[Row]]:
    found = {f"every {n}": rows(folder / f"every-{n}", every_steps=n) for n in (30, 7, 3, 1)}
    # Resumed from the saves after the steps 3, 12 and 18. None of these ends a log interval.
    resumed = [row for step in (5, 14, 19, 0) for row in rows(folder / "resumed", step, every_steps=3)]
    return found | {"resumed": resumed}


@pytest.mark.stress
@pytest.mark.parametrize("n", [2, 1])
def test_saves_and_resumes_between_log_intervals_change_neither_its_loss_nor_the_rate_of_a_plateau(
    n: int, tmp_path: Path
) -> None:
    for found in on_ranks(n, saved_more_and_less_often, tmp_path):
        expected = found.pop("every 30")
        assert {step for step, _, _ in expected} == {5, 8, 10, 15, 16, 20, 24, 25, 30}
        assert len({rate for _, _, rate in expected}) > 2
        for name, seen in found.items():
            assert [(step, rate) for step, _, rate in seen] == [(step, rate) for step, _, rate in expected], name
            assert [loss for _, loss, _ in seen] == pytest.approx([loss for _, loss, _ in expected], rel=1e-12), name


class LateOnOneRank(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        if comm.rank() == 1:
            time.sleep(0.08)  # the late data itself, nothing waits for it: longer than a step on a loaded machine
        return super().__getitem__(index)


def squares(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return model(batch[0]).square().sum(), len(batch[0])


def with_late_data(folder: Path) -> str:
    """What is printed by a training that waits for the data of rank 1."""
    slowness._WINDOW_S = 0.1
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        rankwise.Trainer(
            model, optimizer, squares, LateOnOneRank(torch.randn(96, 4)), actions=[Log(3)], global_batch_size=8, max_steps=9,
            run_dir=folder, checkpoints=Checkpoints(every_s=None),
        ).fit()  # fmt: skip
    return " ".join(out.getvalue().split())


def test_the_rank_that_others_wait_for_is_printed_and_this_time_is_not_that_of_the_all_reduce(tmp_path: Path) -> None:
    said, _ = on_ranks(2, with_late_data, tmp_path)
    assert "slow: rank 1 is slower than the others, which wait" in said
    assert "of the time for data, the others" in said
    shares = [record["share/slower ranks"] for record in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())]
    assert max(shares) > 0.3
