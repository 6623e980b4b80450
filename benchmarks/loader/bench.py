"""How fast does a Loader return batches, compared with torch's DataLoader on the same data, and with a bare loop?

    python benchmarks/loader/bench.py                 every kind of dataset, batches of 32, 256 and 1024, 0 and 2 workers
    python benchmarks/loader/bench.py list 32 0       one row

All ways of a row take turns, a part of an epoch each, in one process. Above 1, the Loader is faster.
"""

import itertools
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from rankwise import Loader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import cpu_s, median, p10, ratios, rounds, spread

SAMPLES, WIDTH = 65536, 16
TURNS = 30


class PerSample:
    """Reads one sample at a time, as most people write it."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index], self.y[index]


class InOne(PerSample):
    """Reads many samples at once, as one batch."""

    def __getitems__(self, indices: list[int]):
        return self.x[indices], self.y[indices]


class Augmented(PerSample):
    """Draws a random number for each sample."""

    def __getitem__(self, index: int):
        return self.x[index] + 0.1 * torch.randn(()), self.y[index]


def as_it_is(batch):
    return batch


def stacked(samples):
    xs, ys = zip(*samples, strict=True)
    return torch.stack(xs), torch.stack(ys)


def datasets() -> dict:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(4, (SAMPLES,), generator=generator)
    rows = list(zip(x, y, strict=True))
    return {
        "list": (rows, None),
        "list, own collate_fn": (rows, stacked),
        "class with __getitem__": (PerSample(x, y), None),
        "the same, random": (Augmented(x, y), None),
        "class with __getitems__": (InOne(x, y), as_it_is),
        "TensorDataset": (TensorDataset(x, y), None),
    }


def seconds(batches, count: int, clock=time.perf_counter) -> float:
    """The time of each of `count` batches, after waiting for the first one."""
    batches = iter(batches)
    next(batches)
    began = clock()
    for _ in itertools.islice(batches, count):
        pass
    return (clock() - began) / count


def flat(loader: Loader):
    return (batch for micro_batches in loader for batch in micro_batches)


def by_hand(dataset, collate, size: int):
    """The lower limit: nothing but the calls that make the batches."""
    order = torch.randperm(len(dataset))
    if isinstance(dataset, TensorDataset):
        yield from (tuple(t[part] for t in dataset.tensors) for part in order.split(size))
        return
    indices = order.tolist()
    for start in range(0, len(indices), size):
        part = indices[start : start + size]
        if collate is as_it_is:
            yield dataset.__getitems__(part)
        else:
            samples = [dataset[index] for index in part]
            yield collate(samples) if collate is not None else [torch.stack(field) for field in zip(*samples, strict=True)]


def row(name: str, dataset, collate, size: int, workers: int) -> None:
    count = SAMPLES // size - 2 if isinstance(dataset, TensorDataset) or workers else max(20, 4096 // size)
    own = None if collate is as_it_is else collate  # our Loader takes a batch from __getitems__ without change

    def ours(turn: int):
        return flat(Loader(dataset, batch_size=size, seed=turn, max_epochs=1, collate_fn=own, num_workers=workers))

    def theirs():
        return DataLoader(dataset, size, shuffle=True, collate_fn=collate, num_workers=workers)

    ways = {"Loader": lambda turn: seconds(ours(turn), count), "DataLoader": lambda _: seconds(theirs(), count)}
    if workers == 0:
        ways["by hand"] = lambda _: seconds(by_hand(dataset, collate, size), count)
    else:
        ways["Loader, CPU"] = lambda turn: seconds(ours(turn), count, cpu_s)
        ways["DataLoader, CPU"] = lambda _: seconds(theirs(), count, cpu_s)
    times = rounds(ways, TURNS if workers == 0 else TURNS // 3, warm=1, rotate=True)
    there = times["DataLoader"]
    text = f"{spread(ratios(there, times['Loader']))}, p10 {p10(there) / p10(times['Loader']):.2f}"
    if workers:
        text += f"; CPU of all processes {spread(ratios(times['DataLoader, CPU'], times['Loader, CPU']))}"
    if "by hand" in times:
        text += f"; by hand / Loader {median(ratios(times['by hand'], times['Loader'])):.2f}"
    print(f"{name:25s} batch {size:4d}, {workers} workers: DataLoader / Loader {text}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    kinds = datasets()
    if sys.argv[1:]:
        name, size, workers = sys.argv[1:]
        row(name, *kinds[name], int(size), int(workers))
        return
    for workers, sizes in ((0, (32, 256, 1024)), (2, (256,))):
        for name, size in itertools.product(kinds, sizes):
            row(name, *kinds[name], size, workers)


if __name__ == "__main__":
    main()
