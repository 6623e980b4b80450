"""The order of the samples: (seed, epoch, position) -> index, by a keyed permutation.

    order = Order(samples=10_000, seed=0, shuffle=True)
    order.indices(epoch=3, start=0, stop=64)          # the first 64 samples of the epoch, on any number of ranks

There is no list of all indices, and any position costs the same. The order of an epoch does not depend on ranks or workers.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from rankwise.errors import ConfigError, DataError
from rankwise.host.arguments import FROM_ONE, Argument

Indices = npt.NDArray[np.int64]
Positions = TypeVar("Positions", range, Indices)

_SMALL = 1024  # below this, a permutation table is faster, and every order is possible
_ROUNDS = 6  # 4 showed a chi-square at -3.8 sigma
_RUN = 1 << 14  # positions computed at once: in small calls numpy's overhead dominates
_TABLED = 1 << 27  # samples; the tables of so many take 2 MB, those of a million 0.2 MB
_NETWORKS = 4  # to keep: of an epoch, of its blocks, and of two windows
_CACHED = 8  # a run is 128 KB; a rank that resumes on fewer ranks reads the parts of several ranks in turn


@dataclass(frozen=True)
class Order:
    """The order of one dataset."""

    samples: int
    """Number of samples."""

    seed: int = 0
    shuffle: bool | str = True
    """A text names a kind of shuffle in which not every order is possible."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise DataError("the dataset is empty")

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """int64 sample indices at positions [start, stop) of an epoch; 0 <= start <= stop <= samples."""
        if not 0 <= start <= stop <= self.samples:
            raise DataError(f"positions {start} to {stop} are not within an epoch of {self.samples} samples")
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        if stop - start > _RUN // 2:
            return self._computed(epoch, start, stop)
        runs = [_run(self, epoch, k) for k in range(start // _RUN, -(-stop // _RUN))]
        if not runs:
            return np.empty(0, np.int64)
        offset = start // _RUN * _RUN
        joined = runs[0] if len(runs) == 1 else np.concatenate(runs)
        return joined[start - offset : stop - offset].copy()

    def _computed(self, epoch: int, start: int, stop: int) -> Indices:
        return _shuffled(np.arange(start, stop, dtype=np.int64), self.samples, self.seed, epoch)

    def of_part(self, start: int, stop: int, seed: int) -> Order:
        """The order of only the samples [start, stop), counted from 0, with its own seed."""
        return replace(self, samples=stop - start, seed=seed)


@dataclass(frozen=True)
class BlockOrder(Order):
    """Samples that are stored together are read together: the blocks of `rows` samples are in random order, and the samples of
    each `window` blocks are in random order. A reader that keeps a window in memory reads each block once.

    The quality of the shuffle depends on the number of blocks in a window, not on their size: for a file that is sorted by
    class, batch means scatter 1.1 times as much as those of an exact shuffle with 2048 blocks, 1.2 with 512, 2.6 with 32.
    """

    rows: int = 1
    window: int = 1
    lead: int = 0
    """The number of samples in the first block that come before the first sample, and are not part of this order."""
    starts: tuple[int, ...] = (0,)
    """The samples at which a block starts although the one before may not be full: where files start. Ascending, from 0 on."""

    def _computed(self, epoch: int, start: int, stop: int) -> Indices:
        samples, seed, window = self.samples, self.seed, self.window
        cut = _BlockLayout(samples, self.rows, self.lead, self.starts)
        blocks, windows = _blocks(cut, seed, epoch, window)
        found = []
        for number in range(np.searchsorted(windows, start, "right") - 1, np.searchsorted(windows, stop, "left")):
            first, last = int(windows[number]), int(windows[number + 1])
            positions = np.arange(max(start, first), min(stop, last), dtype=np.int64) - first
            within = _shuffled(positions, last - first, seed, epoch, number)
            begins, sizes = cut.of(blocks[number * window : (number + 1) * window])
            ends = np.cumsum(sizes)
            at = np.searchsorted(ends, within, "right")
            found.append(begins[at] + within - (ends - sizes)[at])
        return np.concatenate(found)

    def of_part(self, start: int, stop: int, seed: int) -> BlockOrder:
        """With the blocks of the whole order, which are cut only at both ends of the part."""
        file = bisect_right(self.starts, start) - 1
        lead = (start - self.starts[file] + (self.lead if file == 0 else 0)) % self.rows
        starts = (0, *(other - start for other in self.starts[file + 1 :] if other < stop))
        return replace(self, samples=stop - start, seed=seed, lead=lead, starts=starts)


class Blocks(NamedTuple):
    """Loader(shuffle=Blocks(rows, window)): samples that are stored together in a file are read together. See BlockOrder."""

    rows: int
    """The number of samples in a block."""

    window: int
    """The number of blocks that are shuffled together; a reader keeps this many in memory."""


SHUFFLE = Argument(
    lambda value: (
        isinstance(value, bool) or value == "blocks" or (isinstance(value, Blocks) and all(map(FROM_ONE.accepts, value)))
    ),
    'True, False, "blocks" (if the dataset has an attribute `blocks`), or rankwise.data.Blocks(rows, window)',
)


@overload
def order_of(dataset: object, samples: int, seed: int, shuffle: bool | str | Blocks | None) -> Order: ...


@overload
def order_of(dataset: object, samples: int | None, seed: int, shuffle: bool | str | Blocks | None) -> Order | None: ...


def order_of(dataset: object, samples: int | None, seed: int, shuffle: bool | str | Blocks | None) -> Order | None:
    """The order of a dataset; None for a stream, which has no number of samples. With "blocks", the dataset has an attribute
    `blocks`: (rows, window); in `block_starts` it may have samples at which a block must start. Raises ConfigError for a stream
    that is to be shuffled, and for "blocks" without that attribute."""
    if samples is None:
        if shuffle:
            raise ConfigError(
                f"shuffle={shuffle!r}, but {type(dataset).__name__} is a stream with its own order; shuffle inside the "
                "stream (a buffer, the order of its files), and remove shuffle"
            )
        return None
    shuffle = True if shuffle is None else shuffle
    if isinstance(shuffle, bool):
        return Order(samples, seed, shuffle)
    found = getattr(dataset, "blocks", None) if isinstance(shuffle, str) else shuffle
    if found is None:
        raise ConfigError(
            f"shuffle='blocks', but {type(dataset).__name__} has no attribute `blocks` (rows, window); add it, or "
            "give shuffle=rankwise.data.Blocks(rows, window)"
        )
    rows, window = found
    text = f"in blocks of {rows}, {window} at a time"
    starts = getattr(dataset, "block_starts", ()) if isinstance(shuffle, str) else ()
    if any(start % rows for start in starts):
        starts = tuple(sorted({0, *(start for start in starts if 0 < start < samples)}))
        return BlockOrder(samples, seed, f"{text}, {len(starts)} files", rows, window, starts=starts)
    return BlockOrder(samples, seed, text, rows, window)


def in_blocks_of(order: Order, shuffle: object) -> Order:
    """The order in the blocks that a checkpoint has recorded as `shuffle`: a run keeps those that it began with, if the dataset
    proposes others. The same object if they are the same, or none are recorded."""
    found = re.fullmatch(r"in blocks of (\d+), (\d+) at a time", str(shuffle))
    if found is None or shuffle == order.shuffle:
        return order
    return BlockOrder(order.samples, order.seed, found[0], int(found[1]), int(found[2]))


def whole_numbers(values: Any) -> Indices | None:
    """As int64; None if they are not one row of integers: bools and fractions would be taken for indices."""
    try:
        found = np.asarray(values)
    except (ValueError, TypeError):
        return None
    return found.astype(np.int64) if found.ndim == 1 and (found.dtype.kind in "iu" or not len(found)) else None


def share(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """The part of rank `rank` of positions [start, stop): contiguous; parts differ by at most one; empty if there are too
    few."""
    n = stop - start
    return start + n * rank // world_size, start + n * (rank + 1) // world_size


def split(indices: Positions, parts: int) -> list[Positions]:
    """Split into `parts` runs of nearly equal length. Runs without a sample are skipped."""
    n = len(indices)
    if parts == 1:
        return [indices] if n else []
    runs = (indices[n * k // parts : n * (k + 1) // parts] for k in range(parts))
    return [run for run in runs if len(run)]


def accumulation(state: Mapping[str, Any], given: int, ranks: int) -> tuple[int, int]:
    """How a run continues from the state of a Loader, if its script gives `accumulate`: (the fewest micro-batches that a step
    had on all ranks, in any attempt; the micro-batches of each rank). A micro-batch does not become larger than it has been,
    because that size fitted into memory. A value that the user has changed is used, on another number of ranks only if it makes
    them smaller: there a script may have computed it from the ranks."""
    fewest = state.get("fewest micro-batches", state["ranks"] * state["accumulate"])
    needed = math.ceil(fewest / ranks)
    if state.get("given accumulate", given) != given and (state["ranks"] == ranks or given > needed):
        return given * ranks, given
    return fewest, needed


@lru_cache(maxsize=_CACHED)
def _run(order: Order, epoch: int, k: int) -> Indices:
    """The indices of the positions from k * _RUN on."""
    return order._computed(epoch, k * _RUN, min((k + 1) * _RUN, order.samples))


class _BlockLayout(NamedTuple):
    """How a BlockOrder cuts its samples into blocks."""

    samples: int
    rows: int
    lead: int
    starts: tuple[int, ...]

    def of(self, numbers: Indices) -> tuple[Indices, Indices]:
        """(the first sample of each block, the number of its samples). A block at either end of a file may be shorter."""
        starts, ends, origins, before, _ = self._files()
        file = np.searchsorted(before, numbers, "right") - 1
        begins = origins[file] + (numbers - before[file]) * self.rows
        firsts = np.maximum(begins, starts[file])
        return firsts, np.minimum(begins + self.rows, ends[file]) - firsts

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return int(self._files()[4])

    def _files(self) -> tuple[Indices, Indices, Indices, Indices, int]:
        """For each file: its first sample and the one after its last, where its first block would begin, and the number of the
        blocks before it; and the number of all blocks."""
        starts = np.array(self.starts, np.int64)
        ends = np.append(starts[1:], self.samples)
        origins = starts.copy()
        origins[0] -= self.lead
        counts = -(-(ends - origins) // self.rows)
        return starts, ends, origins, np.cumsum(counts) - counts, int(counts.sum())


@lru_cache(maxsize=_CACHED)
def _blocks(cut: _BlockLayout, seed: int, epoch: int, window: int) -> tuple[Indices, Indices]:
    """(the blocks in the order of the epoch, the positions at which each window starts, and the end of the last one)."""
    count = cut.blocks
    order = _shuffled(np.arange(count, dtype=np.int64), count, seed, epoch)
    before = np.concatenate([[0], np.cumsum(cut.of(order)[1])])
    return order, before[[*range(0, count, window), count]]


def _shuffled(positions: Indices, samples: int, *keys: int) -> Indices:
    """`keys`: seed, epoch, and more numbers for another order."""
    if samples < _SMALL:
        found: Indices = np.random.default_rng(_keys(*keys)).permutation(samples)[positions]
        return found
    return _permute(positions, samples, _network(samples, *keys))


@lru_cache(maxsize=_NETWORKS)
def _network(samples: int, *keys: int) -> _Network | _Tables:
    network = _Network.of(samples, _keys(*keys))
    return _Tables.of(network) if samples <= _TABLED else network


def _keys(seed: int, epoch: int, *more: int) -> np.random.SeedSequence:
    """numpy splits a large seed into two words, and would use the second like the epoch of a small seed."""
    if seed < 2**32:
        return np.random.SeedSequence([seed, epoch], spawn_key=(2, *more) if more else ())
    return np.random.SeedSequence([epoch, seed], spawn_key=(1, *more))


def _permute(positions: Indices, samples: int, network: _Network | _Tables) -> Indices:
    """A bijection of [0, samples). The grid of the network has fewer than `height` cells too many; a position that lands on one
    of them goes through the network again (cycle walking)."""
    image = network.moved(positions)
    outside = image >= samples
    if outside.any():
        image[outside] = _permute(image[outside], samples, network)
    return image


class _Network(NamedTuple):
    """An additive Feistel network on a grid of width x height cells. Each round adds to x what follows from y and a key, modulo
    the width; or to y what follows from x, modulo the height."""

    width: int
    height: int
    keys: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, samples: int, keys: np.random.SeedSequence) -> _Network:
        height = math.isqrt(samples - 1) + 1
        return cls(-(-samples // height), height, keys.generate_state(_ROUNDS, np.uint64).astype(np.uint64))

    def moved(self, positions: Indices) -> Indices:
        """In place, and with x - x // n * n for x % n: numpy divides four times as fast as it computes a remainder."""
        width, height, keys = self
        rest = positions.astype(np.uint64)
        x = rest // np.uint64(height)
        y = rest - x * np.uint64(height)
        mixed = np.empty_like(x)
        for number, key in enumerate(keys):
            moved, other, side = (x, y, np.uint64(width)) if number % 2 == 0 else (y, x, np.uint64(height))
            np.bitwise_xor(other, key, out=mixed)
            _mix(mixed, rest)
            moved += mixed
            np.floor_divide(moved, side, out=rest)
            rest *= side
            moved -= rest
        x *= np.uint64(height)
        x += y
        return x.view(np.int64)


class _Tables(NamedTuple):
    """The same in a third of the time: in a round, a table says what to add. The tables continue after width and height, so
    that only the last two must reduce the sums."""

    height: int
    rounds: list[Indices]
    last_x: Indices
    last_y: Indices

    @classmethod
    def of(cls, network: _Network) -> _Tables:
        width, height, keys = network
        rounds = []
        for number, key in enumerate(keys):
            side, other = (width, height) if number % 2 == 0 else (height, width)
            mixed = np.arange(other, dtype=np.uint64) ^ key
            _mix(mixed, np.empty_like(mixed))
            mixed -= mixed // np.uint64(side) * np.uint64(side)
            rounds.append(np.tile(mixed.view(np.int64), (number + 3) // 2))
        most = _ROUNDS // 2 + 1
        return cls(height, rounds, np.tile(np.arange(width) * height, most), np.tile(np.arange(height), most))

    def moved(self, positions: Indices) -> Indices:
        x = positions // self.height
        found = x * self.height
        y = positions - found
        for number, added in enumerate(self.rounds):
            if number % 2 == 0:
                x += added.take(y, 0, found, "clip")  # any other mode copies `found` first
            else:
                y += added.take(x, 0, found, "clip")
        self.last_x.take(x, 0, found, "clip")
        found += self.last_y.take(y, 0, x, "clip")
        return found


def _mix(value: npt.NDArray[np.uint64], spare: npt.NDArray[np.uint64]) -> None:
    """The finaliser of splitmix64 (Steele et al. 2014), in place, cut to 31 bits so that sums cannot overflow."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(value, np.uint64(shift), out=spare)
        value ^= spare
        value *= np.uint64(factor)
    np.right_shift(value, np.uint64(31), out=spare)
    value ^= spare
    value >>= np.uint64(33)
