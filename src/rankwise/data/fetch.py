"""Makes the batch for each request, in this process or in workers that fetch ahead.

    fetch = Fetch(dataset, collate_fn=None, seed=0)
    for batch in fetched(iter([(epoch, np.array([3, 1, 4]))]), fetch, Workers(2)): ...

Random numbers that a dataset draws are keyed by (seed, epoch, sample): they do not depend on the rank or the worker that draws
them, are the same after a resume, and do not change the random streams of the training. If a dataset or a collate function
makes a whole batch at once, the key is that of the first sample.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import getitem
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from rankwise.data.keyed import Key, Keyed
from rankwise.data.kinds import Empty, draws_nothing, has_getitems, inside, promises, reader_of
from rankwise.data.order import Indices
from rankwise.data.ring import Ring, RingContext
from rankwise.dist import private_names
from rankwise.dist import seed as seeds
from rankwise.dist.device import each_tensor
from rankwise.errors import ConfigError, DataError
from rankwise.host import machine
from rankwise.host.text import count, numbered
from rankwise.ipc.pickles import Packed, pack_error, unpack_error

_SHOWN = 8  # indices in the note of an error, at most
_GROUP = 8  # requests in one message to a worker, at most
_GROUP_BYTES, _GROUP_S = 1 << 19, 0.002
"""If their batches have fewer bytes, and are made in less time."""


class Fetcher(Protocol):
    """Called in a worker. `here` does the same in this process, and does not change its random streams."""

    @property
    def draws_nothing(self) -> bool:
        """Whether `here` never uses a random stream, so that another thread may call it while the training draws."""

    def __call__(self, request: Any, empty: Empty | None = None) -> Any:
        """`empty`: creates the arrays of a batch."""

    def here(self, request: Any) -> Any: ...


class Workers(NamedTuple):
    """How many processes fetch ahead, and options of torch's DataLoader, with its names. `prefetch_factor` without worker
    processes: a thread of this process fetches this number of batches ahead. Small batches that are made fast count as one, up
    to eight of them."""

    num_workers: int
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    worker_init_fn: Callable[[int], None] | None = None
    timeout: float = 0

    def check(self, draws_nothing: bool) -> None:
        """Raises ConfigError for arguments that need workers if there are none. `draws_nothing`: whether a thread may fetch; it
        would draw from the random streams of the training."""
        if self.num_workers:
            return
        if self.timeout:
            raise ConfigError(f"timeout={self.timeout} works only with workers; give num_workers, or remove timeout")
        if self.prefetch_factor and not draws_nothing:
            raise ConfigError(
                f"prefetch_factor={self.prefetch_factor} works only with workers; give num_workers, or remove prefetch_factor "
                "(without workers, a thread fetches batches ahead only if it knows that the data draws no random numbers: an "
                "HDF5Dataset, or a dataset with draws_nothing = True, without collate_fn)"
            )

    def advice(self, ranks: int) -> str | None:
        """What to change if this node has fewer cores than all workers of its `ranks` ranks; None if it has enough."""
        if not self.num_workers:
            return None
        cores = machine.cores()
        sharing = ranks if cores == os.cpu_count() else 1  # otherwise the launcher has bound this rank to its own cores
        total = sharing * self.num_workers
        if total <= cores:
            return None
        of = f" on each of {sharing} ranks" if sharing > 1 else ""
        return (
            f"num_workers={self.num_workers}{of}: {total} workers share {count(cores, 'core')}, and slow each other and "
            f"the training down; try num_workers={max(cores // sharing - 1, 0)}"
        )


def fetched(requests: Iterator[Any], fetcher: Fetcher, workers: Workers, pin: bool = False, seed: int = 0) -> Iterator[Any]:
    """The fetcher's result for each request, in their order. `workers` processes take turns. `pin`: whether memory is pinned if
    `workers` does not say. `seed`: of the workers, for what is not keyed.

    An exception in a worker is raised here: with the same type if that can be pickled, otherwise as a DataError with its
    traceback. If no batch arrives for `timeout` seconds, this raises a DataError.
    """
    if workers.num_workers:
        return _by_workers(requests, fetcher, workers, pin, seed)
    made = fetcher.here
    if workers.pin_memory and torch.accelerator.is_available():
        made = partial(_pinned, made)

    if workers.prefetch_factor and fetcher.draws_nothing:
        return _by_thread(requests, made, workers.prefetch_factor)
    # Not a map: if a dataset raised StopIteration, the loop would end without an error.
    return (made(request) for request in requests)


def _pinned(made: Callable[[Any], Any], request: Any) -> Any:
    return each_tensor(made(request), torch.Tensor.pin_memory)


_END = object()


def _by_thread(requests: Iterator[Any], made: Callable[[Any], Any], ahead: int) -> Iterator[Any]:
    """A thread makes `ahead` batches in advance. Requests are taken in the thread of the caller."""
    # Not an executor: a Future for each batch costs as much as a gather of small rows.
    asked: SimpleQueue[Any] = SimpleQueue()
    ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    over = threading.Event()

    def fetch() -> None:
        while (request := asked.get()) is not _END and not over.is_set():
            try:
                ready.put((made(request), None))
            except BaseException as error:
                ready.put((None, error))

    def stop() -> None:
        over.set()
        asked.put(_END)
        thread.join()

    thread = threading.Thread(target=fetch, name="rankwise-prefetch", daemon=True)
    thread.start()
    atexit.register(stop)  # for a loop that was not finished: the interpreter must not exit while a thread reads
    under_way = 0
    try:
        for request in requests:
            asked.put(request)
            under_way += 1
            if under_way > ahead:
                under_way -= 1
                yield _result(*ready.get())
        for _ in range(under_way):
            yield _result(*ready.get())
    finally:
        stop()
        atexit.unregister(stop)


def _result(batch: Any, error: BaseException | None) -> Any:
    try:
        if error is not None:
            raise error
        return batch
    finally:
        del error, batch  # the traceback has this frame


def _by_workers(requests: Iterator[Any], fetcher: Fetcher, workers: Workers, pin: bool, seed: int) -> Iterator[Any]:
    context = RingContext(multiprocessing.get_context(), _failure)
    groups = _Groups(requests, most=1 if workers.timeout else _GROUP)  # the timeout is for one batch
    sampler: Any = groups
    begin: Any = _Begin(getattr(fetcher, "dataset", None), workers.worker_init_fn)
    loader: DataLoader[Any] = DataLoader(
        _Identity(),
        batch_sampler=sampler,
        num_workers=workers.num_workers,
        prefetch_factor=workers.prefetch_factor,
        worker_init_fn=begin,
        timeout=workers.timeout,
        collate_fn=_Told(fetcher, context.ring),
        pin_memory=pin if workers.pin_memory is None else workers.pin_memory,
        multiprocessing_context=context,
        # A separate generator: drawing the workers' seed must not change the stream from which dropout draws.
        generator=torch.Generator().manual_seed(seed),
    )
    try:
        with _timeout_as_data_error(workers.timeout):
            with _on_cpu():
                answers = iter(loader)
            for answer in answers:
                batches = deque(groups.answered(answer, context.ring.last_bytes))
                del answer
                while batches:
                    if isinstance(batches[0], _FetchFailure):
                        raise unpack_error(batches[0].packed, "in a loader worker", DataError)
                    yield batches.popleft()
    finally:
        context.ring.late.clear()  # they refer to the ring, whose memory would remain until the garbage collection


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """After `torch.set_default_device`, torch's DataLoader cannot draw the seed of its workers, and these cannot make tensors:
    a forked process has no other device."""
    return torch.device("cpu") if torch.get_default_device().type != "cpu" else contextlib.nullcontext()


class _Groups:
    """The requests, several of them in one message to a worker if a batch is small and made fast: then the message and the
    switch to another process take longer than the batch."""

    def __init__(self, requests: Iterator[Any], most: int = _GROUP) -> None:
        self._requests = requests
        self._size, self._most = 1, most

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        while group := tuple(itertools.islice(self._requests, self._size)):
            yield group

    def answered(self, answer: Any, size: int) -> Sequence[Any]:
        """The batches of an answer that has `size` bytes."""
        if isinstance(answer, _FetchFailure):
            return [answer]
        batches: list[Any]
        batches, seconds = answer
        fit = min(_GROUP_S / max(seconds, 1e-9), _GROUP_BYTES / max(size, 1)) * len(batches)
        self._size = max(min(int(fit), self._most), 1)
        return batches


@contextlib.contextmanager
def _timeout_as_data_error(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader timed out"):
            raise
        raise DataError(
            f"no batch came from the loader workers for {timeout_s:g} s (timeout={timeout_s:g}): a worker hangs or is slow; "
            "py-spy dump --pid PID shows where; timeout=SECONDS sets the limit (0: none)"
        ) from None


class _Identity(Dataset[Any]):
    """The dataset of the worker processes: it returns each request as it is, and the fetcher makes a batch of it."""

    def __getitems__(self, request: Any) -> Any:
        return request

    def __getitem__(self, request: Any) -> Any:
        return request


class _Begin(NamedTuple):
    """What a worker calls first. The user's function finds the user's dataset in `get_worker_info()`."""

    dataset: Any
    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        if self.dataset is not None:
            private_names.set_dataset_of_worker(self.dataset)
        if self.then is not None:
            self.then(worker)


class _FetchFailure(NamedTuple):
    packed: Packed


def _failure(error: Exception) -> _FetchFailure:
    return _FetchFailure(pack_error(error))


class _Told:
    """Calls the fetcher for each request of a group. Returns (what it returned, how many seconds it took in all). An exception
    is returned too, because torch would turn many types into a RuntimeError; it ends the group."""

    def __init__(self, fetcher: Fetcher, ring: Ring) -> None:
        self._fetcher, self._ring = fetcher, ring

    def __call__(self, requests: Sequence[Any]) -> tuple[list[Any], float]:
        began = time.perf_counter()
        made: list[Any] = []
        for request in requests:
            try:
                made.append(self._fetcher(request, self._ring.empty))
            except Exception as error:
                made.append(_failure(error))
                break
        return made, time.perf_counter() - began


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
                Noted("in", request[1], self._dataset).note(error)
                raise
        epoch, indices = request[0], request[1].tolist()
        samples = self._sampled(epoch, indices)
        if self._collate_keyed is None:
            return self._batch(epoch, indices, samples) if isinstance(samples, list) else samples
        fresh = [samples]  # a collate function may change the samples: a second call gets new ones
        return self._collate_keyed.made(
            lambda key: self._batch(epoch, indices, fresh.pop() if fresh else self._sampled(epoch, indices), key)
        )

    def here(self, request: tuple[int, Indices]) -> Any:
        return self(request)

    def _sampled(self, epoch: int, indices: list[int]) -> Any:
        if self._samples_keyed is None:
            return self._samples(epoch, indices)
        return self._samples_keyed.made(partial(self._samples, epoch, indices))

    def _samples(self, epoch: int, indices: Sequence[int], key: Key | None = None) -> Any:
        dataset = self._dataset
        if self._in_one:
            if key is not None:
                key(epoch, indices[0])
            with Noted("in", indices, dataset):
                return dataset.__getitems__(indices)
        samples: list[Any] = []
        with Noted("in", indices, dataset, samples):
            if key is not None:
                for index in indices:
                    key(epoch, index)
                    samples.append(dataset[index])
                return samples
            samples.extend(map(getitem, repeat(dataset), indices))
            if len(samples) < len(indices):  # the dataset raised StopIteration, and `extend` took it for the end
                raise StopIteration
        return samples

    def _batch(self, epoch: int, indices: Sequence[int], samples: list[Any], key: Key | None = None) -> Any:
        if key is not None:
            key(epoch, indices[0], "collate")
        with Noted("in the collate function, of", indices, self._dataset):
            return self._collate(samples)


class FetchByBatch(Fetch):
    """Keyed as in earlier versions, for runs that they started: in workers each sample has a key. In this process the first
    sample of a batch has one, and the other samples and the collate function continue its streams."""

    keyed_by_sample = False

    def __call__(self, request: tuple[int, Indices], empty: Empty | None = None) -> Any:
        return self._made(request[0], request[1].tolist(), each=True)

    def here(self, request: tuple[int, Indices]) -> Any:
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
    elif kind in (tuple, dict) and {*map(type, samples)} == {kind} and {*map(len, samples)} == {len(first)}:
        if kind is tuple:
            return [collate(field) for field in zip(*samples, strict=True)]
        return {key: collate([sample[key] for sample in samples]) for key in first}
    return default_collate(samples)


class Noted:
    """An exception that is raised inside gets a note with the samples and the dataset."""

    def __init__(self, where: str, indices: Sequence[int] | Indices, dataset: Any, made: Sequence[Any] | None = None) -> None:
        """`made`: the results for these samples so far, in order: the note then names only the next sample."""
        self._where = where
        self.indices = indices
        self._dataset = dataset
        self._made = made

    def __enter__(self) -> Noted:
        return self

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        if error is not None:
            self.note(error)

    def note(self, error: BaseException) -> None:
        at = [int(index) for index in (self.indices if self._made is None else self.indices[len(self._made) :][:1])]
        text = f"{self._where} {numbered('sample', at, _SHOWN)} of {type(self._dataset).__name__}"
        if isinstance(error, StopIteration):  # it would end a loop without an error
            raise RuntimeError(f"StopIteration was raised {text}") from error
        with contextlib.suppress(Exception):  # a frozen exception cannot take a note
            error.add_note(text)
