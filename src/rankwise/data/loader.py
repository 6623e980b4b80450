"""Global batches, this rank's part of each, in one order for every world size.

    loader = Loader(dataset, world, global_batch_size=64, max_epochs=3)
    for micro_batches in loader:          # what one optimizer step takes
        for batch in micro_batches: ...

(epoch, position in samples) is the whole state of the data: it resumes anywhere, on any number of ranks and workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from rankwise import log
from rankwise import seed as seeds
from rankwise.data.order import Order
from rankwise.device import to_device
from rankwise.errors import ConfigError, DataError
from rankwise.world import World


class Loader:
    """Iterates over optimizer steps; each is a list of this rank's micro-batches, empty for a rank without a sample.

    `dataset` has `__len__` and `__getitem__(index)`, or `__getitems__(indices: list[int])`, which returns a list of samples,
    or a batch already (a tensor, or a tuple or mapping of tensors). Samples of a list go through `collate_fn`, torch's
    default_collate if None. The last global batch of an epoch is split like any other: neither padded nor dropped, unless
    `drop_last`. `workers` processes fetch ahead; order and samples do not depend on them.
    """

    def __init__(
        self,
        dataset: Any,
        world: World,
        *,
        global_batch_size: int,
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        max_epochs: int | None = None,
        workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        for name, value in (("global_batch_size", global_batch_size), ("accumulate", accumulate)):
            if value < 1:
                raise ConfigError(f"{name}={value}: give a whole number from 1 up")
        if seed < 0:
            raise ConfigError(f"seed={seed}: give a whole number from 0 up")
        self._dataset = dataset
        self._order = Order(length(dataset), seed, shuffle)
        self._world = world
        self._accumulate = accumulate
        self.drop_last = drop_last
        self._workers = workers
        self._fetch = _Fetch(dataset, collate_fn, seed)
        self._device = device
        self.global_batch_size = global_batch_size
        self.max_epochs = max_epochs
        self.epoch = 0
        """Epochs that are complete."""
        self.position = 0
        """Samples taken of the current epoch, over all ranks."""
        self.wait_s = 0.0
        """Seconds that the loop has waited for data so far."""
        if drop_last and self._order.samples < global_batch_size:
            raise DataError(
                f"drop_last leaves nothing: {self._order.samples} samples are fewer than a global batch of {global_batch_size}"
            )

    @property
    def samples(self) -> int:
        """Samples in the dataset."""
        return self._order.samples

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.samples, self.global_batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    @property
    def finished(self) -> bool:
        return self.max_epochs is not None and self.epoch >= self.max_epochs

    def __iter__(self) -> Iterator[list[Any]]:
        """Go on where `epoch` and `position` stand. Both are those after a step as soon as its batches are handed out."""
        while not self.finished:
            if self._ends_epoch(self.position):  # loaded from where the last batch was not yet dropped
                self.epoch += 1
                self.position = 0
                continue
            source = self._with_workers() if self._workers else self._in_process()
            began = time.perf_counter()
            for stop, micro_batches in source:
                self.position = stop
                if self._ends_epoch(stop):
                    self.epoch += 1
                    self.position = 0
                self.wait_s += time.perf_counter() - began
                yield micro_batches
                began = time.perf_counter()
                if self.position == 0:
                    break

    def _ends_epoch(self, stop: int) -> bool:
        return stop >= self.samples or (self.drop_last and stop + self.global_batch_size > self.samples)

    def _steps(self) -> Iterator[tuple[int, list[list[int]]]]:
        """For each step left of this epoch: the position after it, and the indices of this rank's micro-batches."""
        start, epoch = self.position, self.epoch
        while not self._ends_epoch(start):
            stop = min(start + self.global_batch_size, self.samples)
            low, high = share(start, stop, self._world.rank, self._world.world_size)
            indices = self._order.indices(epoch, low, high).tolist()
            yield stop, _split(indices, self._accumulate)
            start = stop

    def _in_process(self) -> Iterator[tuple[int, list[Any]]]:
        for stop, index_lists in self._steps():
            yield stop, [self._placed(self._fetch.batch(indices)) for indices in index_lists]

    def _with_workers(self) -> Iterator[tuple[int, list[Any]]]:
        requests: Any = [(self.epoch, indices) for _, lists in self._steps() for indices in lists]
        collate: Any = self._fetch
        loader: DataLoader[Any] = DataLoader(
            _Identity(),
            batch_sampler=requests,
            num_workers=self._workers,
            collate_fn=collate,
            pin_memory=self._device is not None and self._device.type == "cuda",
            # Its own generator: drawing the workers' seed must not move the stream that dropout draws from.
            generator=torch.Generator().manual_seed(0),
        )
        batches = iter(loader)
        for stop, index_lists in self._steps():
            yield stop, [self._placed(next(batches)) for _ in index_lists]

    def _placed(self, batch: Any) -> Any:
        return batch if self._device is None else to_device(batch, self._device)

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "global_batch_size": self.global_batch_size,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the recorded position. Raises ConfigError when the data or its order are not those of the record."""
        for name, now in (("samples", self.samples), ("seed", self._order.seed), ("shuffle", self._order.shuffle)):
            if state[name] != now:
                raise ConfigError(
                    f"the checkpoint was made with {name}={state[name]} and this run has {name}={now}: another training; "
                    "set it back, or start anew with --fresh, or beside it with --name NAME"
                )
        if state["global_batch_size"] != self.global_batch_size:
            log.say(
                f"going on with the checkpoint's global batch of {state['global_batch_size']} "
                f"instead of {self.global_batch_size}"
            )
            self.global_batch_size = state["global_batch_size"]
        self.epoch = state["epoch"]
        self.position = state["position"]


def length(dataset: Any) -> int:
    """Samples in a map-style dataset. Raises DataError for what is none, and for an empty one."""
    if isinstance(dataset, DataLoader):
        raise DataError("a DataLoader shards nothing by itself; give its dataset, and the batch size to the Trainer or Loader")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__} cannot tell its length; give a dataset with __len__ and __getitem__ (or __getitems__)"
        )
    if len(dataset) < 1:
        raise DataError(f"the dataset ({type(dataset).__name__}) is empty: it has no sample")
    return len(dataset)


def share(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """Rank `rank`'s part of positions [start, stop): contiguous, sizes differ by one at most, empty if there are too few."""
    n = stop - start
    return start + n * rank // world_size, start + n * (rank + 1) // world_size


def _split(indices: list[int], parts: int) -> list[list[int]]:
    """Into `parts` runs of nearly equal length; those without a sample are left out."""
    if parts == 1:
        return [indices] if indices else []
    n = len(indices)
    runs = (indices[n * k // parts : n * (k + 1) // parts] for k in range(parts))
    return [run for run in runs if run]


class _Identity(Dataset[int]):
    """What the worker processes index: (epoch, indices) comes back as it is, and _Fetch makes a batch of it."""

    def __getitems__(self, request: Any) -> Any:
        return request

    def __getitem__(self, index: int) -> int:
        return index


class _Fetch:
    """A list of indices -> a batch. Called in a worker with (epoch, indices); in this process `batch` with indices alone.

    In a worker random numbers are keyed by (seed, epoch, sample), or by a batch's first sample under `__getitems__`: they
    depend neither on the rank nor on the worker that draws them, and are the same after a resume.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate_fn or default_collate
        self._whole = type(dataset) is TensorDataset and collate_fn is None
        self._getitems = hasattr(dataset, "__getitems__")
        self._seed = seed
        self._epoch: int | None = None

    def __call__(self, request: tuple[int, list[int]]) -> Any:
        self._epoch, indices = request
        self._key(indices[0])
        return self.batch(indices)

    def _key(self, sample: int) -> None:
        if self._epoch is not None:
            seeds.seed_everything(seeds.derive(self._seed, self._epoch, sample))

    def batch(self, indices: Sequence[int]) -> Any:
        if self._whole:
            return self._dataset[indices]
        if self._getitems:
            samples = self._dataset.__getitems__(indices)
            return self._collate(samples) if isinstance(samples, list) else samples
        return self._collate([self._sample(index) for index in indices])

    def _sample(self, index: int) -> Any:
        self._key(index)
        try:
            return self._dataset[index]
        except Exception as error:
            error.add_note(f"in sample {index} of {type(self._dataset).__name__}")
            raise
