"""Batches of loader workers, in memory that the workers and the training process share and reuse.

    context = RingContext(multiprocessing.get_context(), failed=lambda error: error)
    DataLoader(dataset, num_workers=2, multiprocessing_context=context)

torch creates a file of shared memory for each tensor of each batch. Here a batch is in a slot of a single file without a name,
which the kernel removes when the last process exits. The training process sends a slot with each request, and reuses it when no
tensor or array of its batch is left. The message itself has about 100 bytes.
"""

from __future__ import annotations

import mmap
import os
import queue
import resource
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.context import BaseContext
from multiprocessing.reduction import DupFd, ForkingPickler
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import reduce_tensor

from rankwise.data.laying import CannotLieThereError, Laying, loads, resolved

_FIRST = 1 << (24 if resource.getrlimit(resource.RLIMIT_AS)[0] >= 0 else 28)
"""Bytes of a slot before the first batch. Pages that nobody writes cost nothing, but address space may be limited (`ulimit -v`,
SGE's h_vmem). A batch that does not fit goes through /dev/shm, where a container has only 64 MB."""

_SPARE = 1.25  # room to grow, for batches of uneven length
_KEPT = 4  # free slots to keep in addition to those requested ahead
_LOOKED_AT = 16  # slots to search for a free one, at most: a script that keeps all batches would make the search long
_MAPPED = 64  # slots that a worker keeps mapped, at most
_MESSAGE = 1 << 15  # bytes: a longer message is sent the way torch's own queue sends it
_WAIT_S = 0.1

_HEADER = struct.Struct("qqq")  # a slot's offset in the file; in a request its size; in an answer the bytes that a batch needs
_NO_SLOT = -1


class RingContext(BaseContext):
    """A context of multiprocessing whose queues transfer batches in slots, for one iterator of a DataLoader.

    `failed`: if the batch cannot be pickled, turns the exception into what the queue returns.
    """

    def __init__(self, actual: BaseContext, failed: Callable[[Exception], Any]) -> None:
        self._actual: Any = actual
        self.ring = Ring(failed)
        self._processes: list[Any] = []

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802 - multiprocessing's name, as the next two
        return _Queue(self.ring)

    def Event(self) -> Any:  # noqa: N802
        self.ring.over = _Flag()
        return self.ring.over

    def Process(self, *args: Any, **settings: Any) -> Any:  # noqa: N802
        self._processes.append(self._actual.Process(*args, **settings))
        return self._processes[-1]

    @property
    def is_alive(self) -> bool:
        """Whether no worker has ended."""
        return all(process.is_alive() for process in self._processes)


class _File:
    """A file in memory without a name, which may be sent to a process that is started."""

    fd = -1

    def __init__(self, name: str) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)

    def __getstate__(self) -> Any:
        return DupFd(self.fd)

    def __setstate__(self, state: Any) -> None:
        self.fd = state.detach()

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class _Flag:
    """Replaces multiprocessing's Event, which is read under a lock: a worker that is killed while it reads (out of memory, for
    example) would keep the lock, and the training process would wait for it for ever."""

    def __init__(self) -> None:
        file = _File("rankwise-flag")
        os.pwrite(file.fd, b"\0", 0)
        self.__setstate__(file)

    def __getstate__(self) -> _File:
        return self._file

    def __setstate__(self, file: _File) -> None:
        self._file, self._memory = file, mmap.mmap(file.fd, 1)

    def set(self) -> None:
        self._memory[0] = 1

    def is_set(self) -> bool:
        return self._memory[0] != 0


class _Slot:
    def __init__(self, fd: int, offset: int, size: int) -> None:
        self.offset, self.size = offset, size
        self.memory = mmap.mmap(fd, size, offset=offset)


class Ring:
    """In the training process: all slots, and which are free. In a worker: the slot of its request."""

    def __init__(self, failed: Callable[[Exception], Any]) -> None:
        self.__setstate__((_File("rankwise-batches"), os.getpid(), None, failed))

    def __setstate__(self, state: tuple[_File, int, Any, Callable[[Exception], Any]]) -> None:
        self._file, self._owner, over, self.failed = state
        self.over = over
        """An event that is set when the workers must exit."""
        self.late: list[_Queue] = []
        """The queues that once had more to send than fits into a worker's socket."""
        self._end = self._largest = 0
        self.last_bytes = 0
        """The bytes of the last message that came back in its slot."""
        self._asked: dict[int, _Slot] = {}
        self._given: deque[_Slot] = deque()
        self._mapped: dict[int, _Slot] = {}
        self._laying: Laying | None = None
        self._offset = _NO_SLOT

    def __getstate__(self) -> tuple[_File, int, Any, Callable[[Exception], Any]]:
        return self._file, self._owner, self.over, self.failed

    @property
    def is_mine(self) -> bool:
        """Whether this is the training process."""
        return os.getpid() == self._owner

    def check_owner(self) -> None:
        """In a worker: exit if the training process is gone. torch's own check compares the parent with the one at the start
        of the worker's loop, so it never notices a parent that was killed before that."""
        if not self.is_mine:
            try:
                os.kill(self._owner, 0)
            except ProcessLookupError:
                raise SystemExit(1) from None
            except PermissionError:  # it is there, as another user
                pass

    # --- in the training process

    def request(self, message: Any) -> bytes:
        """A frame for a worker, with a slot for its batch; without a slot if there is no memory."""
        slot = self._free() if message is not None else None
        if slot is None:
            return _HEADER.pack(_NO_SLOT, 0, 0) + _plain(message)
        try:
            body = Laying(slot.memory).pickled(message)
        except CannotLieThereError:
            body = _plain(message)
        return _HEADER.pack(slot.offset, slot.size, 0) + (body if len(body) <= _MESSAGE else _plain(message))

    def _free(self) -> _Slot | None:
        size = _pages(int(self._largest * _SPARE)) if self._largest else _FIRST
        found = None
        for _ in range(min(len(self._given), _LOOKED_AT)):
            slot = self._given.popleft()
            is_held, fits = _holders(slot) > _ALONE, slot.size >= size
            if fits and not is_held and found is None:
                found = slot
            elif is_held or (fits and len(self._given) < len(self._asked) + _KEPT):
                self._given.append(slot)
            else:
                slot.memory.madvise(mmap.MADV_REMOVE)  # returns its pages to the system
        if found is not None:
            return self._asked.setdefault(found.offset, found)
        try:
            os.ftruncate(self._file.fd, self._end + size)
            slot = _Slot(self._file.fd, self._end, size)
        except (OSError, ValueError):
            return None
        self._end += size
        return self._asked.setdefault(slot.offset, slot)

    def answered(self, frame: bytes) -> Any:
        """The message in a worker's frame."""
        offset, _, needed = _HEADER.unpack_from(frame)
        slot = self._asked.pop(offset, None)
        self._largest, self.last_bytes = max(self._largest, needed), needed
        message = _loaded(frame, slot)
        if slot is not None:
            self._given.append(slot)
        return message

    # --- in a worker

    def asked(self, frame: bytes) -> Any:
        """The message of a request. The next answer uses the slot of this request."""
        self._offset, size, _ = _HEADER.unpack_from(frame)
        if self._offset == _NO_SLOT:
            self._laying = None
            return _loaded(frame, None)
        if self._offset not in self._mapped:
            if len(self._mapped) == _MAPPED:
                self._mapped.clear()
            self._mapped[self._offset] = _Slot(self._file.fd, self._offset, size)
        slot = self._mapped[self._offset]
        message = _loaded(frame, slot, copy=True)
        self._laying = Laying(slot.memory)
        return message

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Like np.empty: memory for the requested batch. Do not use it for anything that must live longer."""
        return np.empty(shape, dtype) if self._laying is None else self._laying.empty(shape, dtype)

    def answer(self, message: Any) -> bytes:
        """A frame for the training process. The message is in the slot if possible."""
        laying, self._laying = self._laying, None
        try:
            return self._answer(message, laying)
        except Exception as error:
            return self._answer((message[0], self.failed(error)), None)

    def _answer(self, message: Any, laying: Laying | None) -> bytes:
        needed = 0
        try:
            body = laying.pickled(message) if laying is not None else b""
            if laying is not None and len(body) <= _MESSAGE:
                return _HEADER.pack(self._offset, 0, laying.end) + body
        except CannotLieThereError as error:
            needed = error.needed
        return _HEADER.pack(self._offset, 0, needed) + _plain(message)


class _Queue:
    """Replaces a queue of multiprocessing in DataLoader: from the training process to one worker, or from all workers to it."""

    _ends: tuple[socket.socket, ...] = ()

    def __init__(self, ring: Ring) -> None:
        # Each frame is written and read in one piece, so there is no lock that a killed process could hold.
        self._begin(ring, *socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))

    def _begin(self, ring: Ring, reader: socket.socket, writer: socket.socket) -> None:
        self._ring, self._reader, self._writer = ring, reader, writer
        self._ends = reader, writer
        self._late: deque[bytes] = deque()
        self._lock = threading.Lock()

    def __getstate__(self) -> tuple[Any, ...]:
        return self._ring, self._reader, self._writer

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._begin(*state)

    def put(self, message: Any) -> None:
        if not self._ring.is_mine:
            self._send(self._ring.answer(message))
            return
        frame = self._ring.request(message)
        if message is None and self._ring.over.is_set():
            with self._lock:
                self._late.clear()  # nobody takes these batches
            self._send(frame)
            return
        self._late.append(frame)
        self.send_late()
        if self._late and self not in self._ring.late:
            self._ring.late.append(self)

    def send_late(self) -> None:
        """Send as much as there is room for. The training process never waits for a worker, because this worker may wait for
        it."""
        with self._lock:  # a thread that pins memory also sends
            while self._late:
                try:
                    self._writer.send(self._late[0], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                self._late.popleft()

    def _send(self, frame: bytes) -> None:
        self._writer.settimeout(_WAIT_S)
        while True:
            try:
                self._writer.send(frame)
                return
            except TimeoutError:
                if self._ring.over.is_set():
                    return

    def get(self, timeout: float | None = None) -> Any:
        for other in self._ring.late:
            other.send_late()
        if self._reader.gettimeout() != timeout:
            self._reader.settimeout(timeout)
        try:
            frame = self._reader.recv(_HEADER.size + _MESSAGE)
        except TimeoutError:
            self._ring.check_owner()
            raise queue.Empty from None
        return self._ring.answered(frame) if self._ring.is_mine else self._ring.asked(frame)

    def cancel_join_thread(self) -> None:
        """Nothing to do: there is no thread."""

    def close(self) -> None:
        for end in self._ends:
            end.close()

    __del__ = close


def _holders(slot: Any) -> int:
    return sys.getrefcount(slot.memory)


_ALONE = _holders(SimpleNamespace(memory=mmap.mmap(-1, mmap.PAGESIZE)))
"""The count for memory that only its slot holds. It depends on the interpreter."""


def _pages(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class _Long:
    """A pickle in a tensor, which torch sends as a file of shared memory."""

    def __init__(self, body: bytes) -> None:
        self.tensor = torch.frombuffer(bytearray(body), dtype=torch.uint8)


def _plain(message: Any) -> bytes:
    """The frame that torch's own queue would send."""
    body = bytes(_Pickler.dumps(message))
    return body if len(body) <= _MESSAGE else bytes(_Pickler.dumps(_Long(body)))


class _Pickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and (found := resolved(value)) is not value:
            return reduce_tensor(found)  # type: ignore[no-untyped-call]
        return NotImplemented


def _loaded(frame: bytes, slot: _Slot | None, copy: bool = False) -> Any:
    message = loads(frame[_HEADER.size :], slot.memory if slot is not None else None, copy)
    return loads(message.tensor.numpy().tobytes(), None) if type(message) is _Long else message
