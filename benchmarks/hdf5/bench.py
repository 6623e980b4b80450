"""Shuffled batches from an HDF5 file, compared with a bare gather from a memory map of the rows and with hand-written code.

    python benchmarks/hdf5/bench.py [--rounds 7] [--folder /tmp/hdf5_bench] [--hand-over] [--gzip] [--open]

A: 1 M rows of 64 uint8 and a label, batches of 1024. B: 4,000 sequences of 50 to 1500 x 40 float32 with integer targets,
padded, batches of 32. C: 40,000 images of 3 x 64 x 64 uint8 and a label, batches of 128. The file is in the page cache. Every
way has a process of its own, and runs once per round. The numbers are CPU seconds per batch of this process and its workers,
so that other programs on the machine matter little. With --hand-over, only the Loader's own ways run, within one epoch, which
excludes the start of the workers, beside a bare gather here and in another process, the floor of a hand-over. With --gzip:
16,384 rows of 4 kB in gzip chunks of 128 rows, shuffled by blocks, compared with `zlib` on whole chunks. With --open: a file
of RETURNN's with a million sequences and tags, opened to the first shuffled batch, compared with its lengths read in one slice.
RETURNN needs `pip install returnn dm-tree`; without it, its row says so.
"""

import argparse
import functools
import itertools
import mmap
import multiprocessing
import os
import pickle
import socket
import sys
import warnings
import zlib
from pathlib import Path

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import rankwise

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import cpu_s, median, ratios, rounds, spread

from rankwise.data.order import Order

GOALS = {"A": 0.7, "B": 0.75, "C": 0.75}


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    chance = np.random.default_rng(0)
    if not (folder / "A.h5").exists():
        with h5py.File(folder / "A.h5", "w", alignment_threshold=65536, alignment_interval=4096) as file:
            file["x"] = chance.integers(0, 256, (1_000_000, 64), "uint8")
            file["y"] = chance.integers(0, 10, 1_000_000)
    if not (folder / "C.h5").exists():
        with h5py.File(folder / "C.h5", "w", alignment_threshold=65536, alignment_interval=4096) as file:
            file["x"] = chance.integers(0, 256, (40_000, 3, 64, 64), "uint8")
            file["y"] = chance.integers(0, 10, 40_000)
    if not (folder / "B.h5").exists():
        with rankwise.HDF5Writer(folder / "B.h5", layout="returnn", dims={"classes": 50}) as writer:
            for number in range(4000):
                frames = int(chance.integers(50, 1501))
                classes = chance.integers(0, 50, frames // 4, "int32")
                writer.add(data=chance.random((frames, 40), "float32"), classes=classes, tag=f"seq-{number}")


def mapped(path: Path, name: str) -> np.ndarray:
    with h5py.File(path) as file:
        dataset = file[name]
        return np.asarray(np.memmap(path, dataset.dtype, "r", dataset.id.get_offset(), dataset.shape))


class Raw:
    """`np.take` on a memory map, in a plain loop, in an order computed before."""

    empty = staticmethod(np.empty)

    def __init__(self, path: Path, size: int) -> None:
        self._x, self._y = mapped(path, "x"), mapped(path, "y")
        self._order, self._size, self._at = np.random.default_rng(1).permutation(len(self._x)), size, 0

    def __call__(self) -> list[torch.Tensor]:
        some = self._order[self._at : self._at + self._size]
        self._at = (self._at + self._size) % (len(self._order) - self._size)
        batch = []
        for rows in (self._x, self._y):
            out = self.empty((self._size, *rows.shape[1:]), rows.dtype)
            batch.append(torch.from_numpy(np.take(rows, some, axis=0, out=out, mode="clip")))
        return batch


class Floor(Raw):
    """The same with what a Loader cannot leave out: the order of the epoch, and the size of the file before each gather."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(path, size)
        self._file, self._batches = path.open("rb"), self._in_order()

    def _in_order(self):
        order, planned = Order(len(self._x), seed=0), max((1 << 14) // self._size, 1) * self._size
        for epoch in itertools.count():
            for start in range(0, len(self._x) - planned, planned):
                some = order.indices(epoch, start, start + planned)
                yield from (some[at : at + self._size] for at in range(0, planned, self._size))

    def __call__(self) -> list[torch.Tensor]:
        some = next(self._batches)
        batch = []
        for rows in (self._x, self._y):
            os.fstat(self._file.fileno())
            out = np.empty((self._size, *rows.shape[1:]), rows.dtype)
            batch.append(torch.from_numpy(np.take(rows, some, axis=0, out=out, mode="clip")))
        return batch


class RawSequences:
    """Slices of a memory map, copied into a padded batch."""

    empty = staticmethod(np.empty)

    def __init__(self, path: Path, size: int) -> None:
        self._rows = [mapped(path, "inputs"), mapped(path, "targets/data/classes")]
        with h5py.File(path) as file:
            self._lengths = file["seqLengths"][...].astype(np.int64)
        self._starts = np.cumsum(self._lengths, axis=0) - self._lengths
        self._order, self._size, self._at = np.random.default_rng(1).permutation(len(self._lengths)), size, 0

    def __call__(self) -> list[torch.Tensor]:
        some = self._order[self._at : self._at + self._size]
        self._at = (self._at + self._size) % (len(self._order) - self._size)
        batch = []
        for key, rows in enumerate(self._rows):
            lengths, starts = self._lengths[some, key], self._starts[some, key]
            out = self.empty((len(some), lengths.max(), *rows.shape[1:]), rows.dtype)
            for to, start, length in zip(out, starts.tolist(), lengths.tolist(), strict=True):
                to[:length] = rows[start : start + length]
                to[length:] = 0
            batch.append(torch.from_numpy(out))
        return batch


class Elsewhere:
    """The floor of a hand-over: another process makes the batches, `ahead` in advance, in memory that both share. For each
    batch it gets a byte, the number of a slot, and sends the shapes."""

    SLOT = 16 << 20

    def __init__(self, make, ahead: int = 4) -> None:
        self._make = make
        self._memory = mmap.mmap(-1, (ahead + 2) * self.SLOT)
        self._here, self._there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = multiprocessing.get_context("fork").Process(target=self._serve, daemon=True)
        self._process.start()
        for slot in range(ahead + 1):
            self._here.send(bytes([slot]))
        self._held, self._batch = ahead + 1, None

    def _serve(self) -> None:
        torch.set_num_threads(1)
        while request := self._there.recv(1):
            end, laid = request[0] * self.SLOT, []

            def empty(shape, dtype, laid=laid):
                nonlocal end
                out = np.ndarray(shape, dtype, self._memory, end)
                laid.append((out.shape, out.dtype.str, end))
                end += -(-out.nbytes // 64) * 64
                return out

            self._make.empty = empty
            self._make()
            self._there.send(request + pickle.dumps(laid))

    def __call__(self) -> list[torch.Tensor]:
        self._here.send(bytes([self._held]))  # nobody has this batch any more
        answer = self._here.recv(4096)
        self._held = answer[0]
        return [torch.from_numpy(np.ndarray(shape, kind, self._memory, at)) for shape, kind, at in pickle.loads(answer[1:])]

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


class Rows(Dataset):
    def __init__(self, x, y) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        return torch.as_tensor(self.x[index]), int(self.y[index])


class Returnn:
    """HDFDataset, its batching and its collate function, combined as in RETURNN's engine."""

    def __init__(self, path: Path, size: int) -> None:
        from returnn.datasets.hdf import HDFDataset
        from returnn.log import log
        from returnn.torch.data import pipeline
        from returnn.torch.data.returnn_dataset_wrapper import ReturnnDatasetIterDataPipe

        log.initialize(verbosity=[0])
        warnings.simplefilter("ignore")
        self._dataset = HDFDataset(files=[str(path)], seq_ordering="random", cache_byte_size=0)
        self._epoch = 0
        samples = ReturnnDatasetIterDataPipe(self._dataset, reset_callback=self._reset)
        batches = pipeline.BatchingIterDataPipe(samples, batch_size=None, max_seqs=size)
        self._loader = DataLoader(batches, batch_size=None, collate_fn=pipeline.collate_batch)
        self._batches = iter(self._loader)

    def _reset(self) -> None:
        self._epoch += 1
        self._dataset.init_seq_order(epoch=self._epoch)

    def __call__(self):
        if (batch := next(self._batches, None)) is None:
            self._batches = iter(self._loader)
            batch = next(self._batches)
        return batch


def loop(make):
    """Takes the next batch of the iterator that `make` returns, again and again."""
    batches = iter(())

    def one():
        nonlocal batches
        if (batch := next(batches, None)) is None:
            batches = iter(make())
            batch = next(batches)
        return batch

    return one


def timed(one, count: int, first: bool = True) -> float:
    """CPU seconds of a call. `first`: whether one call more, which is not counted, comes first. A batch is held while the next
    is made, as in a `for` loop."""
    if first:
        one()
    began = cpu_s()
    for _batch in (one() for _ in range(count)):
        pass
    return (cpu_s() - began) / count


class Apart:
    """A way in a process of its own, as in a training. In one process, the threads of one way run in the turn of the next, and
    its batches lie where the next would lay its own."""

    def __init__(self, one) -> None:
        self._here, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=self._serve, args=(one, there))
        self._process.start()

    def _serve(self, one, there) -> None:
        while (turn := there.recv()) is not None:
            there.send(one(turn))
        os._exit(0)  # with threads and workers that wait for the next turn

    def __call__(self, turn: int) -> float:
        self._here.send(turn)
        return self._here.recv()

    def stop(self) -> None:
        self._here.send(None)
        self._process.join()


def apart(ways: dict, turns: int) -> dict:
    """`rounds` of these ways, each in its own process."""
    processes = {name: Apart(one) for name, one in ways.items()}
    try:
        return rounds(processes, turns, warm=1, rotate=True)
    finally:
        for process in processes.values():
            process.stop()


def ways_of(kind: str, path: Path, size: int) -> dict:
    data = rankwise.HDF5Dataset(path, fields=["data", "classes"] if kind == "B" else ["x", "y"])

    def ours_with(**ways):
        return loop(lambda: rankwise.Loader(data, global_batch_size=size, max_epochs=99, **ways)), 1

    ours = {
        "rankwise.Loader": ours_with(),
        "rankwise.Loader, a thread 4 ahead": ours_with(prefetch_factor=4),
        "rankwise.Loader, a process 4 ahead": ours_with(prefetch_factor=4, num_workers=1),
    }
    if kind == "B":
        found = {"bare slices of a map": (RawSequences(path, size), 1), **ours}
        try:
            return {**found, "RETURNN HDFDataset": (Returnn(path, size), 0.2)}
        except ImportError as error:
            print(f"RETURNN is not here: {error}", file=sys.stderr)
            return found
    x, y = torch.from_numpy(mapped(path, "x")[:].copy()), torch.from_numpy(mapped(path, "y")[:].copy())
    file = h5py.File(path)
    per_sample, by_h5py = Rows(x, y), Rows(file["x"], mapped(path, "y"))
    return {
        "bare np.take on a map": (Raw(path, size), 1),
        **ours,
        "bare np.take in the Loader's order, with the file's size": (Floor(path, size), 1),
        "DataLoader, tensors in memory": (loop(lambda: DataLoader(per_sample, size, shuffle=True)), 0.05),
        "DataLoader, h5py a sample": (loop(lambda: DataLoader(by_h5py, size, shuffle=True)), 0.05),
    }


def within_an_epoch(data, size: int, count: int, before: int = 0, **ways) -> float:
    """After `before` epochs by the same workers, which then have mapped the whole file."""
    batches = iter(rankwise.Loader(data, global_batch_size=size, max_epochs=1 + before, persistent_workers=before > 0, **ways))
    for _ in range(before * len(data) // size + count // 3):
        next(batches)
    return timed(lambda: next(batches), count)


def by_another(make, count: int) -> float:
    batches = Elsewhere(make)
    try:
        for _ in range(count // 3):
            batches()
        return timed(batches, count)
    finally:
        batches.stop()


def hand_over(folder: Path, turns: int) -> None:
    print("| data | way | CPU us a batch | / here |\n|---|---|---|---|")
    thread, process = {"prefetch_factor": 4}, {"prefetch_factor": 4, "num_workers": 1}
    for kind, size, count in (("A", 1024, 600), ("C", 128, 200), ("B", 32, 80)):
        data = rankwise.HDF5Dataset(folder / f"{kind}.h5", fields=["data", "classes"] if kind == "B" else ["x", "y"])
        one = functools.partial(within_an_epoch, data, size, count)
        bare = functools.partial(RawSequences if kind == "B" else Raw, folder / f"{kind}.h5", size)
        ways = {
            "here": lambda _, one=one: one(),
            "a thread 4 ahead": lambda _, one=one: one(**thread),
            "a process 4 ahead": lambda _, one=one: one(**process),
            "a process 4 ahead, in its second epoch": lambda _, one=one: one(before=1, **process),
            "a bare gather here": lambda _, make=bare, n=count: timed(make(), n),
            "a bare gather by a process 4 ahead": lambda _, make=bare, n=count: by_another(make(), n),
        }
        found = apart(ways, turns)
        for name, seconds in found.items():
            print(f"| {kind} | {name} | {median(seconds) * 1e6:.0f} | {spread(ratios(seconds, found['here']))} |", flush=True)


def gzip(folder: Path, turns: int) -> None:
    path, size = folder / "gzip.h5", 128
    if not path.exists():
        with h5py.File(path, "w") as file:
            numbers = np.random.default_rng(0).integers(0, 16, (16384, 4096), "uint8")
            file.create_dataset("x", data=numbers, chunks=(size, 4096), compression="gzip")
    chunks: list = []
    with h5py.File(path) as file:
        file["x"].id.chunk_iter(chunks.append)
    data = path.read_bytes()
    packed = itertools.cycle([data[chunk.byte_offset :][: chunk.size] for chunk in chunks])
    epoch = len(chunks)

    def ours(_) -> float:
        data = rankwise.HDF5Dataset(path)  # a new one keeps no chunk
        one = loop(lambda: rankwise.Loader(data, global_batch_size=size, shuffle="blocks", max_epochs=1))
        return timed(one, epoch, first=False)

    rows = np.random.default_rng(1).permutation(size * len(chunks)).reshape(-1, size).tolist()

    def bare():
        with path.open("rb", buffering=0) as file:
            kept: dict = {}
            for some in rows:
                out = np.empty((size, 4096), np.uint8)
                for to, row in enumerate(some):
                    number, at = divmod(row, size)
                    if number not in kept:
                        file.seek(chunks[number].byte_offset)
                        kept[number] = np.frombuffer(zlib.decompress(file.read(chunks[number].size)), np.uint8).reshape(
                            size, -1
                        )
                    out[to] = kept[number][at]
                yield torch.from_numpy(out)

    ways = {
        "zlib on whole chunks": lambda _: timed(lambda: zlib.decompress(next(packed)), epoch, first=False),
        "a bare loop: read, decode and keep chunks, copy rows": lambda _: timed(loop(bare), epoch, first=False),
        "rankwise.Loader": ours,
    }
    found = rounds(ways, turns, warm=1, rotate=True)
    print("| way | CPU us a batch | rate, / zlib |\n|---|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {median(seconds) * 1e6:.0f} | {spread(ratios(found['zlib on whole chunks'], seconds))} |")


def opening(folder: Path, turns: int) -> None:
    path, samples = folder / "open.h5", 1_000_000
    if not path.exists():
        chance = np.random.default_rng(0)
        lengths = chance.integers(1, 4, (samples, 1), "int32")
        with h5py.File(path, "w") as file:
            file.attrs.update(inputPattSize=4, numSeqs=samples, numTimesteps=int(lengths.sum()), numLabels=0)
            file["inputs"] = chance.random((int(lengths.sum()), 4), "float32")
            file["seqLengths"] = lengths
            file["seqTags"] = np.array([b"seq-%07d" % number for number in range(samples)])

    def lengths_alone() -> None:
        with h5py.File(path) as file:
            file["seqLengths"][...]

    def first_batch(fields: list[str] | None) -> None:
        next(iter(rankwise.Loader(rankwise.HDF5Dataset(path, fields), batch_size=32)))

    ways = {
        "the lengths in one slice": lambda _: timed(lengths_alone, 1, first=False),
        "first batch, without tags (goal 6)": lambda _: timed(lambda: first_batch(["data"]), 1, first=False),
        "first batch": lambda _: timed(lambda: first_batch(None), 1, first=False),
    }
    found = rounds(ways, turns, warm=1, rotate=True)
    print("| way | CPU ms | / the lengths |\n|---|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {median(seconds) * 1e3:.1f} | {spread(ratios(seconds, found['the lengths in one slice']))} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/hdf5_bench"))
    parser.add_argument("--hand-over", action="store_true")
    parser.add_argument("--gzip", action="store_true")
    parser.add_argument("--open", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    write(args.folder)
    if args.gzip:
        gzip(args.folder, args.rounds)
        return
    if args.open:
        opening(args.folder, args.rounds)
        return
    if args.hand_over:
        hand_over(args.folder, args.rounds)
        return
    print("| data | way | rate, / bare gather | ours / this |\n|---|---|---|---|")
    for kind, size, count in (("A", 1024, 400), ("C", 128, 200), ("B", 32, 60)):
        ways = ways_of(kind, args.folder / f"{kind}.h5", size)
        called = {name: (lambda turn, one=one, n=count * share: timed(one, int(n))) for name, (one, share) in ways.items()}
        found = apart(called, args.rounds)
        bare, ours = list(found.values())[:2]
        for name, seconds in found.items():
            goal = f" (goal {GOALS[kind]})" if seconds is ours else ""
            print(
                f"| {kind} | {name} | {spread(ratios(bare, seconds), 4)}{goal} | {spread(ratios(seconds, ours), 1)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
