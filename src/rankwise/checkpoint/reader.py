"""Reads the file of a part directly into the memory of its tensors: each byte once, with its checksum while it is in the cache.

    state = read(path, record, optimizer)      # the same nested state as torch.load returns
    optimizer.load_state_dict(state)           # has nothing to copy

torch.load + load_state_dict are slow because of memory (new pages, a copy of everything) and because they read the pickle in
Python. Here, the file is read into tensors that the part already has, and a new optimizer gets large pages. What was loaded
does not depend on the file afterwards.
"""

from __future__ import annotations

import bisect
import io
import mmap
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.manifest import FileRecord, tensors
from rankwise.dist import comm, private_names
from rankwise.errors import DamagedError

_CHUNK = 1 << 20  # bytes: still in the cache for the checksum
_LARGE_PAGES_FROM = 8 << 20
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")  # of a zip entry; the last two are the lengths of its name and its extra field


def read(
    path: Path, record: FileRecord, part: object = None, verify: bool = True, own: Mapping[str, torch.Tensor] | None = None
) -> Any:
    """The state in a file, on the CPU. If load_state_dict of `part` does nothing but copy, its own tensors are used: `own`, by
    default `own_tensors(part)`.

    Raises DamagedError if a byte differs from what was written, FileNotFoundError, and what torch.load raises. After an error,
    the tensors of `part` may have any values.
    """
    with path.open("rb") as file:
        if text := manifests.length_damage(path, record):
            raise DamagedError(text)
        if record.rest:
            if verify and _rest_sum(file.fileno(), record) != record.rest:
                raise DamagedError(manifests.damage(path, record) or f"{path} is corrupted outside its tensors")
            try:
                state, found = _skeleton(file, record, part, own_tensors(part) if own is None else own)
            except Exception:  # of many types; torch.load knows more kinds of tensors, and refuses unknown ones
                pass
            else:
                if damaged := _fill(file.fileno(), found, record.tensors if verify else {}):
                    raise DamagedError(f"{path} is corrupted{manifests.where(damaged)}")
                return state
    if verify and (text := manifests.damage(path, record)):
        raise DamagedError(text)
    # A module copies what it gets. Another kind of part may keep it, and must not depend on a file that may be pruned.
    return load_mapped(path) if isinstance(part, nn.Module) else torch.load(path, map_location="cpu", weights_only=True)


def load_mapped(path: Path) -> Any:
    """The state in a file, with tensors in the mapped file. Raises what torch.load raises."""
    with path.open("rb") as file:  # mmap=True refuses a path that is not UTF-8
        return torch.load(f"/proc/self/fd/{file.fileno()}", map_location="cpu", weights_only=True, mmap=True)


def _rest_sum(fd: int, record: FileRecord) -> str:
    total = xxhash.xxh3_128()
    for begin, end in manifests.rest(record.layout, record.bytes):
        for at in range(begin, end, _CHUNK):
            total.update(os.pread(fd, min(_CHUNK, end - at), at))
    return total.hexdigest()


# --- the nested state, with tensors that are not yet read


@dataclass(frozen=True)
class _Storage:
    """A storage in the file, and the memory that it is read into."""

    offset: int
    memory: torch.Tensor
    """As bytes, one-dimensional."""

    tensors: tuple[tuple[str, int, int], ...]
    """(path, begin in the storage, bytes) of each tensor with a checksum."""


@dataclass(frozen=True)
class _Typed:
    """A storage and its type, like in the pickle of a tensor."""

    storage: _Storage
    dtype: torch.dtype


def _skeleton(file: BinaryIO, record: FileRecord, part: object, own: Mapping[str, torch.Tensor]) -> tuple[Any, list[_Storage]]:
    """Raises an exception if the file contains anything but plain tensors in plain collections."""
    with zipfile.ZipFile(file) as archive:
        folder = archive.namelist()[0].partition("/")[0]
        if _entry(archive, f"{folder}/byteorder", file.fileno()).decode() != sys.byteorder:
            raise pickle.UnpicklingError("of another byte order")
        pickled = _entry(archive, f"{folder}/data.pkl", file.fileno())
        placing = _Placing(storages(archive, file.fileno()), record, part, own)
    return _Unpickler(io.BytesIO(pickled), placing).load(), list(placing.found.values())


def _entry(archive: zipfile.ZipFile, name: str, fd: int) -> bytes:
    """Not `archive.read`: write_file leaves out the CRC-32 that it compares."""
    entry = archive.getinfo(name)
    return os.pread(fd, entry.file_size, _data_offset(fd, entry))


def storages(archive: zipfile.ZipFile, fd: int) -> dict[str, tuple[int, int]]:
    """(offset, bytes) of each storage in the file `fd`, by its key in the pickle. Raises ValueError if one is compressed."""
    found = {}
    for entry in archive.infolist():
        folder, _, key = entry.filename.rpartition("/")
        if folder.endswith("/data"):
            found[key] = _data_offset(fd, entry), entry.file_size
    return found


def _data_offset(fd: int, entry: zipfile.ZipInfo) -> int:
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename} is compressed")
    *_, name, extra = _LOCAL_HEADER.unpack(os.pread(fd, _LOCAL_HEADER.size, entry.header_offset))
    return entry.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)


class _Placing:
    """Decides into which memory each storage is read."""

    def __init__(
        self, places: Mapping[str, tuple[int, int]], record: FileRecord, part: object, own: Mapping[str, torch.Tensor]
    ) -> None:
        self._places = places
        self._layout = record.layout
        self._sorted = sorted((at.offset, at.bytes, name) for name, at in record.layout.items() if at.offset is not None)
        self._own = own
        large = isinstance(part, Optimizer) and record.bytes >= _LARGE_PAGES_FROM
        self._new: Callable[[int], torch.Tensor] = _LargePages(record.bytes).take if large else _new
        self.found: dict[str, _Storage] = {}

    def storage(self, key: str) -> _Storage:
        if key not in self.found:
            offset, size = self._places[key]
            here = self._sorted[
                bisect.bisect_left(self._sorted, (offset,)) : bisect.bisect_left(self._sorted, (offset + size,))
            ]
            within = tuple((name, begin - offset, length) for begin, length, name in here)
            memory = self._own_memory(within, size)
            self.found[key] = _Storage(offset, self._new(size) if memory is None else memory, within)
        return self.found[key]

    def _own_memory(self, within: Sequence[tuple[str, int, int]], size: int) -> torch.Tensor | None:
        """The memory of the part's own tensor, if this tensor is the whole storage."""
        if any((begin, length) != (0, size) for _, begin, length in within):
            return None
        for name, _, _ in within:
            own, at = self._own.get(name), self._layout[name]
            if own is not None and (str(own.dtype), tuple(own.shape)) == (f"torch.{at.dtype}", at.shape):
                return own.detach().reshape(-1).view(torch.uint8)
        return None


def _new(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


class _LargePages:
    """A single block of memory with large pages: a page fault costs more than copying a small page."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._map: mmap.mmap | None = None
        self._end = 0

    def take(self, size: int) -> torch.Tensor:
        begin, end = self._end, self._end + -(-size // 64) * 64  # torch aligns its memory in this way
        try:
            if self._map is None:
                self._map = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # out of memory, or the kernel has no large pages
            pass
        if self._map is None or end > self._size or not size:
            return _new(size)
        self._end = end
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=begin)


class _Unpickler(pickle.Unpickler):
    """Accepts only the names that plain tensors in plain collections need. `weights_only` does the same in Python, which takes
    ten times as long."""

    def __init__(self, file: io.BytesIO, placing: _Placing) -> None:
        super().__init__(file)
        self._placing = placing

    def find_class(self, module: str, name: str) -> Any:
        return _KNOWN[module, name]

    def persistent_load(self, saved: Any) -> _Typed:
        kind, dtype, key, _device, _length = saved
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError("not a plain storage")
        return _Typed(self._placing.storage(key), dtype)


def _tensor(
    typed: _Typed,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: object,
    metadata: object = None,
) -> torch.Tensor:
    """Replaces torch._utils._rebuild_tensor_v2."""
    memory, size = typed.storage.memory, typed.dtype.itemsize
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if metadata or memory.storage_offset() % size or (0 not in shape and (offset + last + 1) * size > memory.numel()):
        raise pickle.UnpicklingError("not a plain tensor")
    tensor = torch.empty(0, dtype=typed.dtype, device="cpu")
    tensor.set_(memory.untyped_storage(), memory.storage_offset() // size + offset, shape, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def _parameter(tensor: torch.Tensor, requires_grad: bool, hooks: object) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad)


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "DoubleStorage"): torch.float64, ("torch", "FloatStorage"): torch.float32,
    ("torch", "HalfStorage"): torch.float16, ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "LongStorage"): torch.int64, ("torch", "IntStorage"): torch.int32, ("torch", "ShortStorage"): torch.int16,
    ("torch", "CharStorage"): torch.int8, ("torch", "ByteStorage"): torch.uint8, ("torch", "BoolStorage"): torch.bool,
    ("torch", "ComplexFloatStorage"): torch.complex64, ("torch", "ComplexDoubleStorage"): torch.complex128,
}  # fmt: skip


# --- the tensors that a part already has


def own_tensors(part: object) -> dict[str, torch.Tensor]:
    """By their paths, the tensors into which the file may be read: load_state_dict would only copy into them, or replace
    them."""
    if isinstance(part, nn.Module):
        found = _own_of_module(part)
    elif isinstance(part, Optimizer):
        found = _own_of_optimizer(part)
    else:
        return {}
    plain: dict[tuple[int, int], tuple[str, torch.Tensor]] = {}
    for name, tensor in found.items():
        if _is_plain(tensor):  # of tied tensors only the first: load_state_dict copies the others over it, if they differ
            plain.setdefault((tensor.data_ptr(), tensor.nbytes), (name, tensor))
    once = dict(plain.values())
    return {name: once[name] for name in once.keys() - _overlapping(once)}


def _own_of_module(part: nn.Module) -> dict[str, torch.Tensor]:
    if not _is(part.load_state_dict, nn.Module.load_state_dict):
        return {}
    found: dict[str, torch.Tensor] = {}
    for prefix, module in part.named_modules(remove_duplicate=False):
        if private_names.only_copies(module):
            # Also buffers that are not saved: load_state_dict refuses a file that has one of their names.
            found |= nn.Module.named_parameters(module, prefix, recurse=False, remove_duplicate=False)
            found |= nn.Module.named_buffers(module, prefix, recurse=False, remove_duplicate=False)
    return found


def _own_of_optimizer(part: Optimizer) -> dict[str, torch.Tensor]:
    plain = _is(part.load_state_dict, Optimizer.load_state_dict) and _is(part.state_dict, Optimizer.state_dict)
    if not plain or private_names.has_hooks(part):
        return {}
    return dict(tensors({"state": part.state_dict()["state"]}))


def _is(method: Any, plain: Any) -> bool:
    return getattr(method, "__func__", None) is plain


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes in memory are those that a file has."""
    kind = type(tensor) is torch.Tensor or type(tensor) is nn.Parameter
    return (
        kind
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference())
    )


def _overlapping(found: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of tensors that share memory with another."""
    overlapping: set[str] = set()
    end, last = 0, ""
    for name in sorted(found, key=lambda name: found[name].data_ptr()):
        begin, size = found[name].data_ptr(), found[name].nbytes
        if begin < end:
            overlapping |= {name, last}
        if begin + size > end:
            end, last = begin + size, name
    return overlapping


# --- filling


def _fill(fd: int, found: Sequence[_Storage], sums: Mapping[str, str]) -> list[str]:
    """Read everything, and return the tensors whose checksum is not that in `sums`."""
    jobs = list(_jobs(found))
    threads = min(max(1, manifests.cores() // comm.local_world_size()), len(jobs))

    def work(job: Sequence[_Storage]) -> list[str]:
        return [name for storage in job for name in _fill_storage(fd, storage, sums)]

    if threads <= 1:
        return [name for job in jobs for name in work(job)]
    with ThreadPoolExecutor(threads, "rankwise-read") as pool:
        return [name for names in pool.map(work, jobs) for name in names]


def _jobs(found: Sequence[_Storage]) -> Iterator[list[_Storage]]:
    """Storages in the order of the file, small ones together: to give one to a thread takes longer than to read it."""
    job: list[_Storage] = []
    size = 0
    for storage in sorted(found, key=lambda storage: storage.offset):
        job.append(storage)
        size += storage.memory.numel()
        if size >= _CHUNK:
            yield job
            job, size = [], 0
    if job:
        yield job


def _fill_storage(fd: int, storage: _Storage, sums: Mapping[str, str]) -> list[str]:
    memory = storage.memory.numpy().data
    checked = [(name, begin, length) for name, begin, length in storage.tensors if name in sums]
    is_one = all((begin, length) == (0, len(memory)) for _, begin, length in checked)
    total = xxhash.xxh3_128()
    done = 0
    while done < len(memory):
        chunk = memory[done : done + _CHUNK]
        got = os.preadv(fd, [chunk], storage.offset + done)
        if not got:
            raise DamagedError(f"a file ends after {storage.offset + done} bytes, and was longer when it was opened")
        if checked and is_one:
            total.update(chunk[:got])
        done += got
    if is_one:
        return [name for name, _, _ in checked if total.hexdigest() != sums[name]]
    return [name for name, at, n in checked if xxhash.xxh3_128_hexdigest(memory[at : at + n]) != sums[name]]
