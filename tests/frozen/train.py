"""The training of the frozen fixtures: as a script of `rankwise run`, and kind by kind in the ranks of a test.

    rankwise run --nproc 2 train.py sharded        FROZEN_STOP_AT=7: rank 0 is asked to stop; FROZEN_FAIL_AT=7: rank 1 raises
    [weights] = on_ranks(1, fit, "alone", folder)  stop_at=7: likewise

Do not change what it computes: the checkpoints beside it are from this model and data, and weights.json has its final weights.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import rankwise
from rankwise.actions import Log

Weights = dict[str, list[float]]

SAMPLES = 37  # five steps of 8 per epoch, the last one partial
RANKS = {"alone": 1, "sharded": 2, "node": 2, "fp16": 1, "stream": 1, "tokens": 1}
STOP_AT = 7
"""In the middle of the second of four epochs; several ranks agree on a step that is a few steps later."""


def samples(count: int = SAMPLES, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (x of 6, y of 1), float64."""
    x = torch.from_numpy(np.random.RandomState(seed).uniform(-1, 1, (count, 6)))
    return list(zip(x, x.sin().sum(1, keepdim=True), strict=True))


def tensors(count: int = SAMPLES, seed: int = 1, dtype: torch.dtype = torch.float64) -> TensorDataset:
    x, y = zip(*samples(count, seed), strict=True)
    return TensorDataset(torch.stack(x).to(dtype), torch.stack(y).to(dtype))


class Stream(IterableDataset[Any]):
    """The same samples, without a known length."""

    def __iter__(self) -> Iterator[Any]:
        yield from samples()


class Sentences(Dataset[Any]):
    """Sample k has lengths[k] numbers."""

    lengths = tuple(int(n) for n in np.random.RandomState(2).randint(1, 9, SAMPLES))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.random.RandomState(index).uniform(-1, 1, self.lengths[index]))


def padded(sentences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(x: 6 powers of each number; y), with x = y = 0 as padding."""
    rows = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    return torch.stack([rows**k for k in range(1, 7)], -1), rows.sin().unsqueeze(-1)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    width = 24 if kind == "sharded" else 8  # tensors of 1 kB are divided among the ranks, smaller ones are not
    layers = [nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1)]
    if kind == "node":
        layers.insert(1, nn.BatchNorm1d(width))  # each rank has its own buffers
    return nn.Sequential(*layers).to(torch.float32 if kind == "fp16" else torch.float64)


def plain(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    return ((model(x) - y) ** 2).sum(), len(x)


def noisy(model: nn.Module, batch: Any) -> Any:
    """Uses all random streams that a checkpoint contains: a resumed step must draw the same numbers as an unbroken run."""
    x, y = batch
    scale = 1 + 0.1 * random.random() + 0.1 * float(np.random.random_sample())
    noise = 0.1 * torch.rand(x.shape, dtype=torch.float64).to(x.dtype)
    return ((model(x * scale + noise) - y) ** 2).sum(), len(x)


class Steps:
    """A part of the user, saved beside those of the Trainer."""

    name = "steps"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, state: rankwise.TrainState) -> None:
        self.seen.append(state.step)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def trainer_of(kind: str, run_dir: Path | None, stop_at: int, fail_at: int = 0) -> rankwise.Trainer:
    """Four epochs. In the step `stop_at` the main rank gets SIGTERM; in the step `fail_at` the last rank raises."""
    model = model_of(kind)
    steps = Steps()

    def interfere(state: rankwise.TrainState) -> None:
        if state.step == stop_at and rankwise.is_main():
            os.kill(os.getpid(), signal.SIGTERM)
        if 0 < stop_at <= state.step:
            time.sleep(0.05)  # a step takes 2 ms, and to agree on the last step takes longer
        if state.step == fail_at and rankwise.rank() == rankwise.world_size() - 1:
            raise ValueError("loss is nan")

    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {"global_batch_size": 8}
    saving: dict[str, Any] = {"every_s": None, "keep_last": 1}
    data: Any = tensors()
    if kind == "alone":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        settings |= {"accumulate": 2, "clip_norm": 1.0, "scheduler": scheduler}
        saving |= {"keep_best": "eval_loss"}
        settings |= {"evaluate": rankwise.Evaluate(tensors(5, seed=3), every_steps=7)}
    if kind == "sharded":
        saving |= {"sharded": True}
    if kind == "node":
        saving |= {"scope": "node"}
        settings = {}
        data = rankwise.Loader(data, global_batch_size=8, drop_last=True)
    if kind == "fp16":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        data = tensors(dtype=torch.float32)
        settings |= {"precision": "fp16"}
    if kind == "stream":
        data = Stream()
    if kind == "tokens":
        data = rankwise.Loader(Sentences(), batches=rankwise.LengthBatches(global_tokens=40), collate_fn=padded)
        settings = {}
    step = noisy if kind in ("node", "fp16", "stream", "tokens") else plain
    return rankwise.Trainer(
        model, optimizer, step, data, max_epochs=4, checkpoints=rankwise.Checkpoints(**saving), run_dir=run_dir,
        actions=[steps, interfere, Log(5)], **settings,
    )  # fmt: skip


def fit(kind: str, run_dir: Path, *, stop_at: int = 0, own_disk: bool = False) -> Weights:
    """Collective. Everything that the model contains at the end; empty if it was stopped. `own_disk`: each rank is a node with
    a disk, run_dir/0 and so on."""
    sys.argv = ["train.py", kind]
    folder = run_dir / str(rankwise.rank()) if own_disk else run_dir
    trainer = trainer_of(kind, folder, stop_at)
    try:
        state = trainer.fit()
    except rankwise.Stopped:
        return {}
    assert state.parts["steps"].state_dict()["seen"] == list(range(1, state.step + 1))
    return weights_of(state.model)


def weights_of(model: nn.Module) -> Weights:
    return {name: value.double().flatten().tolist() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    stop, fail = (int(os.environ.get(f"FROZEN_{what}_AT", "0")) for what in ("STOP", "FAIL"))
    trainer_of(sys.argv[1], None, stop, fail).fit()
