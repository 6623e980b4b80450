"""Global batches, this rank's part of each, in one order for every world size.

    loader = Loader(dataset, world, global_batch_size=64, max_epochs=3)
    for micro_batches in loader:          # what one optimizer step takes
        for batch in micro_batches: ...

(epoch, position in samples) is the whole state of the data: it resumes anywhere, on any number of ranks and workers.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from rankwise.data.batching import Batching, ByCount, BySampler, ByTokens, LengthOf, of_all_ranks, steps_of
from rankwise.data.fetch import Fetch, Fetcher, fetched, promises
from rankwise.data.order import Order, share
from rankwise.data.stream import Request, Step, Stream
from rankwise.data.uneven import check, in_step
from rankwise.dist import log, private_names
from rankwise.dist.device import to_device
from rankwise.dist.world import World
from rankwise.errors import ConfigError, DataError


class Loader:
    """Iterates over optimizer steps; each is a list of this rank's micro-batches, empty for a rank without a sample.

    `dataset` has `__len__` and `__getitem__(index)`, or `__getitems__(indices: list[int])`, which returns a list of samples,
    or a batch already (a tensor, or a tuple or mapping of tensors). Samples of a list go through `collate_fn`, torch's
    default_collate if None. The last global batch of an epoch is split like any other: neither padded nor dropped, unless
    `drop_last`. `workers` processes fetch ahead; order and samples do not depend on them.

    Or it is iterable (torch's IterableDataset): a stream of which an epoch is one pass. It must yield the same whole stream on
    every rank and worker; each keeps its share (`data.stream` says more). Its order is its own: nothing shuffles it.

    A stream that splits itself by rank, and so is another one on each, says so by an attribute `split_by_rank = True`; then all
    must iterate together, and `uneven` says what is done when one ends before the others: join, stop or pad (`data.uneven`).

    For samples of uneven length, in the place of `global_batch_size`: `global_batch_tokens`, so many tokens (frames, seconds)
    of padded samples a step, with `lengths` (numbers, a function of the index, or the dataset's own attribute `lengths`), and
    `global_batch_size` samples at most if that is given too; or `batch_sampler`, an iterable of lists of indices, each a
    global batch (with `lengths`, shared out by these). `data.batching` says more. Ranks get parts of about the same cost.

    Random numbers that a dataset draws are keyed by (seed, epoch, sample) in workers, by the first sample of a batch without
    workers and under `__getitems__`, where `seed_each_sample = True` in the dataset asks for each sample's own; those of a
    stream by (seed, epoch). None moves the streams of the training. `draws_nothing = True` in a dataset saves the keying.
    """

    def __init__(
        self,
        dataset: Any,
        world: World,
        *,
        global_batch_size: int | None = None,
        global_batch_tokens: float | None = None,
        lengths: Sequence[float] | Callable[[int], float] | None = None,
        pool: int | None = None,
        batch_sampler: Any = None,
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool = False,
        uneven: str | None = None,
        max_epochs: int | None = None,
        workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        _check_numbers(global_batch_size, accumulate, seed)
        samples = length(dataset)
        if samples is None and shuffle:
            raise ConfigError(
                f"shuffle=True, but {type(dataset).__name__} is a stream and comes in its own order: shuffle inside it "
                "(a buffer, the order of its files), and leave shuffle out"
            )
        self._order = None if samples is None else Order(samples, seed, shuffle is not False)
        self._world = world
        self.accumulate = accumulate
        """Micro-batches of a rank and step; on another number of ranks than a checkpoint's it follows from their size there."""
        self.drop_last = drop_last
        self._workers = workers if samples is not None or private_names.can_hide_worker() else 0
        self._collate_fn = collate_fn
        self._seed = seed
        self._batching: Batching | None = None
        self._uneven: str | None = None
        self._steps = 0  # of the current epoch
        if self._order is None:
            if global_batch_size is None or any(x is not None for x in (global_batch_tokens, lengths, pool, batch_sampler)):
                raise ConfigError(f"{type(dataset).__name__} is a stream, which is cut by count: give global_batch_size alone")
            self._take_stream(dataset, global_batch_size, uneven)
        else:
            if uneven is not None:
                raise ConfigError(f"uneven={uneven!r} is for streams; {type(dataset).__name__} tells its length: leave it out")
            self._fetch = Fetch(dataset, collate_fn, seed)
            self._batching = _batching(
                dataset, self._order, global_batch_size, global_batch_tokens, lengths, pool, batch_sampler, drop_last
            )
            global_batch_size = self._batching.size
        assert global_batch_size is not None
        self._device = device
        self.global_batch_size = global_batch_size
        """Samples of a global batch; about so many where they differ (by tokens, by a batch sampler)."""
        self.max_epochs = max_epochs
        self.epoch = 0
        """Epochs that are complete."""
        self.position = 0
        """Samples taken of the current epoch, over all ranks."""
        self.taken = 0
        """Samples that all ranks have taken since this loader was made."""
        self.wait_s = 0.0
        """Seconds that the loop has waited for data so far."""
        self.indices: list[Sequence[int]] = []
        """Which samples the micro-batches handed out last are made of: indices of the dataset, positions in a stream."""
        if drop_last and samples is not None and samples < global_batch_size:
            raise DataError(f"drop_last leaves nothing: {samples} samples are fewer than a global batch of {global_batch_size}")

    @classmethod
    def for_ranks(
        cls,
        dataset: Any,
        world: World,
        *,
        batch_size: int | None,
        global_batch_size: int | None,
        batch_tokens: float | None,
        global_batch_tokens: float | None,
        accumulate: int,
        batch_sampler: Any,
        **others: Any,
    ) -> Loader:
        """As a script says it: sizes of one rank and micro-batch, or of all together. `others`: the constructor's."""
        parts = accumulate * world.world_size
        size = of_all_ranks("batch_size", batch_size, global_batch_size, parts)
        tokens = of_all_ranks("batch_tokens", batch_tokens, global_batch_tokens, parts)
        if size is None and tokens is None and batch_sampler is None:
            raise ConfigError("give either batch_size (of one rank) or global_batch_size (of all ranks together)")
        given = {"accumulate": accumulate, "batch_sampler": batch_sampler, **others}
        return cls(dataset, world, global_batch_size=size, global_batch_tokens=tokens, **given)

    def passes(self) -> Callable[[Any], Loader]:
        """What makes Loaders of one pass in order over other data, for evaluation and prediction. Their batches are as large as
        this one's micro-batches are now; by tokens where the data has `lengths` and this one is cut by tokens."""
        samples = max(self.global_batch_size // self.accumulate, 1)
        tokens = self._batching.tokens / self.accumulate if isinstance(self._batching, ByTokens) else None
        once = functools.partial(
            Loader, world=self._world, shuffle=False, max_epochs=1, workers=self._workers, collate_fn=self._collate_fn,
            device=self._device,
        )  # fmt: skip

        def over(dataset: Any) -> Loader:
            by_tokens = tokens is not None and hasattr(dataset, "lengths")
            return once(dataset, global_batch_tokens=tokens) if by_tokens else once(dataset, global_batch_size=samples)

        return over

    def _take_stream(self, dataset: Any, size: int, uneven: str | None) -> None:
        """Read it from here on; raises ConfigError where `uneven` is not for it."""
        world, split = self._world, promises(dataset, "split_by_rank")
        self._uneven = check(uneven, split, type(dataset).__name__, size, world.world_size, self.drop_last)
        self._hint = None if split else _hinted_length(dataset)
        rank, ranks = (0, 1) if split else (world.rank, world.world_size)
        pad = self._uneven == "pad"
        self._stream = Stream(dataset, self._collate_fn, self._seed, rank, ranks, self.drop_last, own=split, repeat=pad)

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is iterable: then `samples` and `steps_per_epoch` are what it says of itself, if it says so."""
        return self._order is None

    @property
    def is_split(self) -> bool:
        """Whether the dataset is a stream that is another one on each rank."""
        return self._uneven is not None

    @property
    def samples(self) -> int | None:
        """Samples in the dataset; None if a stream does not tell."""
        return self._hint if self._order is None else self._order.samples

    @property
    def steps_per_epoch(self) -> int | None:
        if self._batching is not None:
            return self._batching.steps_per_epoch()
        return None if self._hint is None else steps_of(self._hint, self.global_batch_size, self.drop_last)

    @property
    def fewest(self) -> int:
        """Samples of the smallest global batch that may come."""
        if self._batching is not None:
            return self._batching.fewest()
        if self._uneven is not None:
            return self.global_batch_size if self._uneven == "pad" or (self._uneven == "stop" and self.drop_last) else 0
        return self.global_batch_size if self.drop_last else 1

    @property
    def finished(self) -> bool:
        return self.max_epochs is not None and self.epoch >= self.max_epochs

    def __iter__(self) -> Iterator[list[Any]]:
        """Go on where `epoch` and `position` stand. Both are those after a step as soon as its batches are handed out."""
        while not self.finished:
            began = time.perf_counter()
            for step in self._left_of_epoch():
                micro_batches = [self._placed(batch) for batch in step.micro_batches]
                self.taken += step.stop - self.position
                self.position = step.stop
                self._steps += 1
                self.indices = step.indices
                if step.last:
                    self._end_epoch()
                self.wait_s += time.perf_counter() - began
                yield micro_batches
                began = time.perf_counter()
                if self.position == 0:
                    break
            else:  # loaded from where the last batch was not yet dropped: nothing is left
                self._end_epoch()

    def _end_epoch(self) -> None:
        self.epoch += 1
        self.position = self._steps = 0

    def _left_of_epoch(self) -> Iterator[Step]:
        if self._batching is not None:
            return self._ordered(self._batching)
        return self._streamed() if self._uneven is None else self._in_step(self._uneven)

    def _ordered(self, batching: Batching) -> Iterator[Step]:
        """The steps that are left of this epoch of a map-style dataset."""
        epoch, world = self.epoch, self._world
        shares = (
            (stop, batching.share(samples, world.rank, world.world_size, self.accumulate))
            for stop, samples in batching.steps(epoch, self.position)
        )
        plan, ahead = itertools.tee(shares)
        batches = self._fetched(((epoch, indices) for _, lists in ahead for indices in lists), self._fetch)
        for stop, lists in plan:
            yield Step(stop, batching.leaves_nothing(epoch, stop), [next(batches) for _ in lists], list(lists))

    def _streamed(self) -> Iterator[Step]:
        """The steps that are left of this epoch of a stream: a request to a worker is a step."""
        epoch, size = self.epoch, self.global_batch_size
        requests = (Request(epoch, start, size, self.accumulate) for start in itertools.count(self.position, size))
        yield from itertools.takewhile(lambda step: step is not None, self._fetched(requests, self._stream))

    def _in_step(self, policy: str) -> Iterator[Step]:
        """Collective. The steps that are left of this epoch of streams that are another one on each rank."""
        low, high = share(0, self.global_batch_size, self._world.rank, self._world.world_size)
        starts = itertools.count(self._steps * (high - low), high - low)
        requests = (Request(self.epoch, start, high - low, self.accumulate) for start in starts)
        own = itertools.takewhile(lambda step: step is not None, self._fetched(requests, self._stream))
        name = self._stream.name + " (full shares alone, by drop_last)" * self.drop_last
        yield from in_step(own, policy, self.position, name, self._world.world_size)

    def _fetched(self, requests: Iterator[Any], fetcher: Fetcher) -> Iterator[Any]:
        return fetched(requests, fetcher, self._workers, pin=self._device is not None and self._device.type == "cuda")

    def _placed(self, batch: Any) -> Any:
        return batch if self._device is None or self._device.type == "cpu" else to_device(batch, self._device)

    def anew(self, world: World, accumulate: int, global_batch_size: int | None = None) -> Loader:
        """The same data and order from the beginning, in this process, for any rank of any number of them.

        Samples are taken one by one where that can be, so that what they draw at random does not depend on how they are shared.
        """
        other = copy.copy(self)
        other._world, other.accumulate, other._workers = world, accumulate, 0
        other.epoch, other.position, other._steps, other.taken, other.wait_s = 0, 0, 0, 0, 0.0
        other._batching = copy.copy(self._batching)
        if global_batch_size is not None:
            other.global_batch_size = global_batch_size
            other._batching = ByCount(self._order, global_batch_size, self.drop_last) if self._order is not None else None
        if self._order is None:
            other._stream = self._stream.anew(world.rank, world.world_size)
        else:
            other._fetch = self._fetch.one_by_one()
        return other

    def describe(self) -> str:
        """What there is to train on, in a few words, for people."""
        number = self.steps_per_epoch
        steps = f", {number} step{'s' * (number != 1)} an epoch" if number is not None else ""
        if not self.is_stream:
            return f"{self.samples} samples{steps}"
        if self._uneven is not None:
            return f"a stream of its own on each rank (uneven: {self._uneven})"
        long = "of unknown length" if self.samples is None else f"of {self.samples} samples (its __len__){steps}"
        return f"a stream {long}, in its own order"

    def describe_batch(self) -> str:
        """`global batch 64 = 16 x 2 ranks x 2 accumulated`"""
        whole, ranks = self.global_batch_size, self._world.world_size
        parts = [f"{ranks} ranks"] if ranks > 1 else []
        parts += [f"{self.accumulate} accumulated"] if self.accumulate > 1 else []
        if not parts or self._by != "samples":
            text = self._batching.describe() if self._batching is not None else str(whole)
            return f"global batch {text}{' over ' if parts else ''}{' x '.join(parts)}"
        each, rest = divmod(whole, ranks * self.accumulate)
        return f"global batch {whole} = {f'{each} or {each + 1}' if rest else each} x {' x '.join(parts)}"

    @property
    def _by(self) -> str:
        return self._batching.by if self._batching is not None else "samples"

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": self._order.samples if self._order is not None else None,
            "seed": self._seed,
            "shuffle": self._order is not None and self._order.shuffle,
            "global_batch_size": self.global_batch_size,
            **(self._batching.state() if self._batching is not None else {}),
            "ranks": self._world.world_size,
            "accumulate": self.accumulate,
            "epoch": self.epoch,
            "position": self.position,
            **({"uneven": self._uneven, "steps": self._steps} if self._uneven is not None else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the recorded position. Raises ConfigError when the data or its order are not those of the record."""
        common = {"batches by": "samples", "uneven": None}
        now, state = common | self.state_dict(), common | state
        for name in ("samples", "seed", "shuffle", "batches by", "uneven"):
            if state[name] != now[name]:
                raise ConfigError(
                    f"the checkpoint was made with {name}={state[name]} and this run has {name}={now[name]}: another training; "
                    "set it back, or start anew with --fresh, or beside it with --name NAME"
                )
        name = "global_batch_tokens" if self._by == "tokens" else "global_batch_size"
        if state[name] != now[name]:
            unit = " tokens" * (self._by == "tokens")
            log.say(f"going on with the checkpoint's global batch of {state[name]:g}{unit} instead of {now[name]:g}")
        self.global_batch_size = state["global_batch_size"]
        if self._batching is not None:
            self._batching.load(state)
        if state["ranks"] != self._world.world_size and self._uneven is not None and state["position"]:
            raise ConfigError(
                f"the checkpoint was made on {state['ranks']} ranks in the middle of an epoch of streams of which each had its "
                f"own, and {self._world.world_size} split them otherwise: go on with {state['ranks']} ranks"
            )
        self._steps = state.get("steps", 0)
        if state["ranks"] != self._world.world_size:
            # A micro-batch no larger than it was, which fitted into memory.
            self.accumulate = math.ceil(state["ranks"] * state["accumulate"] / self._world.world_size)
        self.epoch = state["epoch"]
        self.position = state["position"]


def _check_numbers(global_batch_size: int | None, accumulate: int, seed: int) -> None:
    for name, value in (("global_batch_size", global_batch_size), ("accumulate", accumulate)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: give a whole number from 1 up")
    if seed < 0:
        raise ConfigError(f"seed={seed}: give a whole number from 0 up")


def length(dataset: Any) -> int | None:
    """Samples in a map-style dataset; None for a stream. Raises DataError for what is neither, and for an empty one."""
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DataError("a DataLoader shards nothing by itself; give its dataset, and the batch size to the Trainer or Loader")
    if isinstance(dataset, IterableDataset):
        return None
    if isinstance(dataset, Iterator):
        raise DataError(f"{name} can be read once; give an IterableDataset, of which each `iter()` reads from the beginning")
    if hasattr(dataset, "__iter__") and not hasattr(dataset, "__len__"):
        return None
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"{name} cannot tell its length; give a dataset with __len__ and __getitem__ (or __getitems__), or an iterable one"
        )
    if len(dataset) < 1:
        raise DataError(f"the dataset ({name}) is empty: it has no sample")
    if promises(dataset, "seed_each_sample") and not hasattr(dataset, "__getitem__"):
        raise DataError(f"{name} has seed_each_sample, so its samples are taken one by one: give it __getitem__ too")
    return len(dataset)


def _hinted_length(dataset: Any) -> int | None:
    """What a stream says of its length; it is the total of a progress line and nothing else."""
    try:
        return len(dataset) or None
    except TypeError:
        return None


def _batching(
    dataset: Any,
    order: Order,
    size: int | None,
    tokens: float | None,
    lengths: Any,
    pool: int | None,
    sampler: Any,
    drop_last: bool,
) -> Batching:
    """Raises ConfigError unless it is said in one way how global batches are cut."""
    given = {
        "global_batch_size": size,
        "global_batch_tokens": tokens,
        "batch_sampler": sampler,
        "lengths": lengths,
        "pool": pool,
    }
    names = {name for name, value in given.items() if value is not None}
    if sampler is not None and (clash := names & {"global_batch_size", "global_batch_tokens", "pool"}):
        raise ConfigError(f"batch_sampler says what a global batch is, and so does {min(clash)}: leave one out")
    if tokens is None and sampler is None and (alone := names & {"lengths", "pool"}):
        raise ConfigError(f"{min(alone)} is for batches by length: give global_batch_tokens too, or leave it out")
    if drop_last and (tokens is not None or sampler is not None):
        raise ConfigError("drop_last is for batches by count: by tokens, or by a batch sampler, none is left over")
    if tokens is None and sampler is None:
        if size is None:
            raise ConfigError("give global_batch_size, global_batch_tokens or batch_sampler")
        return ByCount(order, size, drop_last)
    if lengths is None and tokens is not None:
        lengths = getattr(dataset, "lengths", None)
        if lengths is None:
            raise ConfigError(
                f"global_batch_tokens={tokens:g} needs to know how long samples are: lengths=[...], one a sample, or a "
                f"function of the index; or give {type(dataset).__name__} an attribute `lengths`"
            )
    known = LengthOf(lengths, order.samples) if lengths is not None else None
    if sampler is not None:
        return BySampler(sampler, order.seed, known, order.samples)
    assert known is not None
    assert tokens is not None
    return ByTokens(order, known, tokens, size, pool)
