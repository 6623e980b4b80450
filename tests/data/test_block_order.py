"""Shuffling in blocks: each sample once, each block read once, better with more blocks per window, and a training with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import loaders

from rankwise.data import Blocks, Loader
from rankwise.data.order import BlockOrder, _BlockLayout, order_of
from rankwise.errors import ConfigError


def order(samples: int, rows: int, window: int, seed: int = 0) -> BlockOrder:
    made = order_of(None, samples, seed, Blocks(rows, window))
    assert isinstance(made, BlockOrder)
    return made


EPOCHS = [
    (samples, rows, window)
    for samples in (1, 2, 5, 999, 1024, 20_011, 100_003)
    for rows, window in ((1, 1), (1, 1000), (7, 3), (64, 16), (1000, 1), (10**6, 10**6))
    if samples <= 25_000 * rows * window  # a window costs as much whether it has one sample or a thousand
]


@pytest.mark.parametrize(("samples", "rows", "window"), EPOCHS)
@pytest.mark.one_in(4)
def test_an_epoch_is_every_index_once(samples: int, rows: int, window: int) -> None:
    for seed, epoch in ((0, 0), (3, 5), (2**62, 100_000)):
        whole = order(samples, rows, window, seed).indices(epoch, 0, samples)
        assert np.array_equal(np.sort(whole), np.arange(samples))


@pytest.mark.parametrize(("rows", "window"), [(7, 3), (64, 16), (5000, 4)])
def test_any_part_of_an_epoch_is_that_part_of_the_whole(rows: int, window: int) -> None:
    made = order(70_001, rows, window)
    whole = made.indices(2, 0, 70_001)
    for start, stop in ((0, 10), (16_380, 16_390), (33_000, 69_999), (70_000, 70_001), (5, 5)):
        assert np.array_equal(made.indices(2, start, stop), whole[start:stop])


def test_a_window_reads_its_blocks_and_no_other() -> None:
    rows, window = 50, 8
    indices = order(10_007, rows, window).indices(1, 0, 10_007)
    blocks = indices // rows
    seen: set[int] = set()
    at = 0
    while at < len(blocks):
        in_window = blocks[at : at + rows * window]
        short = 43 * (200 in in_window)  # the last block has 7 samples
        in_window = blocks[at : at + rows * window - short]
        assert len(set(in_window.tolist())) <= window
        assert not seen & set(in_window.tolist())
        seen |= set(in_window.tolist())
        at += rows * window - short
    assert len(seen) == 201


class Files(list[int]):
    blocks = 8, 3
    block_starts = 0, 10, 11, 40, 900


def of_files(samples: int) -> BlockOrder:
    made = order_of(Files(), samples, 0, "blocks")
    assert isinstance(made, BlockOrder)
    return made


def test_no_block_has_samples_of_two_files() -> None:
    made = of_files(101)
    starts = [0, 8, 10, 11, 19, 27, 35, *range(40, 101, 8)]
    whole = made.indices(1, 0, 101)
    assert sorted(whole) == list(range(101))
    blocks = np.searchsorted(starts, whole, "right")
    at, windows = 0, []
    while at < 101:
        some = list(dict.fromkeys(blocks[at:].tolist()))[:3]
        windows += some
        at += int(np.isin(blocks, some).sum())
        assert set(blocks[:at]) == set(windows)
    assert len(windows) == len(starts)
    assert made.shuffle == "in blocks of 8, 3 at a time, 4 files"
    assert order_of(type("Even", (Files,), {"block_starts": (0, 16, 80)})(), 101, 0, "blocks") == order(101, 8, 3)


@pytest.mark.parametrize(("start", "stop"), [(0, 101), (9, 12), (13, 70), (40, 101), (100, 101), (12, 13)])
def test_a_part_of_files_has_their_blocks(start: int, stop: int) -> None:
    part = of_files(101).of_part(start, stop, 5)
    assert sorted(part.indices(0, 0, stop - start)) == list(range(stop - start))
    whole = [0, 8, 10, 11, 19, 27, 35, *range(40, 101, 8)]
    begins, sizes = _BlockLayout(part.samples, part.rows, part.lead, part.starts).of(np.arange(len(whole)))
    there = [start, *(begin for begin in whole if start < begin < stop)]
    assert (begins[: len(there)] + start).tolist() == there
    assert sizes[: len(there)].sum() == stop - start


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    firsts = [tuple(order(5000, 20, 10, seed).indices(epoch, 0, 5000)) for seed in range(3) for epoch in range(3)]
    assert len(set(firsts)) == 9
    assert len({tuple(np.unique(np.array(first[:200]) // 20)) for first in firsts}) == 9


def test_of_a_file_sorted_by_class_batches_scatter_as_is_known_of_the_number_of_blocks() -> None:
    classes, each, size = 1000, 300, 256
    values = np.repeat(np.random.default_rng(0).normal(size=classes), each)
    expected = values.std() / np.sqrt(size)

    def scatter(made: Any) -> float:
        means = [
            values[made.indices(epoch, k, k + size)].mean() for epoch in range(2) for k in range(0, len(values) - size, size)
        ]
        return float(np.std(means) / expected)

    assert 0.9 < scatter(order_of(None, len(values), 0, True)) < 1.1
    assert scatter(order(len(values), 64, 1024)) < 1.35
    assert scatter(order(len(values), 256, 8)) > 3


def test_a_loader_takes_blocks_and_records_them(tmp_path: Any) -> None:
    (loader,) = loaders(list(range(100)), 1, global_batch_size=7, max_epochs=1, shuffle=Blocks(10, 2))
    seen = [batch.tolist() for step in loader for batch in step]
    assert sorted(k for batch in seen for k in batch) == list(range(100))
    assert len({k // 10 for batch in seen[:2] for k in batch}) == 2
    state = loader.state_dict()
    assert state["shuffle"] == "in blocks of 10, 2 at a time"
    for other in (True, Blocks(10, 3)):
        (another,) = loaders(list(range(100)), 1, global_batch_size=7, max_epochs=1, shuffle=other)
        with pytest.raises(
            ConfigError, match="the checkpoint was made with shuffle=in blocks of 10, 2 at a time and this run has"
        ):
            another.load_state_dict(state)


class InBlocks(list[int]):
    """A dataset with blocks of its own, which may change from one version of its class to the next."""

    def __init__(self, blocks: tuple[int, int], starts: tuple[int, ...] = ()) -> None:
        super().__init__(range(100))
        self.blocks, self.block_starts = blocks, starts


@pytest.mark.parametrize("now", [InBlocks((10, 3)), InBlocks((7, 2)), InBlocks((10, 2), starts=(0, 33))])
def test_a_run_keeps_the_blocks_that_it_began_with(now: InBlocks) -> None:
    ways: dict[str, Any] = {"global_batch_size": 7, "max_epochs": 2, "shuffle": "blocks"}
    (whole,) = loaders(InBlocks((10, 2)), 1, **ways)
    states, batches = [], []
    for [batch] in whole:
        batches.append(batch.tolist())
        states.append(whole.state_dict())
    (resumed,) = loaders(now, 1, **ways)
    resumed.load_state_dict(states[4])
    assert [batch.tolist() for [batch] in resumed] == batches[5:]
    assert resumed.state_dict()["shuffle"] == "in blocks of 10, 2 at a time"


def test_a_resume_anywhere_on_other_ranks_has_the_same_batches() -> None:
    ways: dict[str, Any] = {"global_batch_size": 9, "max_epochs": 2, "shuffle": Blocks(8, 3)}

    def steps(some: list[Loader], most: int | None = None) -> list[list[int]]:
        found: list[list[int]] = []
        for taken in zip(*some, strict=True):
            found.append(sorted(k for step in taken for batch in step for k in batch.tolist()))
            if len(found) == most:
                break
        return found

    whole = steps(loaders(list(range(101)), 1, **ways))
    for before, after, stop in ((2, 3, 1), (3, 1, 7), (1, 4, 13)):
        first, rest = loaders(list(range(101)), before, **ways), loaders(list(range(101)), after, **ways)
        done = steps(first, stop)
        for loader in rest:
            loader.load_state_dict(first[0].state_dict())
        assert done + steps(rest) == whole


@pytest.mark.parametrize(
    ("shuffle", "said"),
    [
        ("blocks", "shuffle='blocks', but list has no attribute `blocks` (rows, window)"),
        ("block", "Loader(shuffle='block'): give True, False,"),
        (Blocks(7.5, 3), "Loader(shuffle=Blocks(rows=7.5, window=3)): give True, False"),  # type: ignore[arg-type]
        (Blocks(0, 3), "Loader(shuffle=Blocks(rows=0, window=3)): give True, False"),
    ],
)
def test_what_is_no_shuffle_is_refused(shuffle: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Loader([1, 2], global_batch_size=1, shuffle=shuffle)
    assert said in str(caught.value)
