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
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from rankwise.data.fetch import Fetcher
from rankwise.data.kinds import Empty
from rankwise.data.worker_link import WorkerContext, WorkerLink
from rankwise.dist import private_names
from rankwise.dist.device import each_tensor
from rankwise.errors import ConfigError, DataError
from rankwise.host import machine
from rankwise.host.text import count
from rankwise.ipc.pickles import Packed, pack_error, unpack_error

_AHEAD = 2  # batches of each worker, as in torch's DataLoader
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
        made = _InPinnedMemory(made)

    if workers.prefetch_factor and fetcher.draws_nothing:
        return _by_thread(requests, made, workers.prefetch_factor)
    # Not a map: if a dataset raised StopIteration, the loop would end without an error.
    return (made(request) for request in requests)


class _InPinnedMemory:
    """The same in pinned memory, for the device of this thread."""

    def __init__(self, made: Callable[[Any], Any]) -> None:
        self._made, self._device = made, torch.accelerator.current_device_index()
        self._thread = threading.get_ident()

    def __call__(self, request: Any) -> Any:
        if threading.get_ident() != self._thread:  # which begins with device 0
            torch.accelerator.set_device_index(self._device)
        return each_tensor(self._made(request), torch.Tensor.pin_memory, _pinned)


def _pinned(value: Any) -> Any:
    """Of a batch: an object of the script, which may know how it is pinned, as for torch's DataLoader."""
    return value.pin_memory() if hasattr(value, "pin_memory") else value


_END = object()
_LAST_READ_S = 10.0
"""How long a loop that was not finished waits for the batch that its thread still reads."""

_SOON_S = 0.5e-3
"""How long a batch that is ready waits for the next, at most."""


def _by_thread(requests: Iterator[Any], made: Callable[[Any], Any], ahead: int) -> Generator[Any]:
    """A thread makes `ahead` batches in advance. Requests are taken in the thread of the caller."""
    # Not an executor: a Future for each batch costs as much as a gather of small rows.
    asked: SimpleQueue[Any] = SimpleQueue()
    ready = _Ready(ahead)
    over = threading.Event()

    def fetch() -> None:
        while (request := asked.get()) is not _END and not over.is_set():
            try:
                ready.put((made(request), None), asked.empty)
            except BaseException as error:
                ready.put((None, error), asked.empty)

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


class _Ready:
    """What one thread has made and another takes. While batches are made fast, the one that waits is woken for `together` of
    them: a switch to another thread takes longer than a gather of small rows."""

    def __init__(self, together: int) -> None:
        self._together = together
        self._made: deque[tuple[Any, BaseException | None]] = deque()
        self._wanted, self._wake = 0, SimpleQueue[None]()
        self._last_s, self._are_fast = 0.0, False

    def put(self, made: tuple[Any, BaseException | None], is_last: Callable[[], bool]) -> None:
        """`is_last`: whether nothing more was asked for."""
        self._made.append(made)
        before_s, self._last_s = self._last_s, time.perf_counter()
        self._are_fast = self._last_s - before_s < _SOON_S
        if self._wanted and (len(self._made) >= self._wanted or not self._are_fast or is_last()):
            self._wanted = 0
            self._wake.put(None)

    def get(self) -> tuple[Any, BaseException | None]:
        while not self._made:
            self._wanted = self._together if self._are_fast else 1
            if self._made:  # it came just now, and did not see that somebody waits
                break
            try:
                self._wake.get(timeout=_SOON_S if self._are_fast else None)
            except queue.Empty:
                self._are_fast = False
        return self._made.popleft()


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
        self._ahead = workers.num_workers * (workers.prefetch_factor or _AHEAD)
        self._stay = workers.persistent
        self._pins = pin if workers.pin_memory is None else workers.pin_memory
        self._groups = _Groups(most=1 if workers.timeout else _GROUP)  # the timeout is for one batch
        self._taking = threading.Lock()
        work: Any = _Work(fetcher, workers.worker_init_fn)
        self._context = WorkerContext(multiprocessing.get_context(), work, _failure)
        nothing: list[list[int]] = []
        loader: DataLoader[Any] = DataLoader(
            _Nothing(),
            batch_sampler=nothing,
            num_workers=workers.num_workers,
            worker_init_fn=work.begin,
            multiprocessing_context=self._context,
            # A separate generator: drawing the workers' seed must not change the stream from which dropout draws.
            generator=torch.Generator().manual_seed(seed),
        )
        with _on_cpu():
            self._watch: Any = iter(loader)
            """torch's iterator: it raises an error if a worker dies, and ends them all when it is freed."""
        self._context.started()

    def fetched(self, requests: Iterator[Any]) -> Iterator[Any]:
        for link in self._context.links:
            while link.outstanding:  # of an earlier loop that was not finished
                self._answer(link)
        asked = self._asked(requests)
        answers: Generator[Any]
        if self._pins and torch.accelerator.is_available():
            answers = _by_thread(asked, _InPinnedMemory(self._answer), self._ahead)
        else:
            answers = _one_by_one(asked, self._answer, self._ahead)
        try:
            for answer in answers:
                batches = deque(self._groups.answered(answer, self._context.ring.last_bytes))
                del answer
                while batches:
                    if isinstance(batches[0], _FetchFailure):
                        raise unpack_error(batches[0].packed, "in a loader worker", DataError)
                    yield batches.popleft()
        finally:
            if not self._stay:
                self.end()  # so that a thread which pins memory need not wait for the batches under way
            answers.close()

    def _asked(self, requests: Iterator[Any]) -> Iterator[WorkerLink]:
        """Gives the requests to the workers in turn, several at once if they are small. Yields who got them."""
        self._groups.requests = requests
        links = itertools.cycle(self._context.links)
        for group in self._groups:
            link = next(links)
            link.ask(group)
            yield link

    def _answer(self, link: WorkerLink) -> Any:
        with self._taking:
            for other in self._context.links:
                if other.late and other is not link:
                    other.send_late()
            try:
                return link.take(self._timeout_s)
            except TimeoutError:
                raise DataError(
                    f"no batch came from the loader workers for {self._timeout_s:g} s (timeout={self._timeout_s:g}): a worker "
                    "hangs or is slow; py-spy dump --pid PID shows where; timeout=SECONDS sets the limit (0: none)"
                ) from None

    @property
    def are_alive(self) -> bool:
        return self._context.is_alive

    def end(self) -> None:
        """Waits for the processes."""
        self._watch = None


def _one_by_one(requests: Iterator[Any], made: Callable[[Any], Any], ahead: int) -> Generator[Any]:
    """What `made` returns for each request, which is taken from `requests` when `ahead` others are under way."""
    under_way = deque(itertools.islice(requests, ahead))
    while under_way:
        ready = [made(under_way.popleft())]
        under_way.extend(itertools.islice(requests, 1))
        yield ready.pop()  # held by the caller alone


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


class _Nothing(Dataset[Any]):
    """What torch's DataLoader reads."""


class _FetchFailure(NamedTuple):
    packed: Packed


def _failure(error: Exception) -> _FetchFailure:
    return _FetchFailure(pack_error(error))


class _Work:
    """What a worker does. The user's function finds the user's dataset in `get_worker_info()`."""

    def __init__(self, fetcher: Fetcher, first: Callable[[int], None] | None) -> None:
        self._fetcher, self._first = fetcher, first
        self._failure: _FetchFailure | None = None

    def begin(self, worker: int) -> None:
        """What a worker calls first."""
        dataset = getattr(self._fetcher, "dataset", None)
        if dataset is not None:
            private_names.set_dataset_of_worker(dataset)
        if self._first is not None:
            try:
                self._first(worker)
            except Exception as error:
                self._failure = _failure(error)

    def __call__(self, requests: Sequence[Any], empty: Empty) -> tuple[list[Any], float]:
        """Calls the fetcher for each request. Returns (what it returned, how many seconds it took in all). An exception is
        returned too; it ends the group."""
        if self._failure is not None:
            return [self._failure], 0.0
        began = time.perf_counter()
        made: list[Any] = []
        for request in requests:
            try:
                made.append(self._fetcher(request, empty))
            except Exception as error:
                made.append(_failure(error))
                break
        return made, time.perf_counter() - began
