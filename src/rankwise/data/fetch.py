"""Makes the batch of a request: the samples of a map-style dataset, collated.

    fetch = Fetch(dataset, collate_fn=None, seed=0)
    batch = fetch.here((epoch, np.array([3, 1, 4])))

Random numbers that a dataset draws are keyed by (seed, epoch, sample): they do not depend on the rank or the worker that draws
them, are the same after a resume, and do not change the random streams of the training. If a dataset or a collate function
makes a whole batch at once, the key is that of the first sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import getitem
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from rankwise.data.keyed import Key, Keyed
from rankwise.data.kinds import Empty, draws_nothing, has_getitems, inside, promises, reader_of
from rankwise.data.order import Indices
from rankwise.dist import seed as seeds
from rankwise.host.text import numbered

_SHOWN = 8  # indices in the note of an error, at most


class Fetcher(Protocol):
    """Called in a worker. `here` does the same in this process, and does not change its random streams."""

    @property
    def draws_nothing(self) -> bool:
        """Whether `here` never uses a random stream, so that another thread may call it while the training draws."""

    def __call__(self, request: Any, empty: Empty | None = None) -> Any:
        """`empty`: creates the arrays of a batch."""

    def here(self, request: Any) -> Any: ...


class Fetch:
    """(epoch, int64 array of indices) -> a batch of a map-style dataset.

    Random streams are keyed by (seed, epoch, sample) for each sample; for `__getitems__` and `collate_fn`, by the first sample
    of the batch. If the dataset has a true attribute `seed_each_sample`, samples are read one by one in spite of
    `__getitems__`. A dataset with `draws_nothing` and `read_batch(indices)` makes the batch from the array itself, unless there
    is a `collate_fn`, which takes samples. `read_batch(indices, empty=None)` may create its arrays by `empty(shape, dtype)`, in
    memory that only this batch uses: then a worker need not copy the batch.
    """

    keyed_by_sample = True

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self._dataset = dataset
        self._collate_fn, self._collate = collate_fn, collate_fn or collate
        self._seed = seed
        self._read = reader_of(dataset) if collate_fn is None else None
        self._in_one = not promises(dataset, "seed_each_sample") and has_getitems(dataset)
        self._samples_keyed = None if draws_nothing(dataset) else Keyed(seed)
        self._collate_keyed = None if collate_fn is None else Keyed(seed)
        # Dataset and collate function of earlier versions are keyed in any case.
        self.draws_nothing = self.keyed_by_sample and self._samples_keyed is None and self._collate_keyed is None

    @property
    def dataset(self) -> Any:
        return self._dataset

    def advice(self, workers: int) -> str | None:
        """What to change if batches take longer with this number of workers than without: one call that reads from a memory map
        is faster than a transfer from another process."""
        if not workers or self._read is None or not promises(self._dataset, "faster_without_workers"):
            return None
        return (
            f"num_workers={workers}: a batch of {type(inside(self._dataset)).__name__} is read faster without loader "
            "workers; leave num_workers out, and give prefetch_factor=4: then a thread reads ahead"
        )

    def by(self, sample: bool) -> Fetch:
        """The same, keyed by sample, or by batch as in earlier versions. If nothing is drawn, the two are equal."""
        kind = Fetch if sample or self._read is not None else FetchByBatch
        return kind(self._dataset, self._collate_fn, self._seed)

    def __call__(self, request: tuple[int, Indices], empty: Empty | None = None) -> Any:
        if self._read is not None:
            try:
                return self._read(request[1], empty)
            except BaseException as error:
                add_place(error, "in", request[1], self._dataset)
                raise
        epoch, indices = request[0], request[1].tolist()
        samples = self._sampled(epoch, indices)
        if self._collate_keyed is None:
            return self._batch(epoch, indices, samples) if isinstance(samples, list) else samples
        fresh = [samples]  # a collate function may change the samples: a second call gets new ones
        return self._collate_keyed.made(
            lambda key: self._batch(epoch, indices, fresh.pop() if fresh else self._sampled(epoch, indices), key)
        )

    here = __call__

    def _sampled(self, epoch: int, indices: list[int]) -> Any:
        if self._samples_keyed is None:
            return self._samples(epoch, indices)
        return self._samples_keyed.made(partial(self._samples, epoch, indices))

    def _samples(self, epoch: int, indices: Sequence[int], key: Key | None = None) -> Any:
        dataset = self._dataset
        if self._in_one:
            if key is not None:
                key(epoch, indices[0])
            try:
                return dataset.__getitems__(indices)
            except BaseException as error:
                add_place(error, "in", indices, dataset)
                raise
        samples: list[Any] = []
        try:
            if key is not None:
                for index in indices:
                    key(epoch, index)
                    samples.append(dataset[index])
                return samples
            samples.extend(map(getitem, repeat(dataset), indices))
            if len(samples) < len(indices):  # the dataset raised StopIteration, and `extend` took it for the end
                raise StopIteration
        except BaseException as error:
            add_place(error, "in", indices[len(samples) :][:1], dataset)
            raise
        return samples

    def _batch(self, epoch: int, indices: Sequence[int], samples: list[Any], key: Key | None = None) -> Any:
        if key is not None:
            key(epoch, indices[0], "collate")
        try:
            return self._collate(samples)
        except BaseException as error:
            add_place(error, "in the collate function, of", indices, self._dataset)
            raise


class FetchByBatch(Fetch):
    """Keyed as in earlier versions, for runs that they started: in workers each sample has a key. In this process the first
    sample of a batch has one, and the other samples and the collate function continue its streams."""

    keyed_by_sample = False

    def __call__(self, request: tuple[int, Indices], empty: Empty | None = None) -> Any:
        return self._made(request[0], request[1].tolist(), each=True)

    def here(self, request: tuple[int, Indices], empty: Empty | None = None) -> Any:
        saved = seeds.SavedStreams()
        saved.save()
        try:
            return self._made(request[0], request[1].tolist(), each=promises(self._dataset, "seed_each_sample"))
        finally:
            saved.restore()

    def _made(self, epoch: int, indices: list[int], each: bool) -> Any:
        def key(epoch: int, sample: int) -> None:
            seeds.seed_streams(seeds.derive(self._seed, epoch, sample))

        draws = not promises(self._dataset, "draws_nothing")
        if draws:
            key(epoch, indices[0])
        samples = self._samples(epoch, indices, key if draws and each else None)
        return samples if not isinstance(samples, list) else self._batch(epoch, indices, samples)


def collate(samples: Any) -> Any:
    """torch's default_collate, but in two thirds of the time for tuples and dicts of dense tensors, which most datasets return.
    In a worker torch's creates a file of shared memory for each tensor."""
    first = samples[0]
    kind = type(first)
    if kind is torch.Tensor:
        if first.layout is torch.strided and not first.is_nested:
            return torch.stack(samples)
    elif kind is np.ndarray:
        if first.dtype.kind in "biufc":
            return torch.stack([torch.as_tensor(sample, device="cpu") for sample in samples])
    elif kind is dict:
        return {key: collate([sample[key] for sample in samples]) for key in first}
    elif kind is tuple:
        try:
            fields = list(zip(*samples, strict=True))
        except (ValueError, TypeError):
            return default_collate(samples)  # raises its own error: their lengths differ, or one has none
        return list(map(collate, fields))
    return default_collate(samples)


def add_place(error: BaseException, where: str, indices: Sequence[int] | Indices, dataset: Any) -> None:
    """Give the exception a note with the samples and the dataset. Raises RuntimeError instead of a StopIteration, which would
    end a loop without an error."""
    text = f"{where} {numbered('sample', [int(index) for index in indices], _SHOWN)} of {type(dataset).__name__}"
    if isinstance(error, StopIteration):
        raise RuntimeError(f"StopIteration was raised {text}") from error
    with contextlib.suppress(Exception):  # a frozen exception cannot take a note
        error.add_note(text)
