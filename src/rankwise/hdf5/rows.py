"""Reads rows of one dataset in a file by their numbers: gathered from a memory map of the file, or from blocks that h5py reads.

    rows = open_rows(stored)
    rows.take(np.array([7, 3, 7]), out)           # three rows
    rows.copy([10, 40], [3, 5], out)              # rows 10 to 12 into out[0, :3], 40 to 44 into out[1, :5]

Nothing is opened before the first row is read, in the process that reads it. A handle of h5py is never used after a fork, and
an open file is never pickled.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rankwise.errors import DataError
from rankwise.hdf5.layout import Stored, explained, has_bytes_of_numpy, identity_of, nbytes, open_file, opened, stored
from rankwise.hdf5.read_ahead import Ranges
from rankwise.host import processes

Array = npt.NDArray[Any]

_BLOCK_BYTES = 1 << 20  # bytes to read at once if a dataset is neither mapped nor in chunks
_GZIP = 1  # the number of the filter in HDF5
_WIDE = 64  # bytes of a string of fixed size: from here on, unused bytes are not kept
_LARGE_BYTES = 1024  # of a row of a block: from this size on, one copy per row is faster than a gather per block
_KEPT_BYTES = 64 << 20  # bytes of blocks to keep, for each dataset and process


class Rows(Protocol):
    """The rows of one dataset, read into arrays with the machine's byte order (arrays of objects for strings)."""

    def take(self, indices: npt.NDArray[np.int64], out: Array) -> Array:
        """Write the rows with these numbers, which must be in the dataset, to all of `out`, and return `out`."""

    blocks: tuple[int, int] | None
    """(rows that are read together, how many such blocks are kept); None if rows are read one by one."""

    def copy(self, starts: Sequence[int], lengths: Sequence[int], out: Array | Sequence[Array]) -> None:
        """For each start, copy the given number of rows to the beginning of an element of `out`."""

    def ranges(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> Ranges | None:
        """Where these runs of rows are in the file, in ascending order; None if they are not gathered from a memory map."""


def open_rows(fields: Sequence[Stored]) -> list[Rows]:
    """The rows of the same dataset in each file."""
    sizes = [_block_rows(one) * _row_bytes(one) for one in fields if _is_in_blocks(one)]
    kept = KeptBlocks(max(_KEPT_BYTES // max(sizes, default=_BLOCK_BYTES), 1))
    return [TextRows(one) if one.is_text else MappedRows(one) if one.is_mapped else BlockRows(one, kept) for one in fields]


def _is_in_blocks(stored: Stored) -> bool:
    """Not if there is no row: HDF5 gives such a dataset no place in the file, as if it were in chunks."""
    return not (stored.is_text or stored.is_mapped) and stored.shape[0] > 0


def _row_bytes(stored: Stored) -> int:
    return max(nbytes(stored.shape[1:], stored.dtype), 1)


def _block_rows(stored: Stored) -> int:
    entry = max(stored.rows_of_entry, 1)
    return stored.chunk_rows or max(_BLOCK_BYTES // (_row_bytes(stored) * entry), 1) * entry


class KeptBlocks:
    """The blocks of rows that were used last, at most `most` over all files. Threads may share this object. It has no lock,
    because a fork could leave it locked forever."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._blocks: OrderedDict[tuple[str, int], Array] = OrderedDict()

    def __reduce__(self) -> tuple[type[KeptBlocks], tuple[int]]:
        return KeptBlocks, (self.most,)

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: tuple[str, int]) -> Array | None:
        block = self._blocks.get(key)
        if len(self._blocks) >= self.most:  # until then no block is removed
            with contextlib.suppress(KeyError):
                self._blocks.move_to_end(key)
        return block

    def add(self, key: tuple[str, int], block: Array) -> None:
        while len(self._blocks) >= self.most:
            with contextlib.suppress(KeyError):
                self._blocks.popitem(last=False)
        self._blocks[key] = block


class _Lazy(ABC):
    """Opened by the process that reads first."""

    _crosses_forks = True
    """Whether a forked process may use what is open."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._opened: Any = None
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    def ranges(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> Ranges | None:
        return None

    def _now(self) -> Any:
        if self._opened is None or not (self._crosses_forks or self._pid == os.getpid()):
            self._opened, self._pid = self._open(), os.getpid()
        return self._opened

    @abstractmethod
    def _open(self) -> Any: ...


def _check_same(where: Stored) -> None:
    """Raises DataError if the file was replaced after its layout was read, by one in which the rows are elsewhere, or are those
    of other samples."""
    with explained(where.file):
        if identity_of(where.file) == where.identity:
            return
    with opened(where.file) as file:
        now = stored(file, where.file, where.name)
        now = replace(now, lengths=where.lengths.now(file) if where.lengths is not None else None)
    now = now.by_second_axis() if where.rows_of_entry > 1 else now
    if replace(now, identity=where.identity) != where:
        raise DataError(
            f"{where.file} was replaced after it was opened, and {where.name} is not stored as before; create the dataset "
            "again, and write new data to another file"
        )


class MappedRows(_Lazy):
    """Rows that are stored one after the other in the file. The file's length is checked before each gather: if the file has
    become shorter, reading the map behind its end would kill the process (SIGBUS)."""

    blocks: tuple[int, int] | None = None

    def __init__(self, stored: Stored) -> None:
        super().__init__(stored)
        self._end, self._is_native = stored.end, stored.dtype.isnative

    def take(self, indices: npt.NDArray[np.int64], out: Array) -> Array:
        rows = self._checked()
        if self._is_native:
            return rows.take(indices, 0, out, "clip")  # any other mode copies `out` first
        out[...] = rows.take(indices, 0)
        return out

    def copy(self, starts: Sequence[int], lengths: Sequence[int], out: Array | Sequence[Array]) -> None:
        rows = self._checked()
        for start, length, to in zip(starts, lengths, out, strict=True):
            to[:length] = rows[start : start + length]

    def ranges(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> Ranges | None:
        row = _row_bytes(self._stored)
        return Ranges(self, (self._stored.offset or 0) + starts * row, (stops - starts) * row) if len(starts) else None

    @property
    def path(self) -> str:
        return self._stored.file

    def will_need(self, ranges: Sequence[tuple[int, int]], in_blocks: bool) -> None:
        mapped: mmap.mmap | None = self._now()[0]
        if mapped is None:
            return
        if not in_blocks:
            # Without this, reading a missing page of a map also reads its neighbours, 2 to 5 times what is needed.
            mapped.madvise(mmap.MADV_RANDOM)
        for offset, size in ranges:
            begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
            with contextlib.suppress(OSError, ValueError):  # only advice: if the file has become shorter, the gather raises
                mapped.madvise(mmap.MADV_WILLNEED, begin, offset + size - begin)

    def _checked(self) -> Array:
        rows: Array
        mapped, rows = self._opened or self._now()  # also after a fork
        if (size := mapped.size() if mapped is not None else 0) < self._end:
            where = self._stored
            raise DataError(
                f"{where.file} was shortened to {size} bytes after it was opened, and {where.name} ends at byte "
                f"{where.end}; make it again under another name and rename it, so nobody reads half a file"
            )
        return rows

    def _open(self) -> tuple[mmap.mmap | None, Array]:
        where = self._stored
        try:
            with open(where.file, "rb") as file:
                if os.fstat(file.fileno()).st_size < where.end:
                    return None, np.empty(0)  # `_checked` raises the error
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"{where.file} cannot be read: {processes.shortage(error) or error.strerror or error}") from None
        _check_same(where)
        return mapped, np.ndarray(where.shape, where.dtype, mapped, where.offset or 0)


class BlockRows(_Lazy):
    """Rows of a dataset in chunks (compressed, for example), or of one that was never written. Reads one block of whole chunks
    at a time, and keeps the blocks that were used last."""

    _crosses_forks = False

    def __init__(self, stored: Stored, kept: KeptBlocks) -> None:
        super().__init__(stored)
        self._native = stored.dtype.newbyteorder("=")
        self._block_rows = _block_rows(stored)
        self.blocks: tuple[int, int] | None = (self._block_rows, kept.most) if _is_in_blocks(stored) else None
        self._kept = kept

    def take(self, indices: npt.NDArray[np.int64], out: Array) -> Array:
        blocks, within = np.divmod(indices, self._block_rows)
        if _row_bytes(self._stored) >= _LARGE_BYTES:
            places: dict[int, list[tuple[int, int]]] = {}
            for to, (number, at) in enumerate(zip(blocks.tolist(), within.tolist(), strict=True)):
                places.setdefault(number, []).append((to, at))
            for number, block in self._each(places):
                for to, at in places[number]:
                    out[to] = block[at]
            return out
        order = np.argsort(blocks, kind="stable")
        numbers, begins = np.unique(blocks[order], return_index=True)
        runs = dict(zip(numbers.tolist(), np.split(order, begins)[1:], strict=True))
        for number, block in self._each(runs):
            out[runs[number]] = block[within[runs[number]]]
        return out

    def _each(self, numbers: Iterable[int]) -> Iterator[tuple[int, Array]]:
        """(number, block) for each number. First the blocks that are kept: a new one may replace one that is still needed."""
        others = []
        for number in numbers:
            if (kept := self._kept.get((self._stored.file, number))) is not None:
                yield number, kept
            else:
                others.append(number)
        for number in others:
            yield number, self._block(number)

    def copy(self, starts: Sequence[int], lengths: Sequence[int], out: Array | Sequence[Array]) -> None:
        for start, length, to in zip(starts, lengths, out, strict=True):
            done = 0
            while done < length:
                number, first = divmod(start + done, self._block_rows)
                some = self._block(number)[first : first + length - done]
                to[done : done + len(some)] = some
                done += len(some)

    def _block(self, number: int) -> Array:
        if (kept := self._kept.get((self._stored.file, number))) is not None:
            return kept
        _, read = self._now()
        start = number * self._block_rows
        stop = min(start + self._block_rows, self._stored.shape[0])
        entry = max(self._stored.rows_of_entry, 1)
        try:
            block: Array = read(start // entry, stop // entry).reshape(stop - start, *self._stored.shape[1:])
        except (OSError, RuntimeError, ValueError) as error:
            text = " ".join(str(error).split())
            raise DataError(
                f"{self._stored.file}: rows {start} to {stop - 1} of {self._stored.name} cannot be read; copy the file or "
                f"create it again ({text})"
            ) from None
        block = block.astype(self._native, copy=False)
        self._kept.add((self._stored.file, number), block)
        return block

    def _open(self) -> tuple[Any, Any]:
        with explained(self._stored.file):
            file = open_file(self._stored.file)
            _check_same(self._stored)
            return file, _reader(file[self._stored.name])


def _reader(dataset: Any) -> Callable[[int, int], Array]:
    """The function that reads all entries of a chunk, from its first entry to the one after its last."""
    settings = dataset.id.get_create_plist()
    filters = [settings.get_filter(k)[0] for k in range(settings.get_nfilters())]
    if filters == [_GZIP] and dataset.chunks[1:] == dataset.shape[1:] and has_bytes_of_numpy(dataset):
        return partial(_unzipped, dataset, dataset.chunks, dataset.dtype)
    return lambda start, stop: dataset[start:stop]


def _unzipped(dataset: Any, chunk: tuple[int, ...], dtype: np.dtype[Any], start: int, stop: int) -> Array:
    """Without HDF5's lock while it is decompressed, and without a copy of the result."""
    first = (start, *[0] * (len(chunk) - 1))
    try:
        is_plain, data = dataset.id.read_direct_chunk(first)
    except (OSError, RuntimeError, MemoryError):  # the last if nothing was written at all: h5py takes -1 for the size
        if dataset.id.get_storage_size() and dataset.id.get_chunk_info_by_coord(first).byte_offset is not None:
            raise
        found: Array = dataset[start:stop]  # the chunk was never written
        return found
    size = nbytes(chunk, dtype)
    library = _fastest_zlib()
    try:
        data = data if is_plain else library.decompress(data, bufsize=size)
    except library.error as error:
        raise ValueError(str(error)) from None
    if len(data) != size:
        raise ValueError(f"the chunk has {len(data)} bytes, not {size}")
    return np.frombuffer(data, dtype).reshape(chunk)[: stop - start]


@cache
def _fastest_zlib() -> Any:
    """isal takes about half the time of zlib."""
    try:
        return import_module("isal.isal_zlib")
    except ImportError:
        return zlib


class TextRows(_Lazy):
    """Strings. All are read at the first use, because one by one they would take 30 us each, and each is decoded when it is
    asked for: as UTF-8, cut at the first NUL."""

    blocks: tuple[int, int] | None = None

    def take(self, indices: npt.NDArray[np.int64], out: Array) -> Array:
        out[...] = self._decoded(indices)
        return out

    def copy(self, starts: Sequence[int], lengths: Sequence[int], out: Array | Sequence[Array]) -> None:
        for start, length, to in zip(starts, lengths, out, strict=True):
            to[:length] = self._decoded(np.arange(start, start + length))

    def _open(self) -> Array:
        where = self._stored
        _check_same(where)
        with opened(where.file) as file:
            values: Array = file[where.name][...]
        if values.dtype.kind == "S" and values.dtype.itemsize > _WIDE:
            values = values.astype(f"S{np.char.str_len(values).max(initial=1)}")
        return values.reshape(where.shape)

    def _decoded(self, rows: npt.NDArray[np.int64]) -> Array:
        values = self._now()[rows]
        found = np.empty(values.size, object)
        for at, value in enumerate(values.reshape(-1).tolist()):
            found[at] = self._text(rows, at, value)
        return found.reshape(values.shape)

    def _text(self, rows: npt.NDArray[np.int64], at: int, value: str | bytes) -> str:
        try:
            return (value.decode() if isinstance(value, bytes) else value).split("\0")[0]
        except UnicodeDecodeError:
            of_row = math.prod(self._stored.shape[1:])
            number = int(rows[at // of_row]) * of_row + at % of_row
            raise DataError(f"{self._stored.file}: value {number} of {self._stored.name} is not UTF-8: {value!r}") from None
