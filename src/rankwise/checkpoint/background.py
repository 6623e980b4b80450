"""Saving in the background: training waits only for a copy of the state; a thread then writes the copy.

    snapshot = Snapshot()
    copy = snapshot.take({"model": model.state_dict()})   # the same nested state; tensors that share memory still share it
    background = Background()
    background.start(write)                               # `write` calls snapshot.wait() first, for copies from GPUs
    background.wait()                                     # raises what `write` raised

The thread must not call collectives: if two threads of a rank do, each may get the other's result. New memory would cost seven
times as much as the copying itself (page faults), so the buffers of the last copy are reused.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device})
"""Types whose values never change, and that a checkpoint can hold."""

_ALIGNED = 64  # bytes
_MOST = 1 << 26  # bytes of an allocation for several buffers


# --- the thread


class Background:
    """Runs at most one function at a time, and keeps its exception until it is reported."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Wait for the previous work. If it has raised, raise its exception here, and do not start the new work."""
        self.wait()
        # Not a daemon: the program waits for the work before it exits.
        self._thread = threading.Thread(target=self._run, args=(work,), name="rankwise-checkpoint")
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is shutting down, or no more threads are allowed
            self._thread = None
            work()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    @property
    def is_at_work(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What the work has raised so far. Does not wait for it."""
        return self._error

    def join(self) -> None:
        """Wait for the work, and keep its exception for `wait`."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait for the work, and raise its exception, once."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


# --- the copy


class Snapshot:
    """Holds one copy at a time: the next `take` overwrites it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self._events: list[torch.cuda.Event] = []

    def take(self, states: dict[str, Any]) -> dict[str, Any]:
        """The same nested state, without anything that training may change."""
        copying = _Copying(self._buffers)
        taken = {name: copying.of(state) for name, state in states.items()}
        self._buffers = copying.used
        self._events = copying.run()
        return taken

    def wait(self) -> None:
        """Wait for the copies from GPUs. Training does not need this, because its stream keeps the order."""
        for event in self._events:
            event.synchronize()


class _Copying:
    """One walk through a nested state."""

    def __init__(self, free: dict[tuple[int, bool], list[torch.Tensor]]) -> None:
        self._free = free
        self.used: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self._storages: dict[tuple[str, int, int], torch.UntypedStorage] = {}
        self._pairs: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._memo: dict[int, Any] = {}
        self._pinned = Pinned()

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is dict:
            return {self.of(key): self.of(item) for key, item in value.items()}
        if kind is OrderedDict:
            changed = OrderedDict((self.of(key), self.of(item)) for key, item in value.items())
            vars(changed).update(copy.deepcopy(vars(value), self._memo))  # a module's versions
            return changed
        if kind is list or kind is tuple:
            return kind(self.of(item) for item in value)
        if isinstance(value, np.generic):
            return value.item()
        return copy.deepcopy(value, self._memo)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = type(tensor)
        plain = kind is torch.Tensor or kind is nn.Parameter
        if not plain or tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda") or _is_lazy(tensor):
            return copy.deepcopy(tensor.detach(), self._memo)
        storage = self._storage(tensor.untyped_storage(), tensor.device)
        taken = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        if kind is nn.Parameter:
            return nn.Parameter(taken, tensor.requires_grad)
        return taken.requires_grad_() if tensor.requires_grad else taken

    def _storage(self, storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        """The storage for the copy, which `run` fills."""
        # Of two tensors from one numpy array, each has a storage as long as itself, and both may begin at one address.
        key = (str(device), storage.data_ptr(), storage.nbytes())
        if key not in self._storages or not storage.nbytes():
            size = (storage.nbytes(), device.type == "cuda")
            unit = _unit(size[0])
            free = self._free.get(size)
            buffer = free.pop() if free else (self._pinned if size[1] else _unpinned)(size[0], unit)
            self.used.setdefault(size, []).append(buffer)
            self._storages[key] = buffer.untyped_storage()
            to, source = self._pairs.setdefault(device, ([], []))
            to.append(buffer)
            source.append(torch.empty(0, dtype=unit, device=device).set_(storage))
        return self._storages[key]

    def run(self) -> list[torch.cuda.Event]:
        """Do the copying. Copies from GPUs are complete when the returned events are."""
        events = []
        for device, (to, source) in self._pairs.items():
            if device.type == "cuda":
                with torch.cuda.device(device):
                    _copy(to, source, non_blocking=True)
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record()
                    events.append(event)
            else:
                _copy(to, source)
        return events


def _copy(to: list[torch.Tensor], source: list[torch.Tensor], non_blocking: bool = False) -> None:
    for one, other in zip(to, source, strict=True):
        one.copy_(other, non_blocking)


def _unit(size: int) -> torch.dtype:
    """The type for copying `size` bytes: torch copies single bytes a fifth more slowly than words."""
    return torch.int64 if size % 8 == 0 else torch.int32 if size % 4 == 0 else torch.uint8


class Pinned:
    """Buffers in pinned memory, several in each allocation: torch rounds an allocation up to a power of two, which for the
    tensors of a transformer is more than half of their size."""

    def __init__(self, pin: bool = True) -> None:
        self._pin = pin
        self._least = 1 << 16
        self._rooms: list[np.ndarray[Any, Any]] = []
        """What is left of each allocation."""

    def __call__(self, size: int, unit: torch.dtype) -> torch.Tensor:
        """A tensor with a storage of `size` bytes. Not pinned if no more memory may be locked: then training waits for the
        device."""
        if not size:
            return _unpinned(size, unit)
        number = next((number for number, room in enumerate(self._rooms) if len(room) >= size), None)
        try:
            room = self._rooms.pop(number) if number is not None else self._allocation(size)
        except RuntimeError:
            return _unpinned(size, unit)
        if len(rest := room[-(-size // _ALIGNED) * _ALIGNED :]):
            self._rooms.append(rest)
        return torch.frombuffer(room[:size], dtype=unit)

    def _allocation(self, size: int) -> np.ndarray[Any, Any]:
        whole = max(self._least, 1 << (size - 1).bit_length())
        self._least = min(2 * self._least, _MOST)
        return torch.empty(whole, dtype=torch.uint8, device="cpu", pin_memory=self._pin).numpy()


def _unpinned(size: int, unit: torch.dtype) -> torch.Tensor:
    return torch.empty(size // unit.itemsize, dtype=unit, device="cpu")


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the elements of the tensor differ from the bytes in memory."""
    return tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
