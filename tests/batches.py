"""What loaders return, as plain numbers, for all ranks, which here are objects in one process.

assert flat(all_of(dataset, world_size=3, shuffle=False)) == list(range(13))
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from rankwise.data import Loader
from rankwise.dist.world import World


def world(rank: int, world_size: int) -> World:
    return World(rank, world_size, rank, world_size, 0, source="test")


def numbers(batch: Any) -> list[int]:
    """The samples of a batch of any kind."""
    if isinstance(batch, dict):
        batch = batch["x"]
    if isinstance(batch, list | tuple):
        x, y = batch
        assert torch.equal(x * 2.0, y)
        batch = x
    return batch.tolist()  # type: ignore[no-any-return]


Steps = list[list[list[int]]]
"""For each step, the micro-batches."""


def steps_of(loader: Loader, limit: int | None = None) -> Steps:
    return [[numbers(batch) for batch in micro_batches] for micro_batches in itertools.islice(loader, limit)]


def loaders(dataset: Any, world_size: int, **settings: Any) -> list[Loader]:
    settings = {"max_epochs": 1, "global_batch_size": 5, **settings}
    return [Loader(dataset, **settings).at(world(rank, world_size)) for rank in range(world_size)]


def global_batches(per_rank: list[Steps]) -> list[list[int]]:
    """For each step, the samples of all ranks, rank after rank."""
    assert len({len(steps) for steps in per_rank}) == 1, "ranks took different numbers of steps"
    return [[s for rank in step for micro in rank for s in micro] for step in zip(*per_rank, strict=True)]


def all_of(dataset: Any, world_size: int, limit: int | None = None, **settings: Any) -> list[list[int]]:
    return global_batches([steps_of(loader, limit) for loader in loaders(dataset, world_size, **settings)])


def flat(batches: list[list[int]]) -> list[int]:
    return [s for batch in batches for s in batch]
