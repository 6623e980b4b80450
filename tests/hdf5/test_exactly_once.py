"""Each sample of an HDF5 file once per epoch, in the same global batches, on any number of ranks and after a stop anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import loaders
from ranks import on_ranks

import rankwise
from rankwise.hdf5 import HDF5Dataset, HDF5Writer

N, SIZE = 103, 10
RANKS = (1, 2, 3, 4, 8)
CUTS: dict[str, Any] = {
    "by count": {"global_batch_size": SIZE},
    "by length": {"global_batch_size": None, "batches": rankwise.LengthBatches(global_tokens=60)},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> HDF5Dataset:
    """Three files, in which each sample has its number."""
    folder = tmp_path_factory.mktemp("files")
    for first, stop in ((0, 40), (40, 41), (41, N)):
        with HDF5Writer(folder / f"x{first:03}.h5", variable=["x"]) as writer:
            for number in range(first, stop):
                writer.add(x=np.full(number % 13, number), number=number)
    return HDF5Dataset(folder / "x*.h5")


def steps_of(some: list[Any], most: int | None = None) -> list[list[int]]:
    """The samples of each step, over all ranks."""
    found: list[list[int]] = []
    iterators = [iter(loader) for loader in some]
    while most is None or len(found) < most:
        taken = [next(iterator, None) for iterator in iterators]
        if any(step is None for step in taken):
            assert all(step is None for step in taken), "ranks have different numbers of steps"
            break
        for step in taken:
            for batch in step or ():
                assert all(
                    row[:n].tolist() == [k] * n
                    for row, n, k in zip(batch["x"], batch["x_lengths"], batch["number"], strict=True)
                )
        found.append([int(k) for step in taken for batch in step or () for k in batch["number"]])
    return found


def stopped_and_resumed(dataset: HDF5Dataset, before: int, after: int, stop: int, ways: dict[str, Any]) -> list[list[int]]:
    """All steps: the first `stop` on `before` ranks, the others on `after` ranks."""
    first = loaders(dataset, before, **ways)
    done = steps_of(first, stop)
    rest = loaders(dataset, after, **ways)
    for loader in rest:
        loader.load_state_dict(first[0].state_dict())
    return done + steps_of(rest)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("before", RANKS)
@pytest.mark.one_in(3)
def test_none_is_lost_and_none_comes_twice_after_a_stop_on_other_ranks(dataset: HDF5Dataset, cut: str, before: int) -> None:
    ways = {**CUTS[cut], "max_epochs": 2, "seed": 5}
    whole = steps_of(loaders(dataset, 1, **ways))
    each = [sorted(step) for step in whole]
    epoch = sum(len(step) for step in whole) // 2
    assert epoch == N
    assert sorted(k for step in whole for k in step) == sorted([*range(N), *range(N)])
    for after in RANKS:
        for stop in (1, len(whole) // 2, len(whole) - 2):
            done = stopped_and_resumed(dataset, before, after, stop, ways)
            assert [sorted(step) for step in done] == each, (before, after, stop)


def files_that_are_read(paths: list[str], **ways: Any) -> tuple[list[str], list[int]]:
    """(the files that this rank has mapped after an epoch, the samples that it has read)."""
    rankwise.init()
    loader = rankwise.Loader(HDF5Dataset(paths), split="files", global_batch_size=SIZE, max_epochs=1, **ways)
    numbers = [k for step in loader for batch in step for k in batch["number"].tolist()]
    return [path for path in paths if path in Path("/proc/self/maps").read_text()], numbers


def test_each_rank_opens_its_own_files_alone(tmp_path: Path) -> None:
    paths = []
    for first in range(0, 80, 20):
        paths.append(str(tmp_path / f"y{first:02}.h5"))
        with HDF5Writer(paths[-1]) as writer:
            for number in range(first, first + 20):
                writer.add(number=number)
    for ranks, own in ((2, [paths[:2], paths[2:]]), (3, [paths[:2], paths[1:3], paths[2:]])):
        found = on_ranks(ranks, files_that_are_read, paths)
        assert [mapped for mapped, _ in found] == own
        assert sorted(k for _, numbers in found for k in numbers) == [*range(80)]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("before", RANKS)
@pytest.mark.one_in(3)
def test_the_same_where_each_rank_reads_its_own_files(dataset: HDF5Dataset, cut: str, before: int) -> None:
    ways = {**CUTS[cut], "max_epochs": 2, "seed": 5, "split": "files"}
    whole = steps_of(loaders(dataset, before, **ways))
    for after in RANKS:
        for stop in (1, len(whole) // 2, len(whole) - 2):
            done = stopped_and_resumed(dataset, before, after, stop, ways)
            assert sorted(k for step in done for k in step) == sorted([*range(N), *range(N)]), (before, after, stop)
            assert before != after or done == whole
