"""A rank, or a worker of its loader, is killed in the middle of an epoch of a training over HDF5 files. The resumed training
uses each sample once per epoch, in the batches of a training that was not killed, on any number of ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import loaders
from ranks import RankError, on_ranks
from test_chain import read

import rankwise
from rankwise.dist import comm
from rankwise.hdf5 import HDF5Dataset, HDF5Writer
from rankwise.telemetry import writers
from rankwise.training.state import TrainState

N = 53
SAVE_EVERY = 3
EPOCHS = 2

Settings = dict[str, Any]
BY_COUNT: Settings = {"global_batch_size": 7}
BY_LENGTH: Settings = {"global_batch_size": None, "batches": rankwise.LengthBatches(global_tokens=40)}
WORKERS: Settings = {"num_workers": 2, "prefetch_factor": 1}
"""Two batches ahead: the worker is killed while some of its batches are still needed. If it had made its last, nobody might
notice."""
HERE: Settings = {"num_workers": 0, "prefetch_factor": None}
AHEAD: Settings = {"prefetch_factor": 4}
BLOCKS: Settings = {"shuffle": "blocks"}

MORE = pytest.mark.stress


def attempt(folder: Path, ledger: Path, ways: Settings, killed: str | None, kill_at: int) -> None:
    """Train. `killed` is "rank" or "worker": the last rank, or a worker of its loader, is killed after a step."""
    multiprocessing.set_start_method("fork", force=True)
    writers.find_spec = lambda name: None  # type: ignore[assignment, misc]  # TensorBoard takes longer than all this
    torch.manual_seed(3)
    model = torch.nn.Linear(1, 1)

    def step_fn(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        numbers, x, lengths = batch["number"], batch["x"], batch["x_lengths"]
        if torch.is_grad_enabled():  # not when the Trainer tries the first micro-batch
            assert [row[:n].tolist() for row, n in zip(x, lengths, strict=True)] == [[k] * (k % 13) for k in numbers.tolist()]
            with open(f"{ledger}-{comm.rank()}", "a") as file:
                file.write(f"{trainer.state.step + 1} {' '.join(map(str, numbers.tolist()))}\n")
        return model(numbers[:, None].float()).pow(2).sum() / 1e4, len(numbers)

    def kill(state: TrainState) -> None:
        if killed is not None and state.step == kill_at and comm.rank() == comm.world_size() - 1:
            [worker, *_] = multiprocessing.active_children() or [None]
            os.kill(worker.pid if killed == "worker" and worker is not None else os.getpid(), signal.SIGKILL)

    trainer = rankwise.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), step_fn,
        rankwise.Loader(HDF5Dataset(folder / "x*.h5"), seed=5, **ways),
        max_epochs=EPOCHS, run_dir=folder / "run", actions=[kill],
        checkpoints=rankwise.Checkpoints(every_steps=SAVE_EVERY, background=False),
    )  # fmt: skip
    trainer.fit()


@pytest.mark.parametrize(
    ("ways", "before", "after", "killed", "kill_at"),
    [
        ({**BY_COUNT, **WORKERS}, 2, 3, "worker", 4),
        ({**BY_LENGTH, **AHEAD}, 3, 2, "rank", 10),
        pytest.param({**BY_COUNT, **BLOCKS, **AHEAD}, 3, 4, "rank", 4, marks=MORE),
        pytest.param({**BY_LENGTH, **WORKERS}, 1, 2, "worker", 4, marks=MORE),
        pytest.param({**BY_COUNT, **BLOCKS, **WORKERS}, 4, 1, "worker", 11, marks=MORE),
        pytest.param({**BY_LENGTH}, 2, 4, "rank", 13, marks=MORE),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else str(value),
)
@pytest.mark.one_in(2)
def test_none_is_lost_and_none_comes_twice(
    tmp_path: Path, ways: Settings, before: int, after: int, killed: str, kill_at: int
) -> None:
    write(tmp_path)
    expected = [
        sorted(int(k) for batch in step for k in batch["number"])
        for [loader] in [loaders(HDF5Dataset(tmp_path / "x*.h5"), 1, **{**ways, **HERE}, max_epochs=EPOCHS, seed=5)]
        for step in loader
    ]
    assert sorted(k for step in expected for k in step) == sorted([*range(N)] * EPOCHS)
    first, began, second = killed_and_resumed(tmp_path, ways, before, after, killed, kill_at)
    assert max(first) < len(expected), "the kill ended it"
    done = {step: first[step] for step in range(1, began + 1)} | second
    assert [sorted(done[step]) for step in sorted(done)] == expected
    for step in range(began + 1, kill_at + 1):
        assert sorted(first[step]) == expected[step - 1], "steps that are done again are the same"


@pytest.mark.parametrize(
    ("ways", "before", "after", "killed", "kill_at"),
    [
        ({**BY_COUNT, **WORKERS}, 3, 3, "worker", 4),
        ({**BY_LENGTH, **AHEAD}, 2, 3, "rank", 5),
        pytest.param({**BY_COUNT, **BLOCKS}, 4, 2, "rank", 11, marks=MORE),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else str(value),
)
@pytest.mark.stress  # as above; how files are divided: test_exactly_once.py
def test_none_is_lost_and_none_comes_twice_where_each_rank_reads_its_own_files(
    tmp_path: Path, ways: Settings, before: int, after: int, killed: str, kill_at: int
) -> None:
    write(tmp_path)
    first, began, second = killed_and_resumed(tmp_path, {**ways, "split": "files"}, before, after, killed, kill_at)
    done = {step: first[step] for step in range(1, began + 1)} | second
    assert sorted(done) == [*range(1, max(done) + 1)]
    samples = [k for step in sorted(done) for k in done[step]]
    assert [sorted(samples[:N]), sorted(samples[N:])] == [[*range(N)]] * EPOCHS
    for step in range(began + 1, kill_at + 1) if before == after else ():
        assert sorted(first[step]) == sorted(second[step]), "steps that are done again are the same"


def write(folder: Path) -> None:
    for first, stop in ((0, 20), (20, 21), (21, N)):
        with HDF5Writer(folder / f"x{first:02}.h5", variable=["x"]) as writer:
            for number in range(first, stop):
                writer.add(x=np.full(number % 13, number), number=number)


Ledger = dict[int, list[int]]
"""The samples of each step, over all ranks."""


def killed_and_resumed(
    folder: Path, ways: Settings, before: int, after: int, killed: str, kill_at: int
) -> tuple[Ledger, int, Ledger]:
    """(the samples of the first attempt, the step after which the second one started, the samples of the second)."""
    with pytest.raises(RankError):
        on_ranks(before, attempt, folder, folder / "first", ways, killed, kill_at)
    on_ranks(after, attempt, folder, folder / "second", ways, None, 0)
    first, second = read(folder / "first", before), read(folder / "second", after)
    began = min(second) - 1
    assert began % SAVE_EVERY == 0, "it resumes from a checkpoint"
    assert kill_at // SAVE_EVERY * SAVE_EVERY <= began <= max(first)  # the loss of a worker is noticed late
    return first, began, second
