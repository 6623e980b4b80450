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
import struct
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
_NUMPYS = [None if dtype is torch.bfloat16 else torch.empty(0, dtype=dtype, device="cpu").numpy().dtype for dtype in _DTYPES]


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


class Laying(pickle.Pickler):
    """Writes one message into a buffer, whose memory begins at `address`."""

    # torch registers there how it sends tensors. Not a ForkingPickler: that makes a new table for each message.
    dispatch_table = ForkingPickler(io.BytesIO()).dispatch_table

    def __init__(self, buffer: Any, address: int | None = None) -> None:
        self._pickle = io.BytesIO()
        super().__init__(self._pickle)
        self._buffer, self._size = buffer, len(buffer)
        self._address = address_of(buffer) if address is None else address
        self.end = 0
        """The number of bytes of the buffer that are used."""
        self._seen: dict[int, tuple[Any, Any]] = {}  # by id; the object is kept, so that no other object gets its id
        self._laid: dict[int, list[tuple[int, int, int]]] = {}  # by its storage: start, end, place in the buffer

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Like np.empty, in the buffer if there is room. A tensor of this memory is not copied when the message is written."""
        size = math.prod(shape) * dtype.itemsize
        place = self._next_place()
        if dtype.hasobject or not size or place + size > self._size:
            return np.empty(shape, dtype)
        self.end = place + size
        begin = self._address + place
        self._laid[begin] = [(begin, begin + size, place)]
        return np.ndarray(shape, dtype, self._buffer, place)

    def pickled(self, message: Any) -> bytes:
        """The pickle. Call this once. Raises CannotLieThereError, and what pickle raises."""
        self.dump(message)
        return self._pickle.getvalue()

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        is_tensor = kind is torch.Tensor
        if not is_tensor and not (
            kind is np.ndarray and value.nbytes >= _SMALL and value.flags.c_contiguous and value.dtype.kind in _KINDS
        ):
            return None
        if id(value) not in self._seen:
            number = len(self._seen)
            self._seen[id(value)] = value, self._tensor(number, value) if is_tensor else self._array(number, value)
        return self._seen[id(value)][1]

    def _tensor(self, number: int, tensor: torch.Tensor) -> bytes:
        tensor = self._resolved(tensor)
        kind = _NUMBER.get(tensor.dtype)
        is_plain = tensor.is_cpu and tensor.layout is torch.strided and not (tensor.is_nested or tensor.requires_grad)
        if kind is None or not is_plain or any(getattr(tensor, "names", ())):
            raise CannotLieThereError
        shape, stride, size, place = tensor.shape, tensor.stride(), 0, 0
        if tensor.is_contiguous():
            size = tensor.nbytes
        elif tensor.numel():
            size = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * tensor.itemsize
        if size:
            place = self._place(tensor, size)
        # Bytes, because the pickler would look at each number in a tuple.
        return struct.pack(f"{4 + 2 * len(shape)}q", number, kind, size, place, *shape, *stride)

    def _resolved(self, tensor: torch.Tensor) -> torch.Tensor:
        found = resolved(tensor)
        if found is not tensor:
            self._seen[id(found)] = found, None  # no other tensor may get its memory before the message is written
        return found

    def _place(self, tensor: torch.Tensor, size: int) -> int:
        """The place of the tensor's bytes in the buffer, from its first element to its last."""
        low = tensor.data_ptr()
        high = low + size
        if (known := self._laid.get(low)) and known[0][0] == low and high <= known[0][1]:
            return known[0][2]
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
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

    def _array(self, number: int, array: npt.NDArray[Any]) -> tuple[Any, ...]:
        place = self._take(array.nbytes)
        np.ndarray(array.shape, array.dtype, self._buffer, place)[...] = array
        return number, array.dtype.str, array.shape, place

    def _next_place(self) -> int:
        return -(-self.end // _ALIGN) * _ALIGN

    def _take(self, size: int) -> int:
        place = self._next_place()
        if place + size > self._size:
            raise CannotLieThereError(max(place + size, 2 * self._size))
        self.end = place + size
        return place


def address_of(buffer: Any) -> int:
    """Where the memory of a buffer begins."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]) if len(buffer) else 0


def loads(body: bytes, buffer: Any) -> Any:
    """The message. Its tensors and arrays are memory of the buffer, and keep it alive."""
    return _Laid(body, buffer).load()


class _Laid(pickle.Unpickler):
    def __init__(self, body: bytes, buffer: Any) -> None:
        super().__init__(io.BytesIO(body))
        self._buffer = buffer
        self._made: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is bytes:
            number, kind, size, place, *rest = struct.unpack(f"{len(pid) // 8}q", pid)
            if number not in self._made:
                half = len(rest) // 2
                self._made[number] = self._tensor(kind, size, place, rest[:half], rest[half:])
        else:
            number, name, shape, place = pid
            if number not in self._made:
                self._made[number] = np.ndarray(shape, name, self._buffer, place)
        return self._made[number]

    def _tensor(self, kind: int, size: int, place: int, shape: list[int], stride: list[int]) -> torch.Tensor:
        like = _NUMPYS[kind]
        if like is not None and size:
            array: npt.NDArray[Any] = np.ndarray(shape, like, self._buffer, place, [step * like.itemsize for step in stride])
            return torch.from_numpy(array)
        tensor = torch.empty(0, dtype=_DTYPES[kind], device="cpu")
        memory = torch.frombuffer(self._buffer, dtype=torch.uint8, count=size, offset=place) if size else tensor
        return tensor.set_(memory.untyped_storage(), 0, shape, stride)
