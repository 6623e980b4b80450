"""Shuffled batches from an HDF5 file that is not in the page cache, compared with a bare gather in exact order.

    python benchmarks/hdf5/cold.py [--rounds 7] [--folder /tmp/hdf5_bench]

Files of 1 GiB with rows of 64 bytes, 256 bytes and 12 kB, sorted by class. Before each measurement the file is removed from the
cache (posix_fadvise), so it must be on a disk, not in memory. Numbers are wall-clock time per sample, because the disk takes
the time. Every way runs once per round. Shuffling by blocks is measured over three windows. The bare gather of small rows is
measured over four batches: it reads 64 kB for each row, so the whole file would soon be in the cache, which would not happen
with a file larger than memory. One row shows its result over as many samples as three windows have.

Batch means: the standard deviation of the means of a batch's class numbers, divided by that of independent draws.

The second table: the same with the file in the cache, divided by the time without announcing samples; CPU time.
"""

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import torch

import rankwise

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import ratios, rounds, spread

TOTAL = 1 << 30
CLASSES = 1000
KINDS = {"64 B": (64, 1024, 4), "256 B": (256, 1024, 4), "12 kB": (12288, 128, 100)}
"""(bytes per row, samples per batch, batches of the exact order to measure)."""

GOALS = {"64 B": 4.0, "256 B": 4.0, "12 kB": 2.3}


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    chance = np.random.default_rng(0)
    for row, _, _ in KINDS.values():
        path = folder / f"cold-{row}.h5"
        if not path.exists():
            unfinished = path.with_suffix(".part")
            with h5py.File(unfinished, "w", alignment_threshold=65536, alignment_interval=4096) as file:
                rows = file.create_dataset("x", (TOTAL // row, row), "uint8")
                step = (1 << 26) // row
                for start in range(0, len(rows), step):
                    rows[start : start + step] = chance.integers(0, 256, (min(step, len(rows) - start), row), "uint8")
            unfinished.rename(path)


def evict(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


class Bare:
    """`np.take` on a memory map, in an order computed before."""

    def __init__(self, path: Path, size: int, batches: int) -> None:
        with h5py.File(path) as file:
            self._where = path, "uint8", "r", file["x"].id.get_offset(), file["x"].shape
        self._size, self._batches = size, batches

    def __call__(self, turn: int) -> float:
        rows = np.asarray(np.memmap(*self._where))
        order = np.random.default_rng(turn).permutation(len(rows))
        evict(self._where[0])
        began = time.perf_counter()
        for k in range(self._batches):
            out = np.empty((self._size, rows.shape[1]), rows.dtype)
            np.take(rows, order[k * self._size : (k + 1) * self._size], axis=0, out=out, mode="clip")
        return (time.perf_counter() - began) / (self._batches * self._size)


class Untold(rankwise.HDF5Dataset):
    """A dataset that is not told which samples are needed soon."""

    def read_ahead(self, rows: int) -> None:
        return None


class Ours:
    def __init__(self, path: Path, size: int, batches: int, kind=rankwise.HDF5Dataset, warm: bool = False, **ways) -> None:
        self._path, self._size, self._batches, self._kind, self._ways = path, size, batches, kind, ways
        self._warm = warm
        self._clock = time.process_time if warm else time.perf_counter

    def __call__(self, turn: int) -> float:
        data = self._kind(self._path, fields=["x"])  # a separate map, without the advice for an earlier one
        loader = rankwise.Loader(data, global_batch_size=self._size, seed=turn, device="cpu", **self._ways)
        if not self._warm:
            evict(self._path)
        began = self._clock()
        for _ in itertools.islice(loader, self._batches):
            pass
        return (self._clock() - began) / (self._batches * self._size)


def scatter(path: Path, size: int, **ways) -> float:
    data = rankwise.HDF5Dataset(path, fields=["x"])
    order = rankwise.data.loader.order_of(data, len(data), 0, ways.get("shuffle", True))
    number = order.indices(0, 0, min(len(data), 1 << 22)) * CLASSES // len(data)
    means = number[: len(number) // size * size].reshape(-1, size).mean(axis=1)
    return float(means.std() / (np.sqrt((CLASSES**2 - 1) / 12) / np.sqrt(size)))


def cold(kind: str, path: Path, count: int) -> None:
    row, size, batches = KINDS[kind]
    windows = windows_of(path, size)
    bare = "bare np.take on a map"
    ways = {
        bare: Bare(path, size, batches),
        "rankwise.Loader": Ours(path, size, batches),
        "rankwise.Loader, not told": Ours(path, size, batches, Untold),
        'rankwise.Loader, shuffle="blocks"': Ours(path, size, windows, shuffle="blocks"),
        'rankwise.Loader, shuffle="blocks", not told': Ours(path, size, windows, Untold, shuffle="blocks"),
    }
    if row < 4096:
        ways["bare np.take on a map, as many samples as by blocks"] = Bare(path, size, windows)
    found = rounds(ways, count, warm=1, rotate=True)
    judged = 'rankwise.Loader, shuffle="blocks"' if row < 4096 else "rankwise.Loader"
    for name, seconds in found.items():
        goal = f", goal {GOALS[kind]}" if name == judged else ""
        means = scatter(path, size, **({"shuffle": "blocks"} if "blocks" in name and "bare" not in name else {}))
        print(f"| {kind} | {name} | {spread(ratios(found[bare], seconds), 2)}{goal} | {means:.2f} |", flush=True)


def warm(kind: str, path: Path, count: int) -> None:
    _, size, _ = KINDS[kind]
    for name, ways in (("exact", {}), ("blocks", {"shuffle": "blocks"})):
        number = 600 if name == "exact" else 4 * windows_of(path, size)
        pair = {kind: Ours(path, size, number, kind, warm=True, **ways) for kind in (rankwise.HDF5Dataset, Untold)}
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
        found = rounds(pair, count, warm=1, rotate=True)
        print(f"| {kind} | {name} | {spread(ratios(found[rankwise.HDF5Dataset], found[Untold]), 3)} |", flush=True)


def windows_of(path: Path, size: int) -> int:
    """The number of batches in three windows."""
    rows, window = rankwise.HDF5Dataset(path, fields=["x"]).blocks
    return 3 * rows * window // size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/hdf5_bench"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rankwise.init()
    write(args.folder)
    print("| rows | way | rate, / bare gather in exact order | batch means |\n|---|---|---|---|")
    for kind, (row, _, _) in KINDS.items():
        cold(kind, args.folder / f"cold-{row}.h5", args.rounds)
    print("\n| rows | order | time in the cache, / not told |\n|---|---|---|")
    for kind, (row, _, _) in KINDS.items():
        warm(kind, args.folder / f"cold-{row}.h5", args.rounds)


if __name__ == "__main__":
    main()
