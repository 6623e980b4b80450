"""Each rank reads its own part: each sample once, equal steps on all ranks, also after a stop anywhere and on other ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from batches import flat, global_batches, loaders, steps_of

import rankwise
from rankwise.data import Blocks, Loader
from rankwise.data.order import Order, order_of
from rankwise.data.parts import Division
from rankwise.errors import ConfigError

RANKS = (1, 2, 3, 4, 8)
N = 211
LENGTHS = [1 + 17 * k % 29 for k in range(N)]
BY_LENGTH: dict[str, Any] = {
    "global_batch_size": None,
    "batches": rankwise.LengthBatches(global_tokens=120, lengths=LENGTHS, pool=50),
}
CUTS: dict[str, dict[str, Any]] = {
    "shuffled": {"global_batch_size": 20},
    "in order": {"global_batch_size": 7, "shuffle": False},
    "in blocks": {"global_batch_size": 13, "shuffle": Blocks(8, 3)},
    "by length": BY_LENGTH,
    "by length, few": {**BY_LENGTH, "batches": rankwise.LengthBatches(global_tokens=90, lengths=LENGTHS, max_samples=9)},
}


def split(world_size: int, samples: int = N, **ways: Any) -> list[Loader]:
    return loaders(list(range(samples)), world_size, **{"split": "files", "max_epochs": 2, "seed": 5, "accumulate": 2, **ways})


def per_rank(some: list[Loader], limit: int | None = None) -> list[list[list[int]]]:
    """For each rank and step: its samples. All ranks have the same number of steps."""
    steps = [steps_of(loader, limit) for loader in some]
    global_batches(steps)
    return [[flat(step) for step in of_rank] for of_rank in steps]


def part(rank: int, world_size: int, samples: int = N) -> range:
    each, more = divmod(samples, world_size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("world_size", RANKS)
def test_a_rank_reads_its_own_part_alone_in_every_epoch_and_each_sample_once(cut: str, world_size: int) -> None:
    for rank, steps in enumerate(per_rank(split(world_size, **CUTS[cut]))):
        assert sorted(itertools.chain(*steps)) == sorted([*part(rank, world_size)] * 2)


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("samples", [1, 2, 7, 8, 9, 64, 1025])
def test_any_number_of_samples_gives_equal_steps_and_shares_that_differ_by_one(samples: int, world_size: int) -> None:
    for size in (1, 3, 8, 10, 2000):
        steps = per_rank(split(world_size, samples, global_batch_size=size))
        assert {len(of_rank) for of_rank in steps} == {2 * -(-samples // size)}
        for of_step in zip(*steps, strict=True):
            assert max(map(len, of_step)) - min(map(len, of_step)) <= 1
        assert sorted(itertools.chain(*itertools.chain(*steps))) == sorted([*range(samples)] * 2)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("before", RANKS)
@pytest.mark.one_in(3)
def test_a_stop_anywhere_resumes_bit_for_bit_and_on_other_ranks_with_the_rest_once(cut: str, before: int) -> None:
    ways = CUTS[cut]
    whole = per_rank(split(before, **ways))
    count = len(whole[0])
    stops = range(0, count + 1, 5) if before == 3 else (1, count // 2 - 1, count // 2, count - 2)
    for stop in stops:
        first = split(before, **ways)
        done = per_rank(first, stop)
        for after in RANKS:
            rest = split(after, **ways)
            for loader in rest:
                loader.load_state_dict(first[0].state_dict())
            left = per_rank(rest)
            if after == before:
                assert [a + b for a, b in zip(done, left, strict=True)] == whole
            seen = sorted(itertools.chain(*itertools.chain(*done, *left)))
            assert seen == sorted([*range(N)] * 2), (before, after, stop)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.one_in(2)
def test_an_epoch_may_be_divided_again_and_again(cut: str) -> None:
    chance = np.random.default_rng(0)
    for _ in range(12):
        state, seen = None, []
        while state is None or state["epoch"] < 2:
            some = split(int(chance.choice(RANKS)), **CUTS[cut])
            if state is not None:
                for loader in some:
                    loader.load_state_dict(state)
            seen += [*itertools.chain(*itertools.chain(*per_rank(some, int(chance.integers(0, 5)))))]
            states = [loader.state_dict() for loader in some]
            assert states == [states[0]] * len(some)
            state = states[0]
        assert sorted(seen) == sorted([*range(N)] * 2)


@pytest.mark.parametrize("cut", ["shuffled", "in order", "in blocks"])
def test_a_rank_reads_what_is_left_of_the_parts_of_few_ranks(cut: str) -> None:
    ways = {**CUTS[cut], "max_epochs": 1}
    for before, after, most in ((3, 4, 2), (8, 4, 3), (2, 8, 2), (8, 3, 4)):
        first, rest = split(before, **ways), split(after, **ways)
        per_rank(first, 4)
        for loader in rest:
            loader.load_state_dict(first[0].state_dict())
        for steps in per_rank(rest):
            samples = {*itertools.chain(*steps)}
            assert sum(bool(samples & {*part(rank, before)}) for rank in range(before)) <= most


@pytest.mark.parametrize("world_size", RANKS)
def test_the_tokens_of_each_rank_are_within_its_share(world_size: int) -> None:
    for steps in per_rank(split(world_size, **BY_LENGTH)):
        for samples in steps:
            lengths = [LENGTHS[k] for k in samples]
            assert len(samples) <= 1 or len(samples) * max(lengths) <= 120 / world_size


def test_drop_last_leaves_out_less_than_a_global_batch() -> None:
    for world_size in RANKS:
        steps = per_rank(split(world_size, global_batch_size=20, drop_last=True, max_epochs=1))
        assert len({*itertools.chain(*itertools.chain(*steps))}) == 200
        assert {len(of_rank) for of_rank in steps} == {10}


def test_workers_change_nothing() -> None:
    whole = per_rank(split(2, global_batch_size=20))
    assert per_rank(split(2, global_batch_size=20, num_workers=1)) == whole


def test_epochs_seeds_and_parts_have_orders_of_their_own() -> None:
    firsts = []
    for seed in (0, 1):
        for of_rank in per_rank(split(4, 400, global_batch_size=400, seed=seed)):
            firsts += [tuple(k % 100 for k in step) for step in of_rank]
    assert len(set(firsts)) == 16


def test_the_blocks_of_a_part_are_those_of_the_whole() -> None:
    """A rank whose part starts within a block (a chunk of the file) does not read a block twice."""
    order = order_of(None, 1000, 3, Blocks(64, 2))
    division = Division(order, ranks=3)
    for rank in range(3):
        mine = part(rank, 3, 1000)
        blocks = division.indices(1, rank, 0, len(mine)) // 64
        seen: list[int] = []
        at = 0
        while at < len(blocks):
            window = {*blocks[at : at + 1]}
            while at < len(blocks) and len(window | {blocks[at]}) <= 2:
                window.add(blocks[at])
                at += 1
            seen += window
        assert len(seen) == len(set(seen)) == (mine[-1] // 64 - mine[0] // 64 + 1)


def test_any_part_of_what_is_left_is_that_part_of_the_whole() -> None:
    before = Division(Order(70_001, seed=1), 8)
    after = Division(before.order, 3, 20_005, before)
    again = Division(before.order, 2, 40_000, after)
    whole = again.indices(0, 1, 0, again.count(1, 70_001))
    for start, stop in ((0, 1), (5, 5), (100, 9000), (14_999, 15_000)):
        assert np.array_equal(again.indices(0, 1, start, stop), whole[start:stop])


def test_what_eight_ranks_left_comes_mixed_on_one() -> None:
    before = Division(Order(8000, seed=1), 8)
    after = Division(before.order, 1, 4000, before)
    parts = after.indices(0, 0, 0, 400) // 1000
    assert np.bincount(parts, minlength=8).min() > 45


def test_a_copy_of_a_loader_leaves_the_parts_of_the_other_as_they_are() -> None:
    (loader,) = split(1, global_batch_size=20)
    steps_of(loader, 4)
    before = copy.deepcopy(loader.state_dict())
    steps_of(loader.once())
    assert loader.state_dict() == before


def test_the_self_test_gets_the_same_global_batches_on_any_ranks() -> None:
    for ways in (CUTS["shuffled"], BY_LENGTH):
        (loader,) = split(1, **ways)
        of_one = [flat(step) for step in steps_of(loader.anew(rankwise.dist.world.World(0, 1, 0, 1, 0, source="test"), 1), 3)]
        (plain,) = split(1, split=None, **{**ways, "accumulate": 1})
        assert of_one == [flat(step) for step in steps_of(plain, 3)]


def test_a_loader_says_that_ranks_have_their_own_parts() -> None:
    assert split(2)[0].describe().startswith("211 samples, of which each rank reads its own part, ")


def test_a_checkpoint_of_another_way_is_refused() -> None:
    (parts,), (plain,) = split(1), split(1, split=None)
    for one, other in ((parts, plain), (plain, parts)):
        with pytest.raises(ConfigError, match=r"the checkpoint was made with split=\S+ and this run has split="):
            other.load_state_dict(one.state_dict())


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "ways", "said"),
    [
        (Stream(), {"batch_size": 1}, "split='files', but Stream is a stream"),
        ([1, 2], {"batches": [[0], [1]]}, "split='files' gives each rank its own part of the samples, but list chooses"),
        ([1, 2], {"batch_size": 1, "split": "file"}, "Loader(split='file'): give one of 'files', or None"),
    ],
)
def test_what_cannot_be_split_is_refused(dataset: Any, ways: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Loader(dataset, **{"split": "files", **ways})
    assert said in str(caught.value)


def test_fewer_samples_of_a_step_than_ranks_are_refused() -> None:
    ways = {**BY_LENGTH, "batches": rankwise.LengthBatches(global_tokens=90, lengths=LENGTHS, max_samples=3)}
    with pytest.raises(ConfigError, match="max_samples=3 with split='files' on 4 ranks"):
        per_rank(split(4, **ways))
