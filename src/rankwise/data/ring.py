"""Batches of loader workers, in memory that the workers and the training process share and reuse.

    ring = Ring(failed=lambda error: error)
    frame = ring.request((0, indices))                      # here
    frame = ring.answer(make(ring.asked(frame), ring.empty))  # in a worker
    batch = ring.answered(frame)                            # here

torch creates a file of shared memory for each tensor of each batch. Here a batch is in a slot of a single file without a name,
which the kernel removes when the last process exits. The training process sends a slot with each request, and reuses it when no
tensor or array of its batch is left. The message itself has about 100 bytes.
"""

from __future__ import annotations

import mmap
import os
import resource
import struct
import sys
from collections import deque
from collections.abc import Callable
from multiprocessing.reduction import DupFd, ForkingPickler
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import reduce_tensor

from rankwise.data.laying import CannotLieThereError, Laying, address_of, loads, resolved
from rankwise.data.requests import packed, unpacked

_FIRST = 1 << (24 if resource.getrlimit(resource.RLIMIT_AS)[0] >= 0 else 28)
"""Bytes of a slot before the first batch. Pages that nobody writes cost nothing, but address space may be limited (`ulimit -v`,
SGE's h_vmem). A batch that does not fit goes through /dev/shm, where a container has only 64 MB."""

_SPARE = 1.25  # room to grow, for batches of uneven length
_KEPT = 4  # free slots to keep in addition to those requested ahead
_LOOKED_AT = 16  # slots to search for a free one, at most: a script that keeps all batches would make the search long
_MAPPED = 64  # slots that a worker keeps mapped, at most
_MESSAGE = 1 << 15  # bytes: a longer answer is sent the way torch's own queue sends it

_HEADER = struct.Struct("qqq")
"""A slot's offset in the file. In a request: its size, and how many of its bytes are the message, or 0 if this is in the frame.
In an answer: 0, and the bytes that a batch needs."""
_ELSEWHERE = -1  # instead of a number of bytes: the message is in a shared file of torch's
_NO_SLOT = -1
LONGEST_FRAME = _HEADER.size + _MESSAGE


class File:
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


class _Slot:
    def __init__(self, fd: int, offset: int, size: int) -> None:
        self.offset, self.size = offset, size
        self.memory = mmap.mmap(fd, size, offset=offset)
        self.address = address_of(self.memory)


class Ring:
    """In the training process: all slots, and which are free. In a worker: the slot of its request."""

    def __init__(self, failed: Callable[[Exception], Any]) -> None:
        self.__setstate__((File("rankwise-batches"), os.getpid(), None, failed))

    def __setstate__(self, state: tuple[File, int, Any, Callable[[Exception], Any]]) -> None:
        self._file, self._owner, over, self.failed = state
        self.over = over
        """An event that is set when the workers must exit."""
        self._end = self._largest = 0
        self.last_bytes = 0
        """The bytes of the last message that came back in its slot."""
        self._asked: dict[int, _Slot] = {}
        self._given: deque[_Slot] = deque()
        self._mapped: dict[int, _Slot] = {}
        self._laying: Laying | None = None
        self._offset = _NO_SLOT

    def __getstate__(self) -> tuple[File, int, Any, Callable[[Exception], Any]]:
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
        body, slot = packed(message), self._free()
        offset, size = (slot.offset, slot.size) if slot is not None else (_NO_SLOT, 0)
        if len(body) <= _MESSAGE:
            return _HEADER.pack(offset, size, 0) + body
        if slot is None or len(body) > size:
            return _HEADER.pack(offset, size, _ELSEWHERE) + bytes(ForkingPickler.dumps(_Long(body)))
        slot.memory[: len(body)] = body
        return _HEADER.pack(offset, size, len(body))

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
        self._offset, size, length = _HEADER.unpack_from(frame)
        slot = self._slot(size) if self._offset != _NO_SLOT else None
        self._laying = Laying(slot.memory, slot.address) if slot is not None else None
        if slot is not None and length > 0:
            return unpacked(slot.memory[:length])
        return unpacked(ForkingPickler.loads(frame[_HEADER.size :]).body() if length == _ELSEWHERE else frame[_HEADER.size :])

    def _slot(self, size: int) -> _Slot:
        slot = self._mapped.get(self._offset)
        if slot is None:
            if len(self._mapped) == _MAPPED:
                self._mapped.clear()
            slot = self._mapped[self._offset] = _Slot(self._file.fd, self._offset, size)
        return slot

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Like np.empty: memory for the requested batch. Do not use it for anything that must live longer."""
        return np.empty(shape, dtype) if self._laying is None else self._laying.empty(shape, dtype)

    def answer(self, message: Any) -> bytes:
        """A frame for the training process. The message is in the slot if possible."""
        laying, self._laying = self._laying, None
        try:
            return self._answer(message, laying)
        except Exception as error:
            return self._answer(self.failed(error), None)

    def _answer(self, message: Any, laying: Laying | None) -> bytes:
        needed = 0
        try:
            body = laying.pickled(message) if laying is not None else b""
            if laying is not None and len(body) <= _MESSAGE:
                return _HEADER.pack(self._offset, 0, laying.end) + body
        except CannotLieThereError as error:
            needed = error.needed
        return _HEADER.pack(self._offset, 0, needed) + _plain(message)


def _holders(slot: Any) -> int:
    return sys.getrefcount(slot.memory)


_ALONE = _holders(SimpleNamespace(memory=mmap.mmap(-1, mmap.PAGESIZE)))
"""The count for memory that only its slot holds. It depends on the interpreter."""


def _pages(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class _Long:
    """A pickle in a tensor, which torch sends as a file of shared memory."""

    def __init__(self, body: bytes) -> None:
        self._tensor = torch.frombuffer(bytearray(body), dtype=torch.uint8)

    def body(self) -> bytes:
        return self._tensor.numpy().tobytes()


def _plain(message: Any) -> bytes:
    """The frame that torch's own queue would send."""
    body = bytes(_Pickler.dumps(message))
    return body if len(body) <= _MESSAGE else bytes(_Pickler.dumps(_Long(body)))


class _Pickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and (found := resolved(value)) is not value:
            return reduce_tensor(found)  # type: ignore[no-untyped-call]
        return NotImplemented


def _loaded(frame: bytes, slot: _Slot | None) -> Any:
    message = loads(frame[_HEADER.size :], slot.memory if slot is not None else None)
    return loads(message.body(), None) if type(message) is _Long else message
