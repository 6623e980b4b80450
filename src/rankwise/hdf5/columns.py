"""A field over all files of a dataset: its samples as tensors, one by one or as a batch, padded if lengths differ.

    column = column("features", layouts, pad=0)
    column.batch(indices, parts)                  # (samples x longest x ..., int64 lengths)

`parts` says which file has which samples of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rankwise.errors import DataError
from rankwise.hdf5.buffers import Buffers
from rankwise.hdf5.layout import Field, FileLayout, Lengths, Stored, nbytes
from rankwise.hdf5.read_ahead import Ranges
from rankwise.hdf5.rows import Array, Rows, open_rows

Indices = npt.NDArray[np.int64]
Parts = Sequence[tuple[int, Indices | None, Indices]]
"""For each file: (the file, which samples of the batch it has (None for all), their numbers in the file)."""
Empty = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""Like np.empty."""

_SMALL_BYTES = 2048  # of a sample: if it is smaller, one gather of all rows is faster, otherwise one copy per sample


class Column(Protocol):
    uneven: bool

    @property
    def blocks(self) -> tuple[int, int] | None:
        """(samples that are read together, how many such blocks are kept); None if rows are read one by one."""

    @property
    def sample_bytes(self) -> float:
        """The size of a sample, on average."""

    @property
    def lengths(self) -> Lengths:
        """The number of rows of each sample, over all files; only if `uneven`."""

    def sample(self, index: int, file: int, within: int) -> tuple[Any, Any]:
        """(a sample, its length). `index` is its number over all files, `within` its number in `file`."""

    def batch(self, indices: Indices, parts: Parts, empty: Empty | None = None) -> tuple[Any, Any]:
        """(a batch, its lengths)."""

    def collate(self, samples: Sequence[Any]) -> Any:
        """The batch of these samples."""

    @property
    def is_mapped(self) -> bool:
        """Whether its rows are gathered from memory maps of the files."""

    def ranges(self, file: int, first: int, starts: Indices, stops: Indices) -> Ranges | None:
        """Where these runs of samples are in `file`, like `Rows.ranges`. The numbers count over all files; `first` is the first
        sample of this file."""

    def describe(self) -> str:
        """Name, shape and type: `image 3x64x64 uint8`."""


def alike(layouts: Sequence[FileLayout]) -> list[FileLayout]:
    """The same layouts, but a field that has lengths in one file gets them in all, even if all samples of a file have the same
    length. Raises DataError if a file has other fields than the first, or other types or shapes."""
    uneven = {name for layout in layouts for name, field in layout.fields.items() if field.lengths is not None}
    found = []
    for layout in layouts:
        fields = {name: _with_lengths(field) if name in uneven else field for name, field in layout.fields.items()}
        found.append(replace(layout, fields=fields))
    first = found[0]
    for other in found[1:]:
        for name in sorted({*first.fields, *other.fields}):
            kinds = [_kind(each.fields.get(name)) for each in (first, other)]
            if kinds[0] != kinds[1]:
                files = f"{kinds[0]} in {first.file} and {kinds[1]} in {other.file}"
                raise DataError(f"{name} is {files}; give files that have the same fields")
    return found


def _with_lengths(field: Field) -> Field:
    stored = field.stored
    if field.lengths is not None or len(stored.shape) < 2:
        return field
    samples, length = stored.shape[:2]
    return Field.with_lengths(stored.by_second_axis(), np.full(samples, length))


def _kind(field: Field | None) -> str:
    if field is None:
        return "not there"
    shape = "x".join(map(str, field.stored.shape[1:]))
    kind = "text" if field.stored.is_text else str(field.stored.dtype.newbyteorder("="))
    return f"{f'{shape} ' if shape else ''}{kind}{', with lengths' if field.lengths is not None else ''}"


def touched(samples: int, block: int) -> float:
    """In how many blocks of `block` samples a run of `samples` samples is, on average over all places where it may begin."""
    return 1 + (samples - 1) / block


def column(name: str, layouts: Sequence[FileLayout], pad: float) -> Column:
    fields = [layout.fields[name] for layout in layouts]
    if fields[0].lengths is None:
        return EvenColumn(name, fields)
    return UnevenColumn(name, fields, pad) if fields[0].axes is None else AxesColumn(name, fields, pad)


def _joined(of_files: Sequence[Lengths | None]) -> Lengths:
    known = [each for each in of_files if each is not None]
    joined = known[0].view() if len(known) == 1 else np.concatenate(known)
    joined.flags.writeable = False  # the places of samples follow from it, and `lengths` of a dataset returns it
    return joined


def _dtype_of(stored: Stored) -> np.dtype[Any]:
    return np.dtype(object) if stored.is_text else stored.dtype.newbyteorder("=")


def _are_mapped(fields: Sequence[Field]) -> bool:
    return any(field.stored.is_mapped and not field.stored.is_text for field in fields)  # a file without rows has no map


def _blocks_of(rows: Sequence[Rows]) -> tuple[int, int] | None:
    """(rows that are read together, how many such blocks are kept), of the file with the largest blocks."""
    return max((one.blocks for one in rows if one.blocks is not None), default=None)


def _with_files(indices: Indices, parts: Parts) -> Iterator[tuple[int, int]]:
    """(the sample, its file), in the order of the batch."""
    files = np.empty(len(indices), np.int64)
    for file, at, _ in parts:
        files[slice(None) if at is None else at] = file
    return zip(indices.tolist(), files.tolist(), strict=True)


def _tensor(array: Array) -> Any:
    """Strings remain strings, in lists."""
    return torch.from_numpy(array) if array.dtype.kind != "O" else array.tolist()


class EvenColumn:
    """A field with one row per sample."""

    uneven = False

    def __init__(self, name: str, fields: Sequence[Field]) -> None:
        stored = fields[0].stored
        self._described = f"{name} {_kind(fields[0])}"
        self._row, self._dtype = stored.shape[1:], _dtype_of(stored)
        self.is_mapped = _are_mapped(fields)
        self._rows = open_rows([field.stored for field in fields])
        self._buffers = Buffers()

    @property
    def blocks(self) -> tuple[int, int] | None:
        return _blocks_of(self._rows)

    @property
    def sample_bytes(self) -> float:
        return nbytes(self._row, self._dtype)

    @property
    def lengths(self) -> Lengths:
        raise AttributeError("lengths")

    def sample(self, index: int, file: int, within: int) -> tuple[Any, Any]:
        return _tensor(self._rows[file].take(np.array([within]), np.empty((1, *self._row), self._dtype)))[0], None

    def batch(self, indices: Indices, parts: Parts, empty: Empty | None = None) -> tuple[Any, Any]:
        out = (empty or self._buffers.empty)((len(indices), *self._row), self._dtype)
        for file, at, within in parts:
            if at is None:
                self._rows[file].take(within, out)
            else:
                out[at] = self._rows[file].take(within, np.empty((len(at), *self._row), self._dtype))
        return _tensor(out), None

    def ranges(self, file: int, first: int, starts: Indices, stops: Indices) -> Ranges | None:
        return self._rows[file].ranges(starts - first, stops - first)

    def collate(self, samples: Sequence[Any]) -> Any:
        return torch.stack(list(samples)) if isinstance(samples[0], torch.Tensor) else list(samples)

    def describe(self) -> str:
        return self._described


class UnevenColumn:
    """A field with any number of rows per sample."""

    uneven = True

    def __init__(self, name: str, fields: Sequence[Field], pad: float) -> None:
        stored = fields[0].stored
        self._described = f"{name} {_kind(fields[0])}"
        self._shape, self._is_text = stored.shape[1:], stored.is_text
        self._dtype = _dtype_of(stored)
        self._row_bytes = nbytes(self._shape, self._dtype)
        self.is_mapped = _are_mapped(fields)
        self._pad = pad
        self._rows = open_rows([field.stored for field in fields])
        self.lengths = _joined([field.lengths for field in fields])
        self._ends = _joined([field.ends for field in fields])  # each counts in its own file
        self._mean_length = sum(field.total for field in fields) / max(len(self.lengths), 1)
        self._buffers = Buffers()

    @property
    def blocks(self) -> tuple[int, int] | None:
        found = _blocks_of(self._rows)
        if found is None:
            return None
        samples = max(round(found[0] / max(self._mean_length, 1.0)), 1)
        return samples, max(int(found[1] / touched(samples, samples)), 1)

    @property
    def sample_bytes(self) -> float:
        return self._row_bytes * self._mean_length

    def sample(self, index: int, file: int, within: int) -> tuple[Any, Any]:
        return _tensor(self._sample(index, file)), torch.tensor(int(self.lengths[index]), device="cpu")

    def _sample(self, index: int, file: int) -> Array:
        length = int(self.lengths[index])
        out = np.empty((length, *self._shape), self._dtype)
        self._rows[file].copy([int(self._ends[index]) - length], [length], [out])
        return out

    def batch(self, indices: Indices, parts: Parts, empty: Empty | None = None) -> tuple[Any, Any]:
        lengths = self.lengths[indices]
        if self._is_text:
            texts = [self._sample(index, file).tolist() for index, file in _with_files(indices, parts)]
            return texts, torch.from_numpy(lengths)
        longest = int(lengths.max(initial=0))
        out = (empty or self._buffers.empty)((len(indices), longest, *self._shape), self._dtype)
        for file, at, _ in parts:
            mine = indices if at is None else indices[at]
            self._fill(self._rows[file], mine, lengths if at is None else lengths[at], out, at)
        return torch.from_numpy(out), torch.from_numpy(lengths)

    def _fill(self, rows: Rows, indices: Indices, lengths: Lengths, out: Array, at: Indices | None) -> None:
        """Write these samples and their padding into `out`: at all places, or at the places `at`."""
        starts = self._ends[indices] - lengths
        if self._row_bytes * int(lengths.sum()) > _SMALL_BYTES * len(lengths):
            targets = list(out) if at is None else [out[k] for k in at]
            listed_lengths = lengths.tolist()
            rows.copy(starts.tolist(), listed_lengths, targets)
            for length, target in zip(listed_lengths, targets, strict=True):
                target[length:] = self._pad
            return
        is_there = np.arange(out.shape[1]) < lengths[:, None]
        before = np.cumsum(lengths) - lengths
        block = out if at is None else np.empty((len(indices), *out.shape[1:]), out.dtype)
        block[~is_there] = self._pad
        total = int(lengths.sum())
        numbers = np.repeat(starts - before, lengths) + np.arange(total)
        block[is_there] = rows.take(numbers, np.empty((total, *self._shape), self._dtype))
        if at is not None:
            out[at] = block

    def ranges(self, file: int, first: int, starts: Indices, stops: Indices) -> Ranges | None:
        begins, ends = self._ends[starts] - self.lengths[starts], self._ends[stops - 1]
        some = begins < ends
        return self._rows[file].ranges(begins[some], ends[some])

    def collate(self, samples: Sequence[Any]) -> Any:
        if self._is_text:
            return list(samples)
        axes = samples[0].dim() - len(self._shape)
        most = [max(sample.shape[axis] for sample in samples) for axis in range(axes)]
        out = torch.full((len(samples), *most, *self._shape), self._pad, dtype=samples[0].dtype, device="cpu")
        for to, sample in zip(out, samples, strict=True):
            to[tuple(slice(n) for n in sample.shape[:axes])] = sample
        return out

    def describe(self) -> str:
        return self._described


class AxesColumn(UnevenColumn):
    """Samples with several axes of different lengths, with their rows one after the other. A returned sample has its axes
    again, and the lengths of a batch are samples x axes."""

    def __init__(self, name: str, fields: Sequence[Field], pad: float) -> None:
        super().__init__(name, fields, pad)
        self._name = name
        self._sizes_at = [field.axes for field in fields if field.axes is not None]
        self._files = [field.stored.file for field in fields]
        self._sizes: Lengths | None = None

    def _read_sizes(self) -> Lengths:
        """The lengths, samples x axes."""
        if self._sizes is None:
            tables = []
            for (stored, lengths), file in zip(self._sizes_at, self._files, strict=True):
                if len(set(lengths.tolist())) > 1:
                    raise DataError(f"{file}: samples of {self._name} have different numbers of axes ({stored.name})")
                table = open_rows([stored])[0].take(np.arange(stored.shape[0]), np.empty(stored.shape, _dtype_of(stored)))
                tables.append(table.astype(np.int64).reshape(len(lengths), -1))
            sizes = np.concatenate(tables)
            if (wrong := np.flatnonzero(sizes.prod(axis=1) != self.lengths)).size:
                at = int(wrong[0])
                shape = " x ".join(map(str, sizes[at]))
                raise DataError(f"{self._files[0]}: sample {at} of {self._name} has {self.lengths[at]} rows, not {shape}")
            self._sizes = sizes
        return self._sizes

    def sample(self, index: int, file: int, within: int) -> tuple[Any, Any]:
        sizes = self._read_sizes()[index]
        return torch.from_numpy(self._sample(index, file).reshape(*sizes, *self._shape)), torch.from_numpy(sizes.copy())

    def batch(self, indices: Indices, parts: Parts, empty: Empty | None = None) -> tuple[Any, Any]:
        samples = [self.sample(index, file, 0)[0] for index, file in _with_files(indices, parts)]
        return self.collate(samples), torch.from_numpy(self._read_sizes()[indices])
