"""A training in attempts on 2, 3, 1 and 4 ranks, each but the last killed, equals one whose attempts end cleanly."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankError, on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from trainers import trainer_of

from rankwise.dist import comm
from rankwise.telemetry import writers
from rankwise.training.state import TrainState

SAMPLES = 50
GLOBAL_BATCH = 8  # an epoch is 6 steps of 8 samples and one of 2, which is fewer than the ranks of the last attempt
STEPS_OF_AN_EPOCH = 7
STEPS = 3 * STEPS_OF_AN_EPOCH
SAVE_EVERY = 5
CHAIN = ((2, (1,), 8), (3, (0, 1, 2), 13), (1, (0,), 19), (4, (), 0))
"""For each attempt: its ranks, those that are killed, and after which step: three or four steps after a checkpoint."""

Ledger = dict[int, list[int]]
"""The samples of each step."""


def attempt(folder: Path, ledger: Path, max_steps: int, killed: Sequence[int], kill_at: int) -> list[float]:
    """Train until `max_steps`. The ranks in `killed` exit after a step, as if the machine had ended them."""
    multiprocessing.set_start_method("fork", force=True)
    writers.find_spec = lambda name: None  # type: ignore[assignment, misc]  # TensorBoard takes longer than all this
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def step_fn(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, labels, numbers = batch
        if torch.is_grad_enabled():  # not when the Trainer tries the first micro-batch
            with open(f"{ledger}-{comm.rank()}", "a") as file:
                file.write(f"{trainer.state.step + 1} {' '.join(map(str, numbers.tolist()))}\n")
        return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)

    def kill(state: TrainState) -> None:
        if state.step == kill_at and comm.rank() in killed:
            os.kill(os.getpid(), signal.SIGKILL)

    data = TensorDataset(x, y, torch.arange(SAMPLES))
    trainer = trainer_of(
        model, optimizer, step_fn, data, global_batch_size=GLOBAL_BATCH, max_steps=max_steps, run_dir=folder,
        at_steps=range(SAVE_EVERY, STEPS, SAVE_EVERY), every_s=1e9, background=False, actions=[kill],
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    )  # fmt: skip
    trained = trainer.fit().model
    return torch.cat([parameter.detach().reshape(-1) for parameter in trained.parameters()]).tolist()  # type: ignore[no-any-return]


def read(ledger: Path, ranks: int) -> Ledger:
    """The samples of one attempt, with the ranks' parts one after the other."""
    taken: Ledger = {}
    for rank in range(ranks):
        path = ledger.with_name(f"{ledger.name}-{rank}")
        for line in path.read_text().splitlines() if path.exists() else ():
            step, *samples = map(int, line.split())
            taken.setdefault(step, []).extend(samples)
    return taken


def chain(folder: Path, *, kills: bool) -> tuple[Ledger, list[float]]:
    """(the samples of all steps that count, the final parameters)."""
    ledger: Ledger = {}
    began = 0
    for number, (ranks, killed, kill_at) in enumerate(CHAIN):
        path = folder / f"samples-{number}"
        saved = kill_at // SAVE_EVERY * SAVE_EVERY if killed else STEPS
        if killed and kills:
            with pytest.raises(RankError):
                on_ranks(ranks, attempt, folder / "run", path, STEPS, killed, kill_at)
        else:
            parameters = on_ranks(ranks, attempt, folder / "run", path, saved, (), 0)[0]
        taken = read(path, ranks)
        last = kill_at if killed and kills else saved
        taken.pop(last + 1, None)  # other ranks had started it when one was killed
        assert sorted(taken) == list(range(began + 1, last + 1))  # it resumed from the newest checkpoint
        ledger |= taken  # the next attempt repeats the steps after the last checkpoint
        began = saved
    return ledger, parameters


@pytest.mark.stress
def test_a_chain_of_killed_lives_on_other_numbers_of_ranks_is_the_chain_of_clean_ones(tmp_path: Path) -> None:
    on_ranks(1, attempt, tmp_path / "unbroken", tmp_path / "samples", STEPS, (), 0)
    unbroken = read(tmp_path / "samples", 1)
    (tmp_path / "killed").mkdir()
    (tmp_path / "clean").mkdir()
    killed, ours = chain(tmp_path / "killed", kills=True)
    clean, theirs = chain(tmp_path / "clean", kills=False)
    assert killed == clean == unbroken  # the same global batches, in the same order, on any ranks
    for first in range(1, STEPS, STEPS_OF_AN_EPOCH):
        epoch = [killed[step] for step in range(first, first + STEPS_OF_AN_EPOCH)]
        assert sorted(itertools.chain.from_iterable(epoch)) == list(range(SAMPLES))
    assert ours == theirs
