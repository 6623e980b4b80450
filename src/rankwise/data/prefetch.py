"""Makes batches ahead, in worker processes or in a thread.

fetch = Fetch(dataset, collate_fn=None, seed=0)
for batch in fetched(iter([(epoch, np.array([3, 1, 4]))]), fetch, Workers(2)): ...
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from rankwise.data.fetch import Fetcher
from rankwise.data.ring import Ring, RingContext
from rankwise.dist import private_names
from rankwise.dist.device import each_tensor
from rankwise.errors import ConfigError, DataError
from rankwise.host import machine
from rankwise.host.text import count
from rankwise.ipc.pickles import Packed, pack_error, unpack_error

_GROUP = 8  # requests in one message to a worker, at most
_GROUP_BYTES, _GROUP_S = 1 << 19, 0.002
"""If their batches have fewer bytes, and are made in less time."""


class Workers(NamedTuple):
    """How many processes fetch ahead, and options of torch's DataLoader, with its names. `prefetch_factor` without worker
    processes: a thread of this process fetches this number of batches ahead. Small batches that are made fast count as one, up
    to eight of them."""

    num_workers: int
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    worker_init_fn: Callable[[int], None] | None = None
    timeout: float = 0
    persistent: bool = False
    """Whether the processes remain for the next loop."""

    def check(self, draws_nothing: bool) -> None:
        """Raises ConfigError for arguments that need workers if there are none. `draws_nothing`: whether a thread may fetch; it
        would draw from the random streams of the training."""
        if self.num_workers:
            return
        if self.timeout:
            raise ConfigError(f"timeout={self.timeout} works only with workers; give num_workers, or remove timeout")
        if self.persistent:
            raise ConfigError("persistent_workers=True works only with workers; give num_workers, or remove persistent_workers")
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


def fetched(
    requests: Iterator[Any], fetcher: Fetcher, workers: Workers, pin: bool = False, seed: int = 0, kept: Kept | None = None
) -> Iterator[Any]:
    """The fetcher's result for each request, in their order. `workers` processes take turns. `pin`: whether memory is pinned if
    `workers` does not say. `seed`: of the workers, for what is not keyed. `kept`: where persistent workers wait between loops.

    An exception in a worker is raised here: with the same type if that can be pickled, otherwise as a DataError with its
    traceback. If no batch arrives for `timeout` seconds, this raises a DataError.
    """
    if workers.num_workers:
        return _by_workers(requests, fetcher, workers, pin, seed, kept or Kept())
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
_LAST_READ_S = 10.0
"""How long a loop that was not finished waits for the batch that its thread still reads."""


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
        # Not for ever: the garbage collector may end an abandoned loop, in a call that holds a lock which the thread waits for.
        thread.join(_LAST_READ_S)

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


def _by_workers(requests: Iterator[Any], fetcher: Fetcher, workers: Workers, pin: bool, seed: int, kept: Kept) -> Iterator[Any]:
    processes = kept.take(fetcher) or Processes(fetcher, workers, pin, seed)
    is_usable = False
    try:
        yield from processes.fetched(requests)
        is_usable = workers.persistent
    except GeneratorExit:  # the loop has ended before the data
        is_usable = workers.persistent
        raise
    finally:
        if is_usable:
            kept.put(processes)
        else:
            processes.end()


class Processes:
    """The worker processes of one fetcher, for one loop at a time."""

    def __init__(self, fetcher: Fetcher, workers: Workers, pin: bool, seed: int) -> None:
        self.fetcher = fetcher
        self._timeout_s = workers.timeout
        context = RingContext(multiprocessing.get_context(), _failure)
        self._context, self._ring = context, context.ring
        self._groups = _Groups(most=1 if workers.timeout else _GROUP)  # the timeout is for one batch
        sampler: Any = self._groups
        begin: Any = _Begin(getattr(fetcher, "dataset", None), workers.worker_init_fn)
        self._loader: DataLoader[Any] = DataLoader(
            _Identity(),
            batch_sampler=sampler,
            num_workers=workers.num_workers,
            prefetch_factor=workers.prefetch_factor,
            worker_init_fn=begin,
            timeout=workers.timeout,
            collate_fn=_Told(fetcher, context.ring),
            pin_memory=pin if workers.pin_memory is None else workers.pin_memory,
            multiprocessing_context=context,
            persistent_workers=workers.persistent,
            # A separate generator: drawing the workers' seed must not change the stream from which dropout draws.
            generator=torch.Generator().manual_seed(seed),
        )

    def fetched(self, requests: Iterator[Any]) -> Iterator[Any]:
        self._groups.requests = requests
        with _timeout_as_data_error(self._timeout_s):
            with _on_cpu():
                answers = iter(self._loader)
            for answer in answers:
                batches = deque(self._groups.answered(answer, self._ring.last_bytes))
                del answer
                while batches:
                    if isinstance(batches[0], _FetchFailure):
                        raise unpack_error(batches[0].packed, "in a loader worker", DataError)
                    yield batches.popleft()

    @property
    def are_alive(self) -> bool:
        return self._context.is_alive

    def end(self) -> None:
        """The processes end when nobody holds this object."""
        self._ring.late.clear()  # they refer to the ring, whose memory would remain until the garbage collection


class Kept:
    """Persistent workers that wait for the next loop. A loop takes them, so two loops never share them; in a forked process
    there are none."""

    def __init__(self) -> None:
        self._waiting: Processes | None = None
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()

    def take(self, fetcher: Fetcher) -> Processes | None:
        """None if there are none for this fetcher."""
        if self._pid != os.getpid():
            return None
        found, self._waiting = self._waiting, None
        if found is None or (found.fetcher is fetcher and found.are_alive):
            return found
        found.end()
        return None

    def put(self, processes: Processes) -> None:
        if self._waiting is None and self._pid == os.getpid():
            self._waiting = processes
        else:
            processes.end()


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """After `torch.set_default_device`, torch's DataLoader cannot draw the seed of its workers, and these cannot make tensors:
    a forked process has no other device."""
    return torch.device("cpu") if torch.get_default_device().type != "cpu" else contextlib.nullcontext()


class _Groups:
    """The requests, several of them in one message to a worker if a batch is small and made fast: then the message and the
    switch to another process take longer than the batch."""

    def __init__(self, requests: Iterable[Any] = (), most: int = _GROUP) -> None:
        self.requests = requests
        self._size, self._most = 1, most

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        requests = iter(self.requests)
        while group := tuple(itertools.islice(requests, self._size)):
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
