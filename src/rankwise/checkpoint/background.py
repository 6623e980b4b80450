"""A save behind the loop: a copy of the state as it is now, which the loop waits for, and the thread that then writes it.

    snapshot = Snapshot()
    copy = snapshot.take({"model": model.state_dict()})   # the same nest; tensors that share memory share it again
    background = Background()
    background.start(write)                               # `write` calls snapshot.wait() first: the devices have delivered
    background.wait()                                     # raises what `write` raised

The work of the thread must not communicate: of two threads of a rank that call collectives, each may get the other's answer.
Fresh memory would cost seven times the copying itself (page faults), so the buffers of the last copy are taken again.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from rankwise.errors import CheckpointError

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device})


# --- the thread


class Background:
    """Holds at most one piece of work, and its exception until somebody was told."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """The one before is waited for; what it raised is raised here, and the work not begun."""
        self.wait()
        # No daemon: at the end of the program what was begun is finished.
        self._thread = threading.Thread(target=self._run, args=(work,), name="rankwise-checkpoint")
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending, or there may be no more threads
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
        """What the work raised, as far as it has come; not waited for."""
        return self._error

    def join(self) -> None:
        """Wait, and keep what it raised for `wait`."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait, and raise what it raised, once."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


# --- the copy


class Snapshot:
    """One copy at a time: the next `take` writes over the last."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self._events: list[torch.cuda.Event] = []

    def take(self, states: dict[str, Any]) -> dict[str, Any]:
        """The same nest, free of all that the loop may change. Raises CheckpointError for a numpy array, by its path."""
        copying = _Copying(self._buffers)
        taken = {name: copying.of(state, name) for name, state in states.items()}
        self._buffers = copying.used
        self._events = copying.run()
        return taken

    def wait(self) -> None:
        """Until what comes from a GPU has arrived. The loop's own stream keeps the order: it need not wait."""
        for event in self._events:
            event.synchronize()


class _Copying:
    """One walk through a nest."""

    def __init__(self, free: dict[tuple[int, bool], list[torch.Tensor]]) -> None:
        self._free = free
        self.used: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self._storages: dict[tuple[str, int], torch.UntypedStorage] = {}
        self._pairs: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._memo: dict[int, Any] = {}

    def of(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is dict:
            return {key: self.of(item, f"{path}/{key}") for key, item in value.items()}
        if kind is OrderedDict:
            changed = OrderedDict((key, self.of(item, f"{path}/{key}")) for key, item in value.items())
            vars(changed).update(copy.deepcopy(vars(value), self._memo))  # a module's versions
            return changed
        if kind is list or kind is tuple:
            return kind(self.of(item, f"{path}/{index}") for index, item in enumerate(value))
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            raise CheckpointError(f"{path} is a numpy array, which could not be loaded again; keep it as a tensor")
        return copy.deepcopy(value, self._memo)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = type(tensor)
        plain = kind is torch.Tensor or kind is nn.Parameter
        if not plain or tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda") or _is_lazy(tensor):
            return copy.deepcopy(tensor.detach(), self._memo)
        storage = self._storage(tensor.untyped_storage(), tensor.device)
        taken = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if kind is nn.Parameter:
            return nn.Parameter(taken, tensor.requires_grad)
        return taken.requires_grad_() if tensor.requires_grad else taken

    def _storage(self, storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        """The one that stands for it, to be filled by `run`."""
        key = (str(device), storage.data_ptr())
        if key not in self._storages or not storage.nbytes():
            size = (storage.nbytes(), device.type == "cuda")
            unit = _unit(size[0])
            free = self._free.get(size)
            buffer = free.pop() if free else _buffer(size[0] // unit.itemsize, unit, size[1])
            self.used.setdefault(size, []).append(buffer)
            self._storages[key] = buffer.untyped_storage()
            to, source = self._pairs.setdefault(device, ([], []))
            to.append(buffer)
            source.append(torch.empty(0, dtype=unit, device=device).set_(storage))
        return self._storages[key]

    def run(self) -> list[torch.cuda.Event]:
        """Copy. What comes from a GPU has arrived when the events have."""
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
    """What so many bytes are copied as: torch copies single bytes a fifth more slowly than words."""
    return torch.int64 if size % 8 == 0 else torch.int32 if size % 4 == 0 else torch.uint8


def _buffer(units: int, unit: torch.dtype, pinned: bool) -> torch.Tensor:
    if pinned:
        with contextlib.suppress(RuntimeError):  # no more memory may be locked: the loop waits for the device then
            return torch.empty(units, dtype=unit, pin_memory=True)
    return torch.empty(units, dtype=unit)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Its elements are not quite those that lie in memory."""
    return tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
