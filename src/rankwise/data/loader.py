"""Global batches and this rank's part of each, in the same order for every world size.

    loader = Loader(dataset, global_batch_size=64, max_epochs=3)
    for micro_batches in loader:          # the batches of one optimizer step
        for batch in micro_batches: ...

(epoch, position in samples) is the whole state of the data, so it can resume anywhere, on any number of ranks and workers.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from time import perf_counter
from typing import Any

import numpy as np
import torch

from rankwise.data.ahead import announced, how_far
from rankwise.data.arguments import BATCHES, MOVED, STATE
from rankwise.data.batching import Batching, ByCount, BySampler, ByTokens, LengthBatches, LengthOf, as_given, steps_of
from rankwise.data.fetch import Fetch, Fetcher
from rankwise.data.habits import NoDataLoader, warn_of_end, warn_of_look
from rankwise.data.kinds import check_sizes, hinted_length, length, promises, teller_of, traits_of_split
from rankwise.data.order import SHUFFLE, Blocks, Indices, accumulation, in_blocks_of, order_of, share
from rankwise.data.parts import SPLITS, ByCountOfParts, ByTokensOfParts, check_split
from rankwise.data.prefetch import Kept, Workers, fetched
from rankwise.data.stream import Ready, Request, Step, Stream
from rankwise.data.uneven import POLICIES, check, check_no_stream, check_position, in_step
from rankwise.data.waits import ToldWaits
from rankwise.dist import comm, log, private_names
from rankwise.dist import seed as seeds
from rankwise.dist.device import DEVICE, local_device, to_device
from rankwise.dist.left_out import is_used
from rankwise.dist.world import World
from rankwise.errors import ConfigError, DataError
from rankwise.host.arguments import ANYTHING, FLAG, FROM_ONE, FROM_ZERO, FUNCTION, NOT_NEGATIVE, one_of, takes


class Loader(NoDataLoader):
    """Iterates over optimizer steps. Each step is a list of this rank's micro-batches, empty if the rank has no sample.

    `dataset` has `__len__` and `__getitem__(index)`, or `__getitems__(indices: list[int])`, which returns a list of samples, or
    an already collated batch (a tensor, or a tuple or mapping of tensors). A list of samples goes through `collate_fn`, torch's
    default_collate if None. `batch_size`: samples per rank and micro-batch; `global_batch_size`: samples per step, over all
    ranks and `accumulate` micro-batches. The last global batch of an epoch is split like any other: neither padded nor dropped,
    unless `drop_last`. `shuffle`: True (the default), False, or "blocks": samples that are stored together are read together
    (see `data.order.BlockOrder`), for large compressed files. Tensors are moved to `device`, by default that of the rank.

    Before the first use (an iteration, a size or the state) nothing is sent, and the ranks need not be connected.

    `num_workers` processes fetch ahead, as in torch's DataLoader, with its `prefetch_factor`, `pin_memory` (by default if the
    device is a GPU), `worker_init_fn`, `timeout` (seconds without a batch, then DataError) and `persistent_workers` (they are
    started once, not in each epoch). Order and samples do not depend on the workers. Without workers, a thread fetches
    `prefetch_factor` batches ahead if the data draws no random numbers (an HDF5Dataset, a dataset with `draws_nothing`): reads
    and copies do not use the core of the training.

    `dataset` may also be iterable (torch's IterableDataset), a stream; an epoch is one pass of it. It must yield the same whole
    stream on every rank and worker, and each keeps its share (see `data.stream`). The Loader does not shuffle a stream.

    A stream that divides itself by rank, and so differs between ranks, has an attribute `split_by_rank = True`. Then all ranks
    must iterate together, and `uneven` sets what happens if one ends before the others: join, stop or pad (`data.uneven`).

    `batches`, instead of a size: `LengthBatches(tokens=...)` for samples of uneven length, or a batch sampler, an iterable of
    lists of indices, each a global batch (divided by length if the dataset has an attribute `lengths`). All ranks get parts of
    about the same cost. See `data.batching`.

    `split="files"`: each rank always reads the same part of the dataset, a run of samples: from a dataset of many files it
    opens only its own files. Parts differ by at most one sample, so a file may be cut between two ranks. Each sample is used
    once per epoch and all ranks have the same number of steps, but which samples make a global batch depends on the number of
    ranks.

    Random numbers that a dataset draws depend only on (seed, epoch, sample), with any number of workers. For `__getitems__` and
    `collate_fn`, they depend on the batch's first sample (with `seed_each_sample = True` in the dataset, its samples are read
    one by one); for a stream, on (seed, epoch). None of this changes the random streams of the training. A batch that is the
    first to draw from one of the three generators, after others that did not, is made twice.

    Raises ConfigError for arguments that contradict each other, DataError for a dataset that cannot be read.
    """

    @takes(
        dataset=ANYTHING, batch_size=FROM_ONE.or_none, global_batch_size=FROM_ONE.or_none, batches=BATCHES.or_none,
        accumulate=FROM_ONE, shuffle=SHUFFLE.or_none, drop_last=FLAG, split=one_of(*SPLITS).or_none,
        uneven=one_of(*POLICIES).or_none, seed=FROM_ZERO, max_epochs=FROM_ONE.or_none, collate_fn=FUNCTION.or_none,
        num_workers=FROM_ZERO, prefetch_factor=FROM_ONE.or_none, pin_memory=FLAG.or_none,
        worker_init_fn=FUNCTION.or_none, timeout=NOT_NEGATIVE, persistent_workers=FLAG, device=DEVICE.or_none,
        workers=FROM_ZERO.or_none, moved=MOVED,
    )  # fmt: skip
    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        batches: Any = None,
        accumulate: int = 1,
        shuffle: bool | str | Blocks | None = None,
        drop_last: bool = False,
        split: str | None = None,
        uneven: str | None = None,
        seed: int = 0,
        max_epochs: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0,
        persistent_workers: bool = False,
        device: torch.device | str | None = None,
        workers: int | None = None,
    ) -> None:
        self._dataset = dataset
        samples = length(dataset)
        check_sizes(batch_size, global_batch_size, batches, drop_last, dataset if samples is None else None)
        self._order = order_of(dataset, samples, seed, shuffle)
        self._in_own_blocks = self._order if shuffle == "blocks" else None
        check_split(split, dataset, samples is None, batches)
        self._split, self._batch_size, self._asked_size, self._batches = split, batch_size, global_batch_size, batches
        self.accumulate = self._given_accumulate = accumulate
        """Micro-batches per rank and step. On another number of ranks, a resume keeps them no larger than they have been."""
        self._fewest = 0  # micro-batches per step on all ranks, in any attempt so far; 0: this is the first
        self.drop_last, self.seed, self.max_epochs = drop_last, seed, max_epochs
        self._workers = Workers(
            max(num_workers, workers or 0), prefetch_factor, pin_memory, worker_init_fn, timeout, persistent_workers
        )
        self._kept, self._collate_fn, self._steps = Kept(), collate_fn, 0  # the steps of the current epoch
        self._asked_device = torch.device(device) if device is not None else None
        self.epoch = 0
        """The number of complete epochs."""
        self.position = 0
        """The number of samples taken from the current epoch, over all ranks."""
        self.taken = 0
        """The number of samples that all ranks have taken since this loader was created."""
        self.wait_s = 0.0
        """Seconds that the loop has waited for data so far."""
        self.begins_with = ""  # the first sample of a stream in words, when it is known
        self._indices: Sequence[Sequence[int] | Indices] = []
        self._looked_at: tuple[int, int] | None = None
        """Epoch and position after the first loop, if it ended after one step."""
        self._uneven: str | None = None
        if self._order is None:
            self._workers.check(draws_nothing=False)
            own = promises(dataset, "split_by_rank")
            self._uneven = check(uneven, own, type(dataset).__name__, drop_last)
            self._hint = None if own else hinted_length(dataset)
            if not private_names.can_hide_worker():
                self._workers = Workers(0)
        else:
            check_no_stream(uneven, type(dataset).__name__)
            self._fetch = Fetch(dataset, collate_fn, seed)
            self._workers.check(self._fetch.draws_nothing)
            if batch_size is None and not (isinstance(batches, LengthBatches) and batches.tokens is not None):
                _ = self.global_batch_size  # raise the error now: it does not depend on the number of ranks

    # --- what depends on the number of ranks, read at the first use

    @functools.cached_property
    def _world(self) -> World:
        return comm.world()

    @functools.cached_property
    def _device(self) -> torch.device:
        return self._asked_device if self._asked_device is not None else local_device(self._world)

    @functools.cached_property
    def global_batch_size(self) -> int:
        """The number of samples of a global batch; approximate if they differ (by length, by a batch sampler)."""
        return self._given_size

    @functools.cached_property
    def _given_size(self) -> int:
        """As given to the constructor; that of a checkpoint may differ."""
        if self._batching is None:
            return self._size_by_count()
        size = self._batching.size
        if self.drop_last and (samples := self.samples or 0) < size:
            raise DataError(f"drop_last drops all samples: {samples} samples are fewer than a global batch of {size}")
        return size

    def _size_by_count(self) -> int:
        if self._asked_size is not None:
            return self._asked_size
        assert self._batch_size is not None
        return self._batch_size * self._given_accumulate * self._world.world_size

    @functools.cached_property
    def _batching(self) -> Batching | None:
        return self._cut()

    def _cut(self) -> Batching | None:
        """None for a stream."""
        if self._order is None:
            return None
        if isinstance(self._batches, LengthBatches):
            parts = self._given_accumulate * self._world.world_size if self._batches.tokens is not None else 1
            return self._batches.cut(self._dataset, self._order, parts, ByTokensOfParts if self._split else ByTokens)
        if self._batches is not None:
            lengths = getattr(self._dataset, "lengths", None)
            known = LengthOf(lengths, self._order.samples) if lengths is not None else None
            return BySampler(self._batches, self._order.seed, known, self._order.samples)
        return (ByCountOfParts if self._split else ByCount)(self._order, self._size_by_count(), self.drop_last)

    @functools.cached_property
    def _stream(self) -> Stream:
        split, world = self.is_split, self._world
        if split and self.global_batch_size < world.world_size:
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} is too small for {world.world_size} ranks: each rank needs at "
                f"least one sample; give {world.world_size} or more"
            )
        rank, ranks = (0, 1) if split else (world.rank, world.world_size)
        pad = self._uneven == "pad"
        return Stream(self._dataset, self._collate_fn, self.seed, rank, ranks, self.drop_last, own=split, repeat=pad)

    def at(self, world: World) -> Loader:
        """The same Loader, for a process that is this rank of that world. Call it before the first use."""
        other = copy.copy(self)
        other._world = world
        return other

    def once(self) -> Loader:
        """The same Loader from the start, for one epoch."""
        _ = self._device  # to look for a GPU in each pass would take longer than a batch
        other = copy.copy(self)
        other.epoch, other.position, other._steps, other.taken, other.wait_s = 0, 0, 0, 0, 0.0
        other.max_epochs = 1
        other._batching = copy.copy(self._batching)
        return other

    def of_all(self) -> Loader:
        """Like `once`, and with every sample: nothing is dropped or repeated. Evaluate and predict use it."""
        other = self.once()
        if other.drop_last or other._uneven is not None:
            other.drop_last = False
            other._uneven = "join" if other._uneven is not None else None
            other._batching = other._cut()
            vars(other).pop("_stream", None)
        return other

    def over(self, dataset: Any) -> Loader:
        """A Loader of one pass in order over other data, cut and collated like this one. Evaluate and predict use it.

        Its batches are as large as the micro-batches that were given here, even if a checkpoint has changed these; by length if
        the data has an attribute `lengths` and this Loader cuts by length.
        """
        if isinstance(self._batches, LengthBatches) and hasattr(dataset, "lengths"):
            cut: dict[str, Any] = {"batches": self._batches.of_one_micro_batch(self._given_accumulate, self._world.world_size)}
        else:
            cut = {"global_batch_size": max(self._given_size // self._given_accumulate, 1)}
        other = Loader(dataset, **cut, shuffle=False, max_epochs=1, collate_fn=self._collate_fn, device=self._asked_device)
        other._workers = self._workers
        return other.at(self._world)

    @property
    def sizes(self) -> dict[str, float | None]:
        """The argument that sets the size of a batch, by its name. A checkpoint can be resumed only with the same argument."""
        if not isinstance(self._batches, LengthBatches):
            return as_given("batch_size", self._batch_size, self._asked_size) | {"global_batch_tokens": None}
        given = as_given("batch_tokens", self._batches.tokens, self._batches.global_tokens)
        return {"global_batch_size": self._batches.max_samples, **given}

    @property
    def traits(self) -> dict[str, Any]:
        """What must be the same on all ranks, besides `sizes`, `seed` and the number of samples."""
        if self._order is None or self._batching is None:
            return {}
        traits = {"shuffle": self._order.shuffle, "split": self._split, "batches": self._batching.by}
        return {**traits, **traits_of_split(self._dataset), **self._batching.traits()}

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is iterable: then `samples` and `steps_per_epoch` are what the dataset reports, if anything."""
        return self._order is None

    @property
    def is_split(self) -> bool:
        """Whether the dataset is a stream that differs between ranks."""
        return self._uneven is not None

    @property
    def samples(self) -> int | None:
        """Samples in the dataset; None for a stream without a length."""
        return self._hint if self._order is None else self._order.samples

    @property
    def steps_per_epoch(self) -> int | None:
        if self._batching is not None:
            return self._batching.steps_per_epoch()
        return None if self._hint is None else steps_of(self._hint, self.global_batch_size, self.drop_last)

    @property
    def fewest(self) -> int:
        """The number of samples of the smallest global batch that is possible."""
        if self._batching is not None:
            return self._batching.fewest()
        if self._uneven is None:
            return self.global_batch_size if self.drop_last else 1
        return self.global_batch_size if self._uneven == "pad" or (self._uneven == "stop" and self.drop_last) else 0

    @property
    def indices(self) -> list[list[int]]:
        """The samples of the last micro-batches: indices of the dataset, or positions in a stream."""
        return [some.tolist() if isinstance(some, np.ndarray) else list(some) for some in self._indices]

    @property
    def samples_read(self) -> Sequence[Sequence[int] | Indices]:
        """The same, as they are: arrays, or sequences of numbers."""
        return self._indices

    @property
    def finished(self) -> bool:
        return self.max_epochs is not None and self.epoch >= self.max_epochs

    def __iter__(self) -> Iterator[list[Any]]:
        """Continue at `epoch` and `position`. Both count a step as soon as its batches are returned."""
        if self._looked_at == (self.epoch, self.position):
            warn_of_look(self.position)
        is_first, epoch = self.taken == 0, self.epoch
        try:
            with is_used(self, "position", "a resumed run would read its data from the start"):
                yield from self._left()
        finally:
            is_look = is_first and self._steps == 1 and self.epoch == epoch
            self._looked_at = (self.epoch, self.position) if is_look else None

    def _left(self) -> Iterator[list[Any]]:
        if self._world.world_size > 1:
            comm.check_together("a Loader gives each rank its own part of the data")
        if self.finished and self.taken:
            warn_of_end(self.max_epochs)
        _ = self._given_size  # raises DataError if drop_last drops everything: an epoch without a step would never end
        told, moves = ToldWaits.of(self._world), self._device.type != "cpu"
        while not self.finished:
            began, epoch = told.begin() if told else perf_counter(), self.epoch
            for stop, is_last, micro_batches, indices in self._left_of_epoch():
                if moves:
                    micro_batches = [to_device(batch, self._device) for batch in micro_batches]
                self.taken += stop - self.position
                self.position = stop
                self._steps += 1
                self._indices = indices
                if is_last:
                    self._end_epoch()
                self.wait_s += perf_counter() - began
                if told:
                    told.end(len(micro_batches))
                ready = [micro_batches]
                del micro_batches  # so that the memory of batches is free as soon as the loop drops them
                yield ready.pop()
                began = told.begin() if told else perf_counter()
                if is_last or self.position != stop or self.epoch != epoch:  # a state was loaded, or there is another loop
                    break
            else:  # the state is from a run in which the last batch was not dropped: nothing is left
                self._end_epoch()

    def _end_epoch(self) -> None:
        self.epoch, self.position, self._steps = self.epoch + 1, 0, 0

    def _left_of_epoch(self) -> Iterator[Ready]:
        if self._batching is not None:
            return self._ordered(self._batching)
        steps = self._streamed() if self._uneven is None else self._in_step(self._uneven)
        return (step[:4] for step in steps)

    def _ordered(self, batching: Batching) -> Iterator[Ready]:
        """The remaining steps of this epoch of a map-style dataset."""
        epoch, world = self.epoch, self._world
        plan, ahead = itertools.tee(batching.plan(epoch, self.position, world.rank, world.world_size, self.accumulate))
        requests: Iterator[Any] = zip(itertools.repeat(epoch), itertools.chain.from_iterable(map(itemgetter(2), ahead)))
        assert self._order is not None
        far = how_far(self._order, batching.size // (world.world_size * self.accumulate), world.world_size)
        if (tell := teller_of(self._dataset, far.rows)) is not None:
            requests = announced(requests, tell, far)
        batches = self._fetched(requests, self._fetch)
        for stop, is_last, lists in plan:
            yield stop, is_last, list(itertools.islice(batches, len(lists))), lists

    def _streamed(self) -> Iterator[Step]:
        """The remaining steps of this epoch of a stream. Each request to a worker is a step."""
        epoch, size = self.epoch, self.global_batch_size
        requests = (Request(epoch, start, size, self.accumulate) for start in itertools.count(self.position, size))
        for step in itertools.takewhile(lambda step: step is not None, self._fetched(requests, self._stream)):
            self.begins_with = self.begins_with or step.begins_with
            yield step

    def _in_step(self, policy: str) -> Iterator[Step]:
        """Collective. The remaining steps of this epoch of streams that differ between ranks."""
        low, high = share(0, self.global_batch_size, self._world.rank, self._world.world_size)
        starts = itertools.count(self._steps * (high - low), high - low)
        requests = (Request(self.epoch, start, high - low, self.accumulate) for start in starts)
        own = itertools.takewhile(lambda step: step is not None, self._fetched(requests, self._stream))
        name = self._stream.name + " (drop_last: only full shares)" * self.drop_last
        yield from in_step(own, policy, self.position, name, self._world.world_size)

    def _fetched(self, requests: Iterator[Any], fetcher: Fetcher) -> Iterator[Any]:
        advice = fetcher.advice(self._workers.num_workers) if isinstance(fetcher, Fetch) else None
        if advice := advice or self._workers.advice(self._world.local_world_size):
            log.warning_once(advice)
        seed = seeds.derive(self.seed, self.epoch, self._world.rank, "workers")
        return fetched(requests, fetcher, self._workers, pin=self._device.type == "cuda", seed=seed, kept=self._kept)

    def anew(self, world: World, accumulate: int, global_batch_size: int | None = None) -> Loader:
        """The same data and order from the start, in this process, for any rank of any number of ranks. Without `split`,
        because with it the global batches depend on the number of ranks."""
        other = self.once()
        other.max_epochs = self.max_epochs
        other._world, other.accumulate, other._workers = world, accumulate, Workers(0)
        other.global_batch_size = self.global_batch_size
        if self._split is not None:
            other._split = None
            other._batching = other._cut()
            assert other._batching is not None
            other._batching.load(self.state_dict())
        if global_batch_size is not None:
            other.global_batch_size = global_batch_size
            other._batching = ByCount(self._order, global_batch_size, self.drop_last) if self._order is not None else None
        if self._order is None:
            other._stream = self._stream.anew(world.rank, world.world_size)
        else:
            other._fetch = self._fetch.by(sample=True)
        return other

    def describe(self) -> str:
        """The data in a few words, for the user."""
        number = self.steps_per_epoch
        steps = f", {number} step{'s' * (number != 1)} per epoch" if number is not None else ""
        if not self.is_stream:
            return f"{self.samples} samples{', of which each rank reads its own part' * (self._split is not None)}{steps}"
        if self._uneven is not None:
            return f"a separate stream on each rank (uneven: {self._uneven})"
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
            "seed": self.seed,
            "shuffle": self._order is not None and self._order.shuffle,
            "global_batch_size": self.global_batch_size,
            **(self._batching.state() | {"keyed by sample": self._fetch.keyed_by_sample} if self._batching is not None else {}),
            "ranks": self._world.world_size,
            "accumulate": self.accumulate,
            "given accumulate": self._given_accumulate,
            "fewest micro-batches": self._fewest or self._world.world_size * self.accumulate,
            "epoch": self.epoch,
            "position": self.position,
            **({"uneven": self._uneven, "steps": self._steps} if self._uneven is not None else {}),
        }

    @takes(state=STATE)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the recorded position. Raises ConfigError if the data or its order are not those of the checkpoint."""
        self._looked_at = None
        if (own := self._in_own_blocks) and (order := in_blocks_of(own, state["shuffle"])) is not own:
            log.say(f"resuming with the checkpoint's shuffle, {order.shuffle}, instead of {own.shuffle}")
            self._order = order
            self._batching = self._cut()
        common = {"batches by": "samples", "uneven": None, "split": None}
        now, state = common | self.state_dict(), common | state
        for name in ("samples", "seed", "shuffle", "batches by", "uneven", "split"):
            if state[name] != now[name]:
                is_argument = name in ("seed", "uneven", "split") or isinstance(state[name], bool)
                cure = f"give {name}={state[name]!r}" if is_argument else "use the same data and the same Loader"
                raise ConfigError(
                    f"the checkpoint was made with {name}={state[name]} and this run has {name}={now[name]}; "
                    f"{cure}, or start a new run with --fresh or --name NAME"
                )
        name = "global_batch_tokens" if self._by == "tokens" else "global_batch_size"
        if state[name] != now[name]:
            unit = " tokens" * (self._by == "tokens")
            log.say(f"resuming with the checkpoint's global batch of {state[name]:g}{unit} instead of {now[name]:g}")
        self.global_batch_size = state["global_batch_size"]
        if self._batching is not None:
            self._batching.load(state)
            self._fetch = self._fetch.by(sample=state.get("keyed by sample", False))
        if self._uneven is not None:
            check_position(state, self._world.world_size)
        self._steps = state.get("steps", 0)
        self._fewest, self.accumulate = accumulation(state, self._given_accumulate, self._world.world_size)
        self.epoch, self.position = state["epoch"], state["position"]
