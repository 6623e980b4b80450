"""Memory of batches, reused when nobody holds it: the pages of a new array cost as much as the gather into it.

buffers = Buffers()
out = buffers.empty((32, 1500, 40), np.dtype("float32"))     # like np.empty; may be passed to torch.from_numpy
"""

from __future__ import annotations

import os
import sys
import threading
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_SMALL = 1 << 17  # bytes: malloc returns this without new pages
_KEPT = 4  # arrays: one batch in use, one in the making, and two that a device still copies
_SPARE = 1.25  # room to grow, for batches of uneven length


class Buffers:
    """An array is free when nothing else holds its memory, such as a tensor, a view or a slice of it. Threads may share this
    object. A forked process starts without arrays, because it would copy each page that it writes."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._held: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[type[Buffers], tuple[()]]:
        return Buffers, ()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        size = prod(shape) * dtype.itemsize
        if size < _SMALL or dtype.hasobject:  # objects need memory without old bytes
            return np.empty(shape, dtype)
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            return np.ndarray(shape, dtype, self._of(size))

    def _of(self, size: int) -> npt.NDArray[np.uint8]:
        free = [at for at, holders in enumerate(_holders(self._held)) if holders <= _ALONE]
        for at in free:
            if len(self._held[at]) >= size:
                return self._held[at]
        # Not np.empty: malloc puts large arrays 16 bytes behind the start of a page. Copies from the starts of pages to there,
        # from images of 12 kB in a map for example, take four times as long on AMD ("4K aliasing"). Torch aligns to 64 bytes.
        made = torch.empty(int(size * _SPARE), dtype=torch.uint8, device="cpu").numpy()
        if free:
            self._held[free[0]] = made
        elif len(self._held) < _KEPT:
            self._held.append(made)
        return made


def _holders(arrays: list[npt.NDArray[np.uint8]]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


_ALONE = _holders([np.empty(0, np.uint8)])[0]
"""The count of an array that only the list holds. It depends on the interpreter."""
