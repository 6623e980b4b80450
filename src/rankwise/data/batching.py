"""Which samples make a global batch: a fixed number, as many as fit into a number of tokens, or those of a batch sampler.

    batching = ByTokens(Order(10_000, seed=0), lengths, tokens=50_000)
    for stop, is_last, micro_batches in batching.plan(epoch=0, start=0, rank=1, world_size=4, accumulate=2): ...

The global batches are the same on any number of ranks. A position is the number of samples taken. Every batching can resume
wherever a global batch ends.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rankwise.data.order import Indices, Order, share, split, whole_numbers
from rankwise.dist import seed as seeds
from rankwise.errors import ConfigError, DataError
from rankwise.host.arguments import ABOVE_ZERO, FROM_ONE, Argument, shown, takes

Lengths = npt.NDArray[np.float64]
Planned = tuple[int, bool, list[Indices]]
"""(The position after a global batch, whether the epoch ends with it, the samples of each micro-batch of a rank.)"""

_LENGTHS = Argument(
    lambda v: callable(v) or (hasattr(v, "__len__") and not isinstance(v, str)), "one number per sample, or a function"
)

_PLANNED, _STEPS = 1 << 14, 512  # positions whose samples are looked up at once; their steps, at most
_POOL_STEPS = 32  # 1.2 % padding; 8 give 4 % (50 000 lengths from 50 to 1500)
_ESTIMATED = 1024  # samples from which the mean length is estimated
_EXACT = 1e-3  # precision of the search for the smallest maximum cost of a part
_OTHER_LENGTHS = ": the lengths of the samples, or the tokens of a batch, have changed since the checkpoint was made"


class Batching(Protocol):
    """Global batches of a map-style dataset."""

    by: str
    """How batches are cut, in a word. A checkpoint can be resumed only with the same way."""

    size: int
    """Samples of a global batch; the approximate number if they differ."""

    def plan(self, epoch: int, start: int, rank: int, world_size: int, accumulate: int) -> Iterator[Planned]:
        """The global batches from position `start` on, for rank `rank`. All ranks have about the same cost. Micro-batches
        without a sample are skipped."""

    def steps_per_epoch(self) -> int | None:
        """None if it is unknown, or not the same in each epoch."""

    def fewest(self) -> int:
        """The number of samples of the smallest global batch that is possible."""

    def describe(self) -> str:
        """A global batch in a few words, for the user."""

    def traits(self) -> dict[str, Any]:
        """What must be the same on all ranks, by the names of the user's arguments; else samples are lost or repeated."""

    def state(self) -> dict[str, Any]:
        """What must be the same in a resumed run."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue with what `state` returned in the earlier attempt."""


class ByCount:
    """`size` samples each; the last batch may be smaller, or is dropped."""

    by = "samples"

    def __init__(self, order: Order, size: int, drop_last: bool = False) -> None:
        self._order = order
        self.size = size
        self._drop_last = drop_last

    def plan(self, epoch: int, start: int, rank: int, world_size: int, accumulate: int) -> Iterator[Planned]:
        size, end = self.size, self._end(start)
        # To look up many samples takes as long as one; and to plan a single step takes several times as long as one of many,
        # because the training before it has filled the caches of the processor.
        planned = max(min(_PLANNED // size, _STEPS), 1) * size
        for first in range(start, end, planned):
            indices = self._order.indices(epoch, first, min(first + planned, end))
            begins = range(0, len(indices), size)
            shares = [even_share(indices[begin : begin + size], rank, world_size, accumulate) for begin in begins]
            stops = [min(first + begin + size, end) for begin in begins]
            yield from [(stop, stop == end, share) for stop, share in zip(stops, shares, strict=True)]

    def _end(self, start: int) -> int:
        """The end of the last global batch, if the first starts at `start`."""
        samples = self._order.samples
        return samples - (samples - start) % self.size if self._drop_last else samples

    def steps_per_epoch(self) -> int:
        return steps_of(self._order.samples, self.size, self._drop_last)

    def fewest(self) -> int:
        return self.size if self._drop_last else self._order.samples % self.size or self.size

    def describe(self) -> str:
        return str(self.size)

    def traits(self) -> dict[str, Any]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        self.size = state["global_batch_size"]


class ByTokens:
    """As many samples as fit: their number times the (padded) length of the longest is at most `tokens`.

    rankwise takes `pool` samples at a time, in the order of the epoch, sorts them by length and cuts them; then it shuffles the
    global batches of the pool. A sample that is longer than `tokens` is a batch by itself. `most`: the largest number of
    samples per batch. There is no list of all batches, and a resume costs only one pool.
    """

    by = "tokens"

    def __init__(
        self, order: Order, lengths: LengthOf, tokens: float, most: int | None = None, pool: int | None = None
    ) -> None:
        self._order = order
        self._lengths = lengths
        self.tokens = tokens
        self.most = most
        some = lengths.of(np.arange(0, order.samples, max(order.samples // _ESTIMATED, 1)))
        self._longer = float((some > tokens).mean())
        self._sum = float(some.sum())
        self.size = max(min(int(tokens / max(float(some.mean()), 1e-9)), most or order.samples, order.samples), 1)
        self.pool = pool if pool is not None else min(self.size * _POOL_STEPS, order.samples)

    def plan(self, epoch: int, start: int, rank: int, world_size: int, accumulate: int) -> Iterator[Planned]:
        end = self._order.samples
        for stop, samples in self._steps(epoch, start):
            yield stop, stop == end, balanced_share(samples, self._lengths.of(samples), rank, world_size, accumulate)

    def _steps(self, epoch: int, start: int) -> Iterator[tuple[int, Indices]]:
        for number in range(start // self.pool, -(-self._order.samples // self.pool)):
            for stop, (samples,) in going_on(
                [[some] for some in self._of_pool(epoch, number)], number * self.pool, epoch, start
            ):
                yield stop, samples

    def _of_pool(self, epoch: int, number: int) -> list[Indices]:
        order = self._order
        indices = order.indices(epoch, number * self.pool, min((number + 1) * self.pool, order.samples))
        lengths = self._lengths.of(indices)
        by_length = np.argsort(lengths, kind="stable")  # equal lengths remain in the order of the epoch
        runs = fitting_runs(lengths[by_length].tolist(), self.tokens, self.most)
        batches = [indices[by_length[start:stop]] for start, stop in runs]
        if order.shuffle:
            keys = np.random.SeedSequence([order.seed, epoch, number, 1])
            batches = [batches[k] for k in np.random.default_rng(keys).permutation(len(batches))]
        return batches

    def steps_per_epoch(self) -> None:
        return None

    def fewest(self) -> int:
        return 1

    def describe(self) -> str:
        most = f", {self.most} at most" if self.most is not None else ""
        longer = f"; {100 * self._longer:.2g} % of the samples are longer: batches of one" if self._longer else ""
        about = f"about {self.size} sample{'s' * (self.size != 1)}{most}"
        return f"{self.tokens:g} tokens ({about}, {self.pool} sorted together{longer})"

    def traits(self) -> dict[str, Any]:
        return {
            "global_tokens": self.tokens, "max_samples": self.most, "pool": self.pool,
            "the sum of lengths": self._sum,
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {"batches by": self.by, "global_batch_tokens": self.tokens, "most": self.most, "pool": self.pool}

    def load(self, state: Mapping[str, Any]) -> None:
        self.tokens, self.most, self.pool = state["global_batch_tokens"], state["most"], state["pool"]


_MOST_LISTED = 10_000_000
"""A batch sampler of a small dataset that lists more samples in an epoch never ends."""


class BySampler:
    """The batches of a batch sampler such as torch's: an iterable of lists of indices, each a global batch.

    `set_epoch(epoch)` is called if the sampler, or the one inside torch's BatchSampler, has it. Its random numbers are keyed by
    (seed, epoch), equal on all ranks; so are those of generators in its attributes, as in `RandomSampler(data, generator=g)`,
    which also follow from how `g` was seeded. All batches of an epoch are listed when the epoch starts.
    """

    by = "a batch sampler"

    def __init__(self, sampler: Any, seed: int, lengths: LengthOf | None, samples: int) -> None:
        _check_sampler(sampler)
        self._sampler = sampler
        self._samples = samples
        self._seed = seed
        self._lengths = lengths
        self._epoch = -1
        self._batches: list[Indices] = []
        self._passes_on = self._keys_own = True
        """Whether `set_epoch` is also called for the sampler inside; whether the generators of both are keyed. Runs of earlier
        versions keep their order."""

        self._own = seeds.OwnGenerators(sampler, getattr(sampler, "sampler", None))

        self.size = max(map(len, self._of(0)))

    def plan(self, epoch: int, start: int, rank: int, world_size: int, accumulate: int) -> Iterator[Planned]:
        others = f" of {type(self._sampler).__name__}: its batches have changed since the checkpoint was made"
        batches = self._of(epoch)
        end = sum(map(len, batches))
        for stop, (samples,) in going_on([[some] for some in batches], 0, epoch, start, others):
            if self._lengths is None:
                yield stop, stop == end, even_share(samples, rank, world_size, accumulate)
            else:
                yield stop, stop == end, balanced_share(samples, self._lengths.of(samples), rank, world_size, accumulate)

    def _of(self, epoch: int) -> list[Indices]:
        if self._epoch == epoch:
            return self._batches
        inside = [getattr(self._sampler, "sampler", None)] if self._passes_on else []
        saved = seeds.SavedStreams()
        saved.save()
        try:
            for sampler in (self._sampler, *inside):
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
            seeds.seed_streams(seeds.derive(self._seed, epoch, "batches"))
            with self._own.keyed(self._seed, epoch, "batches") if self._keys_own else contextlib.nullcontext():
                self._batches = list(self._listed())
        finally:
            saved.restore()
        self._batches = [batch for batch in self._batches if len(batch)]
        if not self._batches:
            raise DataError(f"the batch sampler ({type(self._sampler).__name__}) yields no batch in epoch {epoch}")
        self._epoch = epoch
        return self._batches

    def _listed(self) -> Iterator[Indices]:
        listed, most = 0, max(_MOST_LISTED, 1000 * self._samples)
        for batch in self._sampler:
            yield (indices := _indices(batch, self._sampler, self._samples))
            listed += len(indices)
            if listed > most:
                raise DataError(
                    f"the batch sampler ({type(self._sampler).__name__}) has not ended after {listed} samples, and the batches "
                    "of an epoch are listed before its first step; give one that ends"
                )

    def steps_per_epoch(self) -> None:
        return None

    def fewest(self) -> int:
        return 1

    def describe(self) -> str:
        return f"by a batch sampler ({type(self._sampler).__name__}), up to {self.size} samples"

    def traits(self) -> dict[str, Any]:
        return {"the sum of the indices of the first batch": int(self._of(self._epoch)[0].sum())}

    def state(self) -> dict[str, Any]:
        return {"batches by": self.by, "epoch passed on": self._passes_on, "own generators keyed": self._keys_own}

    def load(self, state: Mapping[str, Any]) -> None:
        self._passes_on, self._epoch = state.get("epoch passed on", False), -1
        self._keys_own = state.get("own generators keyed", False)


class LengthBatches:
    """Loader(batches=...): as many samples of about the same length as fit, padded, into a number of tokens (frames, seconds).

    `tokens` per rank and micro-batch, or `global_tokens` of a whole step over all ranks, which is divided so that all
    micro-batches cost about the same: one may exceed its share by less than a sample. `lengths`: numbers, one per sample, or
    a function of the index; by default the dataset's attribute `lengths`. `pool`: the number of samples that are sorted
    together (by default those of about 32 steps). `max_samples`: the largest number of samples of a global batch.
    """

    @takes(
        tokens=ABOVE_ZERO.or_none, global_tokens=ABOVE_ZERO.or_none, lengths=_LENGTHS.or_none, pool=FROM_ONE.or_none,
        max_samples=FROM_ONE.or_none,
    )  # fmt: skip
    def __init__(
        self,
        tokens: float | None = None,
        *,
        global_tokens: float | None = None,
        lengths: Sequence[float] | Callable[[int], float] | None = None,
        pool: int | None = None,
        max_samples: int | None = None,
    ) -> None:
        if (tokens is None) == (global_tokens is None):
            raise ConfigError("LengthBatches: give tokens (per rank and micro-batch) or global_tokens (of a whole step)")
        self.tokens, self.global_tokens = tokens, global_tokens
        self.lengths, self.pool, self.max_samples = lengths, pool, max_samples

    def of_one_micro_batch(self, accumulate: int, ranks: int) -> LengthBatches:
        """The same for other data, which has its own lengths."""
        most = None if self.max_samples is None else max(self.max_samples // accumulate, ranks)
        if self.tokens is not None:
            return LengthBatches(self.tokens, max_samples=most)
        assert self.global_tokens is not None
        return LengthBatches(global_tokens=self.global_tokens / accumulate, max_samples=most)

    def cut(self, dataset: Any, order: Order, parts: int, by: type[ByTokens] = ByTokens) -> ByTokens:
        """`parts`: the number of micro-batches of a step, over all ranks."""
        lengths = self.lengths if self.lengths is not None else getattr(dataset, "lengths", None)
        if lengths is None:
            raise ConfigError(
                "LengthBatches needs to know how long samples are: give lengths=[...], one per sample, or a function of the "
                f"index; or add an attribute `lengths` to {type(dataset).__name__}"
            )
        tokens = self.global_tokens if self.global_tokens is not None else (self.tokens or 0) * parts
        return by(order, LengthOf(lengths, order.samples), tokens, self.max_samples, self.pool)


def steps_of(samples: int, size: int, drop_last: bool) -> int:
    """The number of global batches of `size` samples in an epoch."""
    return samples // size if drop_last else -(-samples // size)


def going_on(
    batches: Iterable[list[Indices]], position: int, epoch: int, start: int, others: str = _OTHER_LENGTHS
) -> Iterator[tuple[int, list[Indices]]]:
    """For each batch from `start` on: (the position after it, its samples), in the same parts as in `batches`. The first of
    `batches` starts at `position`. Raises DataError if `start` is in the middle of a batch; `others`: why this is possible."""
    for parts in batches:
        before, position = position, position + sum(map(len, parts))
        if before >= start:
            yield position, parts
        elif position > start:
            raise DataError(f"position {start} of epoch {epoch} is in the middle of a global batch{others}")


def as_given(name: str, of_one: float | None, of_all: float | None) -> dict[str, float | None]:
    """The argument that was given, by its name."""
    return {name: of_one} if of_one is not None else {f"global_{name}": of_all}


class LengthOf:
    """The lengths of samples: numbers, one per sample, or a function of the index, which is called once per sample."""

    def __init__(self, lengths: Sequence[float] | Callable[[int], float], samples: int) -> None:
        self._ask: Callable[[int], float] | None = None
        if callable(lengths):
            self._ask = lengths
            self._known: Lengths = np.full(samples, np.nan)
            return
        try:
            self._known = np.asarray(lengths, dtype=np.float64)
        except (TypeError, ValueError):
            raise DataError(f"lengths is {shown(lengths)}; give one number per sample") from None
        if self._known.shape != (samples,):
            raise DataError(f"lengths has the shape {self._known.shape} for {samples} samples; give one number per sample")
        self._check(np.arange(samples))

    def of(self, indices: npt.NDArray[np.int64]) -> Lengths:
        if self._ask is not None:
            unknown = indices[np.isnan(self._known[indices])]
            self._known[unknown] = [self._ask(index) for index in unknown.tolist()]
            self._check(unknown)
        return self._known[indices]

    def _check(self, indices: npt.NDArray[np.int64]) -> None:
        wrong = indices[~(self._known[indices] >= 0) | ~np.isfinite(self._known[indices])]
        if len(wrong):
            raise DataError(f"the length of sample {wrong[0]} is {self._known[wrong[0]]:g}; it must be 0 or more")


def even_share(samples: Indices, rank: int, world_size: int, accumulate: int) -> list[Indices]:
    """By count: the shares of two ranks, and two micro-batches of a rank, differ by at most one sample."""
    if world_size > 1:
        low, high = share(0, len(samples), rank, world_size)
        samples = samples[low:high]
    return split(samples, accumulate)


def fitting_runs(lengths: Sequence[float], tokens: float, most: int | None) -> list[tuple[int, int]]:
    """As few runs of ascending lengths as possible. Each run fits into `tokens`, padded, and has at most `most` samples, or is
    a single sample."""
    runs, start = [], 0
    while start < len(lengths):
        stop = start + min(max(_fitting(lengths, start, tokens), 1), most or len(lengths))
        runs.append((start, stop))
        start = stop
    return runs


def balanced_share(samples: Indices, lengths: Lengths, rank: int, world_size: int, accumulate: int) -> list[Indices]:
    """By length: samples of similar length together, and about the same cost for all micro-batches of all ranks."""
    by_length = np.argsort(lengths, kind="stable")
    runs = balanced_runs(lengths[by_length].tolist(), world_size * accumulate)
    mine = runs[rank * accumulate : (rank + 1) * accumulate]
    return [samples[by_length[a:b]] for a, b in mine if b > a]


def balanced_runs(lengths: Sequence[float], n: int) -> list[tuple[int, int]]:
    """`n` runs of ascending lengths, such that the cost of the costliest (its number times its longest) is as small as
    possible.

    No run is empty unless there are fewer lengths than runs.
    """
    samples = len(lengths)
    low = max(lengths[-1], sum(lengths) / n) if lengths else 0.0
    high = lengths[-1] * samples if lengths else 0.0
    cuts, high = _cuts(lengths, n, high)
    while n > 1 and high > low * (1 + _EXACT):
        # First try close to `low`: runs of sorted lengths have little padding.
        middle = low * 1.02 if high > low * 1.1 else (low + high) / 2
        found, cost = _cuts(lengths, n, middle)
        if found[-1] == samples:
            cuts, high = found, cost
        else:
            low = middle
    return list(pairwise(cuts))


def _cuts(lengths: Sequence[float], n: int, bound: float) -> tuple[list[int], float]:
    """(where each of `n` runs ends, the cost of the costliest). Each run is as long as `bound` allows, but leaves at least one
    sample for each run after it. If `bound` is too small, the last run does not reach the end."""
    samples, cuts, cost = len(lengths), [0], 0.0
    for left in range(n - 1, -1, -1):
        start = cuts[-1]
        if start == samples:
            cuts.append(start)
            continue
        stop = max(min(start + max(_fitting(lengths, start, bound), 1), samples - left), start + 1)
        cuts.append(stop)
        cost = max(cost, (stop - start) * lengths[stop - 1])
    return cuts, cost


def _fitting(lengths: Sequence[float], start: int, tokens: float) -> int:
    """How many from `start` on fit into `tokens`, padded to the longest of them. `lengths` are ascending."""
    left = len(lengths) - start
    fewest = min(int(tokens / lengths[-1]), left) if lengths[-1] else left  # as many fit if all are as long as the longest
    most = min(int(tokens / lengths[start]), left) if lengths[start] else left
    return fewest + bisect_right(range(fewest, most), tokens, key=lambda k: (k + 1) * lengths[start + k])


def _check_sampler(sampler: Any) -> None:
    if isinstance(sampler, Iterator) or not hasattr(sampler, "__iter__"):
        raise ConfigError(
            f"batches={type(sampler).__name__} cannot be read once per epoch; give lists of indices, or an object like torch's "
            "BatchSampler: each `iter()` starts again and yields lists of indices"
        )
    for inner in (sampler, getattr(sampler, "sampler", None)):
        if getattr(inner, "num_replicas", 1) > 1:
            raise ConfigError(
                f"batches: {type(inner).__name__} divides the samples among ranks, and the Loader does this too; give a "
                "sampler over all samples whose batches are global batches"
            )


def _indices(batch: Any, sampler: Any, samples: int) -> Indices:
    if isinstance(batch, int) or not isinstance(batch, Iterable):
        raise ConfigError(
            f"batches: {type(sampler).__name__} yields {type(batch).__name__}, not lists of indices; "
            "wrap it in torch.utils.data.BatchSampler(sampler, batch_size, drop_last)"
        )
    indices = whole_numbers(list(batch))
    if indices is None:
        raise ConfigError(
            f"batches: {type(sampler).__name__} yields {shown(batch)}; give lists of indices, whole numbers from 0 to "
            f"{samples - 1}"
        )
    if len(outside := indices[(indices < 0) | (indices >= samples)]):
        raise DataError(
            f"batches: {type(sampler).__name__} yields the index {outside[0]}, and the dataset has {samples} samples, "
            f"0 to {samples - 1}; create the sampler with this dataset"
        )
    return indices
