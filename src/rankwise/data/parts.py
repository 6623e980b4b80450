"""Loader(split="files"): each rank reads its own part of the dataset, a run of samples, and so opens only its own files.

    division = Division(Order(1003, seed=0), ranks=4)
    division.indices(epoch=0, rank=1, start=0, stop=16)    # the first 16 samples of rank 1: from 251 to 501, shuffled

Position p of an epoch is a sample of rank p mod `ranks`. So all ranks have the same number of steps, a position is the whole
state, and the rest of the epoch can be divided again, among any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rankwise.data.batching import ByCount, ByTokens, LengthBatches, Planned, balanced_share, fitting_runs, going_on
from rankwise.data.order import Indices, Order, split
from rankwise.dist import seed as seeds
from rankwise.errors import ConfigError

SPLITS = ("files",)

_PLANNED = 4096  # positions of a rank whose samples are looked up at once


@dataclass(frozen=True)
class Division:
    """Divides the samples of an epoch from `position` on: each rank gets one run of the samples that `before` has not used
    yet."""

    order: Order
    ranks: int
    position: int = 0
    before: Division | None = None

    def count(self, rank: int, position: int) -> int:
        """The number of samples that a rank has used before this position of the epoch."""
        return max(-((rank + self.position - position) // self.ranks), 0)

    def indices(self, epoch: int, rank: int, start: int, stop: int) -> Indices:
        """The samples of a rank from its own position `start` to `stop`."""
        return _merged(self._sources(epoch, rank), start, stop)

    def _run(self, rank: int) -> tuple[int, int]:
        """Where the samples of a rank start and end, among those that are divided here."""
        each, more = divmod(self.order.samples - self.position, self.ranks)
        first = rank * each + min(rank, more)
        return first, first + each + (rank < more)

    def _sources(self, epoch: int, rank: int) -> list[_Source]:
        first, last = self._run(rank)
        if self.before is None:
            return [_Source(last - first, partial(self._of_part, epoch, rank, first, last))]
        found, at = [], 0
        for other in range(self.before.ranks):
            had, end = self.before.count(other, self.position), self.before.count(other, self.order.samples)
            begin, stop = max(first - at, 0), min(last - at, end - had)
            if begin < stop:
                found.append(_Source(stop - begin, partial(self._of_before, epoch, other, had + begin)))
            at += end - had
        return found

    def _of_part(self, epoch: int, rank: int, first: int, last: int, start: int, stop: int) -> Indices:
        seed = seeds.derive(self.order.seed, "part", rank, self.ranks)
        return first + self.order.of_part(first, last, seed).indices(epoch, start, stop)

    def _of_before(self, epoch: int, rank: int, first: int, start: int, stop: int) -> Indices:
        assert self.before is not None
        return self.before.indices(epoch, rank, first + start, first + stop)


class _Source(NamedTuple):
    length: int
    read: Callable[[int, int], Indices]
    """The samples from one place of the source to another."""


def _merged(sources: Sequence[_Source], start: int, stop: int) -> Indices:
    """Places [start, stop) of a sequence that mixes the samples of all sources evenly; each source keeps its order."""
    if start == stop:
        return np.empty(0, np.int64)
    (length, read), *others = sources
    if not others:
        return read(start, stop)
    total = sum(source.length for source in sources)
    before, rest = divmod(start * length, total)
    ends = (rest + length * np.arange(stop - start + 1, dtype=np.int64)) // total  # `start * length` may exceed 63 bits
    is_first = np.diff(ends) > 0
    out = np.empty(stop - start, np.int64)
    out[is_first] = read(before, before + int(ends[-1]))
    out[~is_first] = _merged(others, start - before, stop - before - int(ends[-1]))
    return out


class Cut(NamedTuple):
    position: int
    """The ranks divide the epoch from here on."""

    ranks: int


@dataclass(frozen=True)
class Cuts:
    """The numbers of ranks among which the samples of one epoch were divided, and the position at which each number starts."""

    epoch: int = 0
    cuts: tuple[Cut, ...] = ()

    def before(self, epoch: int, start: int) -> Cuts:
        """The cuts that apply to the samples before this position of the epoch."""
        return Cuts(epoch, tuple(cut for cut in self.cuts if cut.position < start) if epoch == self.epoch else ())

    def more(self, position: int, ranks: int) -> Cuts:
        return Cuts(self.epoch, (*self.cuts, Cut(position, ranks)))

    def division(self, order: Order) -> Division | None:
        """The division that results from the cuts; None if there are none."""
        division = None
        for position, ranks in self.cuts:
            division = Division(order, ranks, position, division)
        return division

    def state(self) -> dict[str, Any]:
        return {"split": "files", "parts": {"epoch": self.epoch, "cuts": [list(cut) for cut in self.cuts]}}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Cuts:
        return cls(state["parts"]["epoch"], tuple(Cut(*cut) for cut in state["parts"]["cuts"]))


class ByCountOfParts(ByCount):
    """`size` samples each: all ranks have the same number, or one less, from their own parts."""

    def __init__(self, order: Order, size: int, drop_last: bool = False) -> None:
        super().__init__(order, size, drop_last)
        self._cuts = Cuts()

    def plan(self, epoch: int, start: int, rank: int, world_size: int, accumulate: int) -> Iterator[Planned]:
        self._cuts = self._cuts.before(epoch, start)
        division = self._cuts.division(self._order)
        if division is None or division.ranks != world_size:
            self._cuts = self._cuts.more(start, world_size)
            division = Division(self._order, world_size, start, division)
        size, end = self.size, self._end(start)
        planned = max(_PLANNED * world_size // size, 1) * size
        for first in range(start, end, planned):
            stop = min(first + planned, end)
            had = division.count(rank, first)
            mine = division.indices(epoch, rank, had, division.count(rank, stop))
            for begin in range(first, stop, size):
                after = min(begin + size, stop)
                share = mine[division.count(rank, begin) - had : division.count(rank, after) - had]
                yield after, after == end, split(share, accumulate)

    def state(self) -> dict[str, Any]:
        return super().state() | self._cuts.state()

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._cuts = Cuts.of(state)


class ByTokensOfParts(ByTokens):
    """As many samples as fit, for each rank from its own part: each rank gets an equal share of the tokens.

    Each rank sorts its own samples of a pool and cuts them, into as many batches as the rank that needs most. If the number of
    ranks changes in the middle of a pool, the global batches that were planned for it are divided among the new ranks; after
    that a new pool starts.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._cuts = Cuts()

    def plan(self, epoch: int, start: int, rank: int, world_size: int, accumulate: int) -> Iterator[Planned]:
        self._cuts = self._cuts.before(epoch, start)
        division, total = self._cuts.division(self._order), self._order.samples
        if division is not None and division.ranks != world_size:
            pools = -((division.position - start) // self.pool)
            boundary = min(division.position + pools * self.pool, total)
            for stop, of_ranks in self._steps_of(division, epoch, start, boundary):
                samples = np.concatenate(of_ranks)
                yield stop, stop == total, balanced_share(samples, self._lengths.of(samples), rank, world_size, accumulate)
            start = boundary
        if division is None or division.ranks != world_size:
            self._cuts = self._cuts.more(start, world_size)
            division = Division(self._order, world_size, start, division)
        for stop, of_ranks in self._steps_of(division, epoch, start, total):
            mine = of_ranks[rank]
            yield stop, stop == total, balanced_share(mine, self._lengths.of(mine), 0, 1, accumulate)

    def _steps_of(self, division: Division, epoch: int, start: int, end: int) -> Iterator[tuple[int, list[Indices]]]:
        """For each global batch from `start` to `end`: (the position after it, the samples of each rank)."""
        number = (start - division.position) // self.pool
        for first in range(division.position + number * self.pool, end, self.pool):
            yield from going_on(self._of_ranks(division, epoch, first), first, epoch, start)

    def _of_ranks(self, division: Division, epoch: int, first: int) -> list[list[Indices]]:
        """The global batches of the pool that starts at position `first`."""
        last = min(first + self.pool, self._order.samples)
        if self.most is not None and self.most < division.ranks:
            raise ConfigError(
                f"max_samples={self.most} with split='files' on {division.ranks} ranks, but each rank takes at least one "
                f"sample; give max_samples={division.ranks} or more, or remove split"
            )
        most = self.most // division.ranks if self.most is not None else None
        found = []
        for rank in range(division.ranks):
            mine = division.indices(epoch, rank, division.count(rank, first), division.count(rank, last))
            lengths = self._lengths.of(mine)
            by_length = np.argsort(lengths, kind="stable")
            runs = fitting_runs(lengths[by_length].tolist(), self.tokens / division.ranks, most)
            found.append([mine[by_length[start:stop]] for start, stop in runs])
        steps = max(map(len, found))
        batches = [list(step) for step in zip(*(_cut_into(steps, some) for some in found), strict=True)]
        if self._order.shuffle:
            keys = np.random.SeedSequence([division.order.seed, epoch, first, division.ranks, 1])
            batches = [batches[k] for k in np.random.default_rng(keys).permutation(len(batches))]
        return batches

    def state(self) -> dict[str, Any]:
        return super().state() | self._cuts.state()

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._cuts = Cuts.of(state)


def _cut_into(n: int, batches: list[Indices]) -> list[Indices]:
    """The same samples in `n` batches, in the same order: the largest are halved. The last are empty if there are too few
    samples."""
    while len(batches) < n and (largest := max(range(len(batches)), key=lambda k: len(batches[k]), default=None)) is not None:
        some = batches[largest]
        if len(some) < 2:
            break
        batches[largest : largest + 1] = [some[: len(some) // 2], some[len(some) // 2 :]]
    return batches + [np.empty(0, np.int64)] * (n - len(batches))


def check_split(asked: str | None, dataset: Any, is_stream: bool, batches: Any) -> None:
    """Raises ConfigError if this data cannot be split."""
    name = type(dataset).__name__
    if asked is not None and is_stream:
        raise ConfigError(
            f"split={asked!r}, but {name} is a stream, and rankwise cannot divide its files; choose the files by rank "
            "inside the stream, set its attribute split_by_rank = True, and remove split"
        )
    if asked is not None and batches is not None and not isinstance(batches, LengthBatches):
        raise ConfigError(
            f"split={asked!r} gives each rank its own part of the samples, but {type(batches).__name__} chooses the samples of "
            "all ranks; remove split, or give a batch size or LengthBatches"
        )
