"""Requests -> batches, in this process or in workers that fetch ahead.

    fetch = Fetch(dataset, collate_fn=None, seed=0)
    for batch in fetched(iter([(epoch, [3, 1, 4])]), fetch, workers=2): ...

Random numbers that a dataset draws are keyed by (seed, epoch, sample): they depend neither on the rank nor on the worker that
draws them, are the same after a resume, and leave the streams of the training where they were.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from rankwise.dist import seed as seeds
from rankwise.dist.device import each_tensor
from rankwise.errors import ConfigError, DataError
from rankwise.host.text import numbered
from rankwise.ipc.pickles import Packed, pack_error, unpack_error

_SHOWN = 8  # indices in an error's note
_GATHERED_BYTES = 1 << 22


class Fetcher(Protocol):
    """Called in a worker; `here` does the same in this process, request by request, and leaves its random streams alone."""

    def __call__(self, request: Any) -> Any: ...

    def here(self, requests: Iterator[Any]) -> Iterator[Any]: ...


class Workers(NamedTuple):
    """How many processes fetch ahead, and what torch's DataLoader does with them, by its names."""

    num_workers: int
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    worker_init_fn: Callable[[int], None] | None = None
    timeout: float = 0

    def check(self) -> None:
        """Raises ConfigError for what needs workers where there are none."""
        for name in ("prefetch_factor", "timeout"):
            if self.num_workers == 0 and getattr(self, name):
                raise ConfigError(f"{name}={getattr(self, name)} is for workers: give num_workers too, or leave {name} out")


def fetched(requests: Iterator[Any], fetcher: Fetcher, workers: Workers, pin: bool = False) -> Iterator[Any]:
    """What the fetcher makes of each request, in their order; `workers` processes share them in turn. `pin`: whether memory
    is pinned if `workers` leaves it open.

    An exception in a worker is raised here, of the same type where it survives a pickle, a DataError with its traceback
    otherwise; a DataError too if no batch comes for `timeout` seconds.
    """
    if workers.num_workers == 0:
        batches = fetcher.here(requests)
        pinned = workers.pin_memory and torch.accelerator.is_available()
        yield from (each_tensor(batch, torch.Tensor.pin_memory) for batch in batches) if pinned else batches
        return
    sampler: Any = requests
    loader: DataLoader[Any] = DataLoader(
        _Identity(),
        batch_sampler=sampler,
        num_workers=workers.num_workers,
        prefetch_factor=workers.prefetch_factor,
        worker_init_fn=workers.worker_init_fn,
        timeout=workers.timeout,
        collate_fn=_Told(fetcher),
        pin_memory=pin if workers.pin_memory is None else workers.pin_memory,
        # Its own generator: drawing the workers' seed must not move the stream that dropout draws from.
        generator=torch.Generator().manual_seed(0),
    )
    with _timeout_told(workers.timeout):
        for answer in loader:
            if isinstance(answer, _FetchFailure):
                raise unpack_error(answer.packed, "in a loader worker", DataError)
            yield answer


@contextlib.contextmanager
def _timeout_told(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader timed out"):
            raise
        raise DataError(
            f"no batch came from the loader workers for {timeout_s:g} s (timeout={timeout_s:g}): a worker waits or is slow; "
            "py-spy dump --pid PID shows where, and a larger timeout, or 0 for none, waits longer"
        ) from None


class _Identity(Dataset[Any]):
    """What the worker processes index: a request comes back as it is, and the fetcher makes a batch of it."""

    def __getitems__(self, request: Any) -> Any:
        return request

    def __getitem__(self, request: Any) -> Any:
        return request


class _FetchFailure(NamedTuple):
    packed: Packed


class _Told:
    """Calls the fetcher; an exception is returned, as torch would make a RuntimeError of many."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __call__(self, request: Any) -> Any:
        try:
            return self._fetcher(request)
        except Exception as error:
            return _FetchFailure(pack_error(error))


class Fetch:
    """(epoch, indices) -> a batch of a map-style dataset.

    Random streams are keyed by each sample in a worker; in this process, and under `__getitems__`, by a batch's first sample,
    unless the dataset asks for each: a true attribute `seed_each_sample`. Then samples are taken one by one, and are the same
    with any number of workers and ranks. Keying costs 28 us a batch in this process, which a dataset that draws no random
    numbers saves by a true attribute `draws_nothing`; torch's TensorDataset is known to.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate_fn or default_collate
        self._seed = seed
        self._each = promises(dataset, "seed_each_sample")
        self._whole = type(dataset) is TensorDataset and collate_fn is None
        self._in_one = not self._each and _has_getitems(dataset)
        self._draws = not (self._whole or promises(dataset, "draws_nothing"))
        self._aside = seeds.Aside()

    def one_by_one(self) -> Fetch:
        """The same for which each sample's random numbers are its own, unless the dataset makes whole batches."""
        other = copy.copy(self)
        other._each = self._each or not self._in_one
        other._aside = seeds.Aside()
        return other

    def __call__(self, request: tuple[int, list[int]]) -> Any:
        return self._batch(*request, each=self._draws)

    def here(self, requests: Iterator[tuple[int, list[int]]]) -> Iterator[Any]:
        if self._whole:
            yield from _gathered(self._dataset.tensors, requests)
        for request in requests:
            yield self._here(request)

    def _here(self, request: tuple[int, list[int]]) -> Any:
        if not self._draws:
            return self._batch(*request, each=False)
        self._aside.put()
        try:
            return self._batch(*request, each=self._each)
        finally:
            self._aside.back()

    def _batch(self, epoch: int, indices: Sequence[int], each: bool) -> Any:
        if self._whole:
            return self._dataset[indices]
        if self._draws:
            self._key(epoch, indices[0])
        if self._in_one:
            with Noted("in", indices, self._dataset):
                samples = self._dataset.__getitems__(indices)
            if not isinstance(samples, list):
                return samples
        else:
            samples = []
            with Noted("in", indices, self._dataset) as place:
                for index in indices:
                    place.indices = (index,)
                    if each:
                        self._key(epoch, index)
                    samples.append(self._dataset[index])
        with Noted("in the collate function, of", indices, self._dataset):
            return self._collate(samples)

    def _key(self, epoch: int, sample: int) -> None:
        seeds.seed_streams(seeds.derive(self._seed, epoch, sample))


def _gathered(tensors: Sequence[torch.Tensor], requests: Iterator[tuple[int, list[int]]]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Batches of a TensorDataset: the rows of many are gathered at once, a third of the time of one after the other."""
    row_bytes = sum(t[0].numel() * t.element_size() for t in tensors)
    for _, indices in requests:
        at_once = min(_GATHERED_BYTES // (len(indices) * row_bytes + 1), 64)
        wanted = [indices, *(more for _, more in islice(requests, max(at_once - 1, 0)))]
        index = torch.tensor([i for some in wanted for i in some])
        lengths = [len(some) for some in wanted]
        gathered = (tensor.index_select(0, index.to(tensor.device)) for tensor in tensors)
        for batch in zip(*(torch.split(rows, lengths) for rows in gathered), strict=True):
            # Memory of its own, aligned as ever: a matrix product rounds by where its rows lie, and after a resume a batch lies
            # elsewhere in what was gathered (other bits were seen on 3 ranks).
            yield tuple(rows.clone() for rows in batch)


def promises(dataset: Any, attribute: str) -> bool:
    """Whether the dataset, or the one it wraps as `dataset` (torch's Subset), has that attribute, and true."""
    while not hasattr(dataset, attribute) and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return bool(getattr(dataset, attribute, False))


def _has_getitems(dataset: Any) -> bool:
    """torch's Subset has `__getitems__` whether or not what it is a part of has."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


class Noted:
    """What is raised inside has a note that names the samples and the dataset."""

    def __init__(self, where: str, indices: Sequence[int], dataset: Any) -> None:
        self._where = where
        self.indices = indices
        self._dataset = dataset

    def __enter__(self) -> Noted:
        return self

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        if error is None:
            return
        text = f"{self._where} {numbered('sample', self.indices, _SHOWN)} of {type(self._dataset).__name__}"
        if isinstance(error, StopIteration):  # it would end a loop in silence
            raise RuntimeError(f"StopIteration was raised {text}") from error
        with contextlib.suppress(Exception):  # a frozen exception takes no note
            error.add_note(text)
