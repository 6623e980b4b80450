"""Bytes that are needed soon are requested from the kernel if they are not in its cache; nothing else depends on this."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from batches import loaders

from rankwise.data import Blocks
from rankwise.hdf5 import HDF5Dataset, HDF5Writer
from rankwise.hdf5.rows import MappedRows

ROW = 5000  # bytes


WILL_NEED = MappedRows.will_need


class Kernel:
    """Records requests. `missing`: None if a byte of a file is in the cache, otherwise the error that shows that it is not."""

    def __init__(self, missing: Callable[[int], int | None]) -> None:
        self._missing = missing
        self.asked: list[tuple[str, int, int]] = []
        self.kinds: set[bool] = set()
        self.looks = 0

    def preadv(self, fd: int, buffers: Any, offset: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        self.looks += 1
        if (error := self._missing(offset)) is not None:
            raise OSError(error, os.strerror(error))
        return 1

    def will_need(self, rows: MappedRows, ranges: Sequence[tuple[int, int]], in_blocks: bool) -> None:
        self.asked += [(rows.path, *each) for each in ranges]
        self.kinds.add(in_blocks)
        WILL_NEED(rows, ranges, in_blocks)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel with nothing in its cache."""
    return replaced(monkeypatch, lambda offset: errno.EAGAIN)


def replaced(monkeypatch: pytest.MonkeyPatch, missing: Callable[[int], int | None]) -> Kernel:
    made = Kernel(missing)
    monkeypatch.setattr(os, "preadv", made.preadv)
    monkeypatch.setattr(MappedRows, "will_need", lambda rows, ranges, in_blocks: made.will_need(rows, ranges, in_blocks))
    return made


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Samples of 5000 bytes, sequences of bytes with the value of the sample's number, and small numbers."""
    paths = []
    for first, stop in ((0, 30), (30, 31), (31, 80)):
        paths.append(str(tmp_path / f"x{first:02}.h5"))
        with HDF5Writer(paths[-1], variable=["y"]) as writer:
            for k in range(first, stop):
                writer.add(x=np.full(ROW, k, "uint8"), y=np.full((k % 3, 9000), k, "uint8"), number=k)
    return paths


def bytes_of(kernel: Kernel) -> list[int]:
    """The values in the bytes that were requested."""
    found: list[int] = []
    for path, offset, size in kernel.asked:
        with open(path, "rb") as file:
            file.seek(offset)
            found += file.read(size)
    return found


def test_single_samples_are_asked_for_by_their_bytes_in_each_file(files: list[str], kernel: Kernel) -> None:
    data = HDF5Dataset(files, fields=["x", "number"])
    tell = data.read_ahead(1)
    assert tell is not None
    tell(np.array([79, 3, 30, 33, 32, 3]))
    assert bytes_of(kernel) == [k for k in (3, 3, 30, 32, 33, 79) for _ in range(ROW)]
    assert [size for _, _, size in kernel.asked] == [ROW, ROW, ROW, 2 * ROW, ROW]


def test_sequences_are_asked_for_by_their_bytes(files: list[str], kernel: Kernel) -> None:
    tell = HDF5Dataset(files, fields=["y", "number"]).read_ahead(1)
    assert tell is not None
    tell(np.array([3, 5, 4, 32, 31, 29, 60]))
    assert bytes_of(kernel) == [k for k in (4, 5, 29, 31, 32) for _ in range(9000 * (k % 3))]


def test_blocks_are_asked_for_whole_small_samples_too(files: list[str], kernel: Kernel) -> None:
    tell = HDF5Dataset(files).read_ahead(16)
    assert tell is not None
    tell(np.array([79, 20, 17, 78, 28]))
    blocks = [*range(16, 32), *range(64, 80)]
    found = np.bincount(bytes_of(kernel), minlength=256)
    numbers = [path for path, _, size in kernel.asked if size % 8 == 0 and size <= 16 * 8]
    assert len(numbers) == 4, "the small numbers of both blocks, one of which is in three files"
    for k in blocks:
        assert found[k] >= ROW + 9000 * (k % 3), k
    assert max(found[1:16]) < 100


def test_small_samples_alone_and_what_is_not_mapped_are_not_asked_for(files: list[str], tmp_path: Path) -> None:
    assert HDF5Dataset(files, fields="number").read_ahead(1) is None
    with h5py.File(tmp_path / "z.h5", "w") as file:
        file.create_dataset("x", (10, 9000), "uint8", compression="gzip")
    for rows in (1, 4):
        assert HDF5Dataset(tmp_path / "z.h5").read_ahead(rows) is None


def test_what_is_in_the_cache_is_looked_at_four_times_and_not_asked_for(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = replaced(monkeypatch, lambda offset: None)
    tell = HDF5Dataset(files[0], fields="x").read_ahead(1)
    assert tell is not None
    tell(np.arange(30))
    assert (kernel.looks, kernel.asked) == (4, [])


def test_a_file_that_is_partly_in_the_cache_is_asked_for_some_time_after_something_was_missing(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = [errno.EAGAIN] + [None] * 1000
    kernel = replaced(monkeypatch, lambda offset: missing.pop(0))
    tell = HDF5Dataset(files[0], fields="x").read_ahead(1)
    assert tell is not None
    asked = []
    for _ in range(30):
        tell(np.array([3]))
        asked.append(len(kernel.asked))
    assert asked == [*range(1, 17)] + [16] * 14


def test_where_nothing_is_missing_it_looks_less_often(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [None] * 8 + [errno.EAGAIN] + [None] * 50
    kernel = replaced(monkeypatch, lambda offset: answers.pop(0))
    tell = HDF5Dataset(files[0], fields="x").read_ahead(1)
    assert tell is not None
    looks = []
    for _ in range(18):
        tell(np.array([3]))
        looks.append(kernel.looks)
    assert looks == [*range(1, 9)] + [8] * 7 + [9, 10, 11]
    assert len(kernel.asked) == 3


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EINVAL, errno.EIO])
def test_a_file_system_that_does_not_say_what_is_cached_is_not_asked_again(
    files: list[str], error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = replaced(monkeypatch, lambda offset: error)
    (loader,) = loaders(HDF5Dataset(files[0], fields="number"), 1)
    (loader,) = loaders(HDF5Dataset(files[0]), 1, shuffle=False)
    assert [k for step in loader for batch in step for k in batch["number"].tolist()] == [*range(30)]
    assert kernel.looks == 1
    assert kernel.asked == []


def test_a_file_that_is_gone_and_a_python_without_the_calls_are_read_as_ever(
    files: list[str], kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = HDF5Dataset(files[0], fields="x")
    first = data.read_batch(np.arange(30))
    tell = data.read_ahead(1)
    assert tell is not None
    Path(files[0]).unlink()
    tell(np.arange(30))
    assert torch.equal(data.read_batch(np.arange(30)), first)
    monkeypatch.delattr(os, "RWF_NOWAIT")
    tell = HDF5Dataset(files[2], fields="x").read_ahead(1)
    assert tell is not None
    tell(np.arange(30))
    assert kernel.asked == []


def test_no_descriptor_is_left(files: list[str], kernel: Kernel) -> None:
    data = HDF5Dataset(files, fields="x")
    data.read_batch(np.arange(80))
    before = os.listdir("/proc/self/fd")
    tell = data.read_ahead(1)
    assert tell is not None
    tell(np.arange(80))
    assert kernel.asked
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("ways", [{}, {"shuffle": Blocks(4, 3)}, {"num_workers": 1}, {"prefetch_factor": 3}])
@pytest.mark.one_in(2)
def test_batches_are_the_same_with_a_cold_cache(files: list[str], ways: dict[str, Any], kernel: Kernel) -> None:
    (loader,) = loaders(HDF5Dataset(files), 1, **ways)
    numbers = []
    for step in loader:
        for batch in step:
            numbers += batch["number"].tolist()
            for x, y, length, k in zip(batch["x"], batch["y"], batch["y_lengths"], batch["number"], strict=True):
                assert x.tolist() == [k] * ROW
                assert length == k % 3
                assert (y[:length] == k).all()
                assert not y[length:].any()
    assert sorted(numbers) == [*range(80)]
    assert kernel.asked


def test_the_real_kernel_is_asked(files: list[str]) -> None:
    """Whether or not this file is in its cache."""
    tell = HDF5Dataset(files[0], fields="x").read_ahead(1)
    assert tell is not None
    fd = os.open(files[0], os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    tell(np.arange(30))
    os.close(fd)
    assert [set(row) for row in HDF5Dataset(files[0], fields="x").read_batch(np.arange(30)).tolist()] == [
        {k} for k in range(30)
    ]
