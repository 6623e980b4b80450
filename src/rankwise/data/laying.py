"""A message whose tensors and arrays are in a buffer. The rest of the message is a pickle, which says where they are.

    laying = Laying(buffer)
    body = laying.pickled((3, {"x": torch.ones(4)}))    # about 100 bytes; 16 of the buffer
    number, batch = loads(body, buffer)                 # batch["x"] is memory of the buffer

The result is the same as from torch's own queue: the same types and strides, and the same tensors share memory.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGN = 64
_SMALL = 1 << 10  # bytes: a smaller array goes into the pickle
_KINDS = "biufcMmSU"  # NumPy's types that `dtype.str` describes completely
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}


class CannotLieThereError(Exception):
    """The message has a tensor that is not plain memory of the CPU, or the buffer is too small: then a buffer of `needed` bytes
    may be large enough."""

    def __init__(self, needed: int = 0) -> None:
        super().__init__(needed)
        self.needed = needed


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, as they are in memory: torch's pickles lose that a tensor is conjugate or negative."""
    if not tensor.is_complex() and not tensor.is_neg():
        return tensor
    return tensor.resolve_conj().resolve_neg()


class Laying(ForkingPickler):
    """Writes one message into a buffer."""

    def __init__(self, buffer: Any) -> None:
        self._pickle = io.BytesIO()
        super().__init__(self._pickle)
        self._buffer, self._size = buffer, len(buffer)
        self.end = 0
        """The number of bytes of the buffer that are used."""
        self._seen: dict[int, tuple[Any, Any]] = {}  # by id; the object is kept, so that no other object gets its id
        self._laid: dict[int, list[tuple[int, int, int]]] = {}  # by its storage: start, end, place in the buffer

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Like np.empty, in the buffer if there is room. A tensor of this memory is not copied when the message is written."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if dtype.hasobject or not size or self._next_place() + size > self._size:
            return np.empty(shape, dtype)
        place = self._take(size)
        array = np.frombuffer(self._buffer, dtype, count, place).reshape(shape)
        begin = array.__array_interface__["data"][0]
        self._laid[begin] = [(begin, begin + size, place)]
        return array

    def pickled(self, message: Any) -> bytes:
        """The pickle. Call this once. Raises CannotLieThereError, and what pickle raises."""
        self.dump(message)
        return self._pickle.getvalue()

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        lay: Callable[[Any], tuple[Any, ...]]
        if kind is torch.Tensor:
            lay = self._tensor
        elif kind is np.ndarray and value.nbytes >= _SMALL and value.flags.c_contiguous and value.dtype.kind in _KINDS:
            lay = self._array
        else:
            return None
        if id(value) not in self._seen:
            self._seen[id(value)] = value, (len(self._seen), *lay(value))
        return self._seen[id(value)][1]

    def _tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        tensor = self._resolved(tensor)
        number = _NUMBER.get(tensor.dtype)
        is_plain = tensor.is_cpu and tensor.layout is torch.strided and not (tensor.is_nested or tensor.requires_grad)
        if number is None or not is_plain or any(getattr(tensor, "names", ())):
            raise CannotLieThereError
        shape, stride = tuple(tensor.shape), tensor.stride()
        if not tensor.numel():
            return number, shape, stride, 0, 0
        spanned = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        size = spanned * tensor.itemsize
        return number, shape, stride, size, self._place(tensor, size)

    def _resolved(self, tensor: torch.Tensor) -> torch.Tensor:
        found = resolved(tensor)
        if found is not tensor:
            self._seen[id(found)] = found, None  # no other tensor may get its memory before the message is written
        return found

    def _place(self, tensor: torch.Tensor, size: int) -> int:
        """The place of the tensor's bytes in the buffer, from its first element to its last."""
        storage, low = tensor.untyped_storage(), tensor.data_ptr()
        begin, high = storage.data_ptr(), low + size
        laid = self._laid.setdefault(begin, [])
        for other_low, other_high, place in laid:
            if other_low <= low and high <= other_high:
                return place + low - other_low
            if other_low < high and low < other_high:
                raise CannotLieThereError
        most = 2 * tensor.nbytes  # if it is a small part of a large storage, only its own bytes are copied
        offset = low - begin
        if storage.nbytes() <= most:
            high = begin + storage.nbytes()
        elif size <= most:
            begin, offset, storage = low, 0, storage[offset : offset + size]
        else:
            raise CannotLieThereError
        place = self._take(high - begin)
        target = torch.frombuffer(self._buffer, dtype=torch.uint8, count=high - begin, offset=place)
        target.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
        laid.append((begin, high, place))
        return place + offset

    def _array(self, array: npt.NDArray[Any]) -> tuple[Any, ...]:
        place = self._take(array.nbytes)
        np.frombuffer(self._buffer, array.dtype, array.size, place).reshape(array.shape)[...] = array
        return array.dtype.str, array.shape, None, array.size, place

    def _next_place(self) -> int:
        return -(-self.end // _ALIGN) * _ALIGN

    def _take(self, size: int) -> int:
        place = self._next_place()
        if place + size > self._size:
            raise CannotLieThereError(max(place + size, 2 * self._size))
        self.end = place + size
        return place


def loads(body: bytes, buffer: Any, copy: bool = False) -> Any:
    """The message. Its tensors and arrays are memory of the buffer, and keep it alive; with `copy` they are copies."""
    return _Laid(body, buffer, copy).load()


class _Laid(pickle.Unpickler):
    def __init__(self, body: bytes, buffer: Any, copy: bool) -> None:
        super().__init__(io.BytesIO(body))
        self._buffer, self._copy = buffer, copy
        self._made: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        number, kind, shape, stride, size, place = pid
        if number not in self._made:
            if isinstance(kind, str):
                array = np.frombuffer(self._buffer, kind, size, place).reshape(shape)
                self._made[number] = array.copy() if self._copy else array
            else:
                tensor = torch.empty(0, dtype=_DTYPES[kind], device="cpu")
                memory = torch.frombuffer(self._buffer, dtype=torch.uint8, count=size, offset=place) if size else tensor
                tensor.set_(memory.untyped_storage(), 0, shape, stride)
                self._made[number] = tensor.clone() if self._copy else tensor
        return self._made[number]
