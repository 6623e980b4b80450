"""Samples of HDF5 files: a map-style dataset that makes a batch in one gather.

dataset = HDF5Dataset("train.h5")
dataset[3]                                # {"image": uint8 tensor of 3 x 64 x 64, "label": int64 scalar}
dataset.read_batch(np.array([3, 1, 4]))   # {"image": 3 x 3 x 64 x 64, "label": 3}
"""

from __future__ import annotations

import contextlib
import glob
import math
import operator
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rankwise.errors import ConfigError, DataError
from rankwise.files import FileCache
from rankwise.files.remote import expanded, is_remote
from rankwise.hdf5.checksums import verify
from rankwise.hdf5.columns import Column, Empty, Indices, Parts, alike, column, touched
from rankwise.hdf5.layout import LENGTHS_SUFFIX, Field, Lengths, read
from rankwise.hdf5.read_ahead import Ranges, ReadAhead
from rankwise.host import machine
from rankwise.host.arguments import PATH, SEQUENCE, TEXT, Argument, shown, takes
from rankwise.host.text import count, listed

_TOGETHER_BYTES, _TOGETHER = 1 << 16, 1024
"""(bytes of a block, blocks to keep) for a file whose rows are read one by one: a disk reads such blocks at full speed."""

_LARGE_BYTES = 4096
"""From this sample size (a page) on, it is faster to ask the kernel for all samples at once than to wait for each."""

_FILES = Argument(
    lambda v: PATH.accepts(v) or (SEQUENCE.accepts(v) and len(v) > 0 and all(map(PATH.accepts, v))),
    "a path, a pattern ('data/train-*.h5'), or a list of paths",
)
_FIELDS = Argument(
    lambda v: isinstance(v, str | Sequence) and len(v) > 0 and all(isinstance(name, str) for name in v),
    "a field's name, or a list of names",
)
_LENGTHS = Argument(
    lambda v: isinstance(v, Mapping) and all(isinstance(name, str) for pair in v.items() for name in pair),
    'names by the fields\' names: {"features": "feature_lengths"}',
)
_PAD = Argument(
    lambda v: all(isinstance(each, Real) for each in (v.values() if isinstance(v, Mapping) else [v])),
    "a number, or numbers by the fields' names",
)


class HDF5Dataset:
    """Samples of one or more files, in their order: ordinary HDF5, files of `HDF5Writer`, or of RETURNN's HDFDataset.

    `files`: a path, a pattern, or a list of paths. A sample and a batch are mappings of tensors by the names of the fields, and
    lists of str if a field holds strings. With `fields`, a list of names, they are tuples in that order; with one name, only
    the tensor. A field whose samples have different lengths is padded in a batch (with `pad`, a number, or numbers by field) to
    samples x longest x ..., and `<name>_lengths`, int64, is another field. rankwise finds these lengths in files of HDF5Writer
    and RETURNN; for other files give `lengths`: {"features": "feature_lengths"}. `length_of`: the field whose lengths the
    attribute `lengths` has, for batches by length; by default the first that has any. Paths may be URLs that fsspec can open.
    `cache`: a folder of this machine to which each file is copied first, once for all processes (rankwise.files.FileCache): for
    slow file systems, and for URLs, which are otherwise read like compressed files.

    Contiguous rows (HDF5 stores data this way if it is neither chunked nor compressed) are gathered from a memory map of the
    file; others are read by whole chunks, and the last 64 MB of each field are kept. Memory holds 16 bytes for each sample and
    field with lengths, up to four batches (reused when nobody holds them), and all strings of a field that was read. Any
    process and thread may read.

    The constructor raises DataError for inconsistent files, and ConfigError for arguments that contradict each other
    or the files.
    """

    draws_nothing = True

    @takes(files=_FILES, fields=_FIELDS.or_none, lengths=_LENGTHS.or_none, pad=_PAD, length_of=TEXT.or_none, cache=PATH.or_none)
    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        fields: str | Sequence[str] | None = None,
        *,
        lengths: Mapping[str, str] | None = None,
        pad: float | Mapping[str, float] = 0,
        length_of: str | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        asked = _names(fields)
        self._form = asked[0] if asked is not None and isinstance(fields, str) else asked
        lengths_of = {_name(field): _name(dataset) for field, dataset in (lengths or {}).items()}
        self._files = _paths(files)
        self._cache = FileCache(cache) if cache is not None else None
        with self._named_by_source():
            self._files = self._cache.paths(self._files) if self._cache is not None else self._files
            layouts = alike([read(path, asked, lengths_of) for path in self._files])
        self._starts = np.cumsum([0, *(layout.samples for layout in layouts)])
        self._samples = int(self._starts[-1])
        if self._samples == 0:
            raise DataError(f"{listed((layout.file for layout in layouts), 3)}: the dataset has no samples")
        of = _padding(pad, layouts[0].fields)
        self._columns = {name: column(name, layouts, of.get(name, 0)) for name in layouts[0].fields}
        of_each = len(self._columns) + (self._cache is not None)  # they stay open once they were read
        machine.allow_open_files(len(layouts) * of_each + machine.OTHER_FILES)
        self._given = self._named(asked)
        self._are_even = not any(self._columns[field].uneven for field, _ in self._given.values())
        self._fields = tuple(dict.fromkeys(field for field, _ in self._given.values()))
        self._length_of = self._with_lengths(length_of and _name(length_of))

    @contextlib.contextmanager
    def _named_by_source(self) -> Iterator[None]:
        """Errors about a cached copy name the original file."""
        try:
            yield
        except DataError as error:
            raise DataError(self._cache.sources_in(str(error)) if self._cache is not None else str(error)) from None

    def _named(self, asked: Sequence[str] | None) -> dict[str, tuple[str, bool]]:
        """The entries of a batch, by name: (the field, whether the entry is its lengths)."""
        if asked is None:
            every: dict[str, tuple[str, bool]] = {}
            for name, one in self._columns.items():
                every[name] = (name, False)
                if one.uneven and (lengths := name + LENGTHS_SUFFIX) in self._columns:
                    raise ConfigError(
                        f"{lengths} is a field of the file, and a batch has the lengths of {name} under the same name; give "
                        f"fields=[...], in which {lengths} is the field, or give the field another name"
                    )
                if one.uneven:
                    every[name + LENGTHS_SUFFIX] = (name, True)
            return every
        found = {name: (name, False) if name in self._columns else (name.removesuffix(LENGTHS_SUFFIX), True) for name in asked}
        for name, (field, is_lengths) in found.items():
            if is_lengths and not self._columns[field].uneven:
                raise ConfigError(f"fields has {name}, but all samples of {field} have the same length; remove {name}")
        return found

    def _with_lengths(self, asked: str | None) -> Column | None:
        uneven = {name: one for name, one in self._columns.items() if one.uneven}
        if asked is not None and asked not in uneven:
            raise ConfigError(f"length_of={asked!r}: the fields with lengths are {listed(uneven) or 'none'}")
        return uneven[asked] if asked is not None else next(iter(uneven.values()), None)

    def __len__(self) -> int:
        return self._samples

    @property
    def lengths(self) -> Lengths:
        """The length of each sample, int64. This attribute does not exist if all samples have the same length."""
        if self._length_of is None:
            raise AttributeError("lengths: all samples of this dataset have the same length")
        return self._length_of.lengths

    @property
    def faster_without_workers(self) -> bool:
        """Whether everything in a batch comes from memory maps of files: then a loader that has workers advises against
        them."""
        return all(self._columns[field].blocks is None for field, _ in self._given.values())

    @property
    def blocks(self) -> tuple[int, int]:
        """For `Loader(shuffle="blocks")`: (samples that are read together, how many such blocks are kept)."""
        found = [
            one.blocks or (max(int(_TOGETHER_BYTES // max(one.sample_bytes, 1)), 1), _TOGETHER)
            for one in self._columns.values()
        ]
        rows, window = min(found, key=math.prod)  # of the field that keeps the fewest samples
        for one in self._columns.values():
            if one.blocks is not None and math.prod(one.blocks) < self._samples:  # otherwise it keeps all
                of_one, kept = one.blocks
                window = min(window, max(int(kept / (touched(rows, of_one) if of_one % rows else 1)), 1))
        return rows, window

    @property
    def block_starts(self) -> tuple[int, ...]:
        """The samples at which a block starts in any case: the first of each file, because a chunk is in only one file."""
        if all(one.blocks is None for one in self._columns.values()):
            return (0,)
        return tuple(self._starts[:-1][np.diff(self._starts) > 0].tolist())

    def __getitem__(self, index: Any) -> Any:
        """A sample as it is stored. A list, an array or a slice gives a batch; bools, one per sample, choose the samples of a
        batch. Raises IndexError, and TypeError for an index that is not an integer."""
        number = _number(index)
        if number is not None:
            [at] = self._checked(np.array([number]))
            file = int(np.searchsorted(self._starts, at, "right")) - 1
            return self._formed(lambda name: self._columns[name].sample(int(at), file, int(at - self._starts[file])))
        if isinstance(index, slice):
            return self.read_batch(np.arange(*index.indices(self._samples)))
        return self.read_batch(self._checked(self._numbers(index)))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """A list of samples, for torch's DataLoader; `collate` makes a batch of them."""
        return [self[index] for index in indices]

    def read_batch(self, indices: Indices, empty: Empty | None = None) -> Any:
        """The batch of these samples, each from 0 to len - 1; the Loader calls this. `empty`: like np.empty, allocates the
        arrays."""
        if len(self._starts) == 2:
            parts: Parts = [(0, None, indices)]
        else:
            files = np.searchsorted(self._starts, indices, "right") - 1
            within = indices - self._starts[files]
            parts = [(int(n), at, within[at]) for n in np.unique(files) for at in [np.flatnonzero(files == n)]]
        if self._are_even:
            return self._shaped({name: self._columns[name].batch(indices, parts, empty)[0] for name in self._given})
        return self._formed(lambda name: self._columns[name].batch(indices, parts, empty))

    def read_ahead(self, rows: int) -> Callable[[Indices], None] | None:
        """For the Loader: a function that takes the indices of samples that are needed soon, or, for blocks of `rows` samples,
        of some samples in each. None if this does not help: for single small samples the disk reads as much without it."""
        mapped = [self._columns[name] for name in self._fields if self._columns[name].is_mapped]
        found = [one for one in mapped if rows > 1 or one.sample_bytes >= _LARGE_BYTES]
        return ReadAhead(partial(self._ranges, found, rows), in_blocks=rows > 1) if found else None

    def _ranges(self, columns: Sequence[Column], rows: int, indices: Indices) -> list[Ranges]:
        """Where these samples are in the files, or the blocks that contain them."""
        if rows > 1:
            starts = np.unique(indices // rows) * rows
            stops = np.minimum(starts + rows, self._samples)
        else:
            starts = np.sort(indices)
            stops = starts + 1
        found = []
        for file, (first, last) in enumerate(pairwise(self._starts.tolist())):
            low, high = np.searchsorted(stops, first, "right"), np.searchsorted(starts, last, "left")
            if low < high:
                here = np.maximum(starts[low:high], first), np.minimum(stops[low:high], last)
                found += [column.ranges(file, first, *here) for column in columns]
        return [ranges for ranges in found if ranges is not None]

    def collate(self, samples: Sequence[Any]) -> Any:
        """A batch of samples of this dataset: for `collate_fn`."""
        if isinstance(self._form, str):
            samples = [(sample,) for sample in samples]
        by_name = {
            name: [sample[name] if isinstance(sample, dict) else sample[at] for sample in samples]
            for at, name in enumerate(self._given)
        }
        plain = {field: by_name[name] for name, (field, is_lengths) in self._given.items() if not is_lengths}
        made = {field: self._columns[field].collate(values) for field, values in plain.items()}
        lengths = {name: torch.stack(values) for name, values in by_name.items() if self._given[name][1]}
        return self._shaped(
            {name: lengths[name] if name in lengths else made[field] for name, (field, _) in self._given.items()}
        )

    def verify(self) -> int:
        """Read everything that has checksums (`HDF5Writer` writes them), and return the number of bytes. Raises DataError for
        corrupted data, with its file and place."""
        return sum(map(self._verified, self._files))

    def _verified(self, path: str) -> int:
        try:
            return verify(path)
        except DataError as error:
            source = self._cache.source_of(path) if self._cache is not None else None
            if source is None:
                raise
            raise DataError(f"{error}; this is the copy of {source}: delete it, and the next run makes another") from None

    def _formed(self, read: Callable[[str], tuple[Any, Any]]) -> Any:
        """The entries of a sample or batch, in the form that the user has chosen. `read`: returns a field and its lengths, by
        name."""
        found = {field: read(field) for field in self._fields}
        return self._shaped({name: found[field][is_lengths] for name, (field, is_lengths) in self._given.items()})

    def _shaped(self, found: dict[str, Any]) -> Any:
        if self._form is None:
            return found
        return found[self._form] if isinstance(self._form, str) else tuple(found.values())

    def _numbers(self, index: Any) -> npt.NDArray[Any]:
        """The samples of a batch by their numbers, which may be negative or too large."""
        try:
            found = np.asarray(index)
        except ValueError:  # lists of different lengths
            found = np.array(None)
        if found.dtype == bool and found.ndim:
            if found.shape != (self._samples,):
                shape = "x".join(map(str, found.shape))
                raise IndexError(
                    f"the index has {shape} bools, but the dataset has {self._samples} samples; give one per sample"
                )
            return np.flatnonzero(found)
        if found.size and (found.dtype.kind not in "iu" or not found.ndim):
            raise TypeError(
                f"the index of a sample must be an integer; got {shown(index)}; give an integer, a slice, or a list of integers"
            )
        return found.reshape(-1)

    def _checked(self, numbers: npt.NDArray[Any]) -> Indices:
        """The indices from 0 on: negative ones count from the end."""
        if len(numbers) and not (-self._samples <= numbers.min() and numbers.max() < self._samples):
            raise IndexError(f"samples {numbers.min()} to {numbers.max()} are not in a dataset of {self._samples} samples")
        indices = numbers.astype(np.int64, copy=False)
        return np.where(indices < 0, indices + self._samples, indices)

    def __repr__(self) -> str:
        fields = listed((one.describe() for one in self._columns.values()), 8)
        return f"HDF5Dataset({count(self._samples, 'sample')} in {count(len(self._starts) - 1, 'file')}: {fields})"


def _absolute(path: str) -> str:
    """The script may change its directory before a file is read."""
    return path if is_remote(path) else os.path.abspath(path)


def _name(name: str) -> str:
    """HDF5 has several names for one dataset: `x`, `/x` and `./x`."""
    return posixpath.normpath(name).lstrip("/") or "."


def _names(fields: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if fields is None:
        return None
    names = [_name(name) for name in ([fields] if isinstance(fields, str) else fields)]
    if twice := [name for at, name in enumerate(names) if name in names[:at]]:
        raise ConfigError(f"fields has {twice[0]} twice; give each name once")
    return tuple(names)


def _padding(pad: float | Mapping[str, float], fields: Mapping[str, Field]) -> dict[str, float]:
    """The padding values by field. Raises ConfigError for a number that the type of the field does not have."""
    if isinstance(pad, Mapping):
        found = {_name(name): value for name, value in pad.items()}
    else:
        found = {name: pad for name, field in fields.items() if field.lengths is not None}
    if unknown := [name for name in found if name not in fields]:
        raise ConfigError(
            f"pad has the field {unknown[0]!r}, which this dataset does not read; its fields are {listed(fields)}"
        )
    for name, value in found.items():
        if not fields[name].stored.is_text:
            _check_padding(name, value, fields[name].stored.dtype.newbyteorder("="))
    return found


def _check_padding(name: str, value: float, dtype: np.dtype[Any]) -> None:
    """numpy and torch round, wrap or raise for such a value, each in another way and only in the first batch."""
    value = value.item() if isinstance(value, np.generic) else value  # numpy compares in the type of its number
    is_finite = abs(value) < math.inf
    if dtype.kind in "biu":
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        fits = is_finite and low <= int(value) <= high and int(value) == value
        numbers = f"a whole number from {low} to {high}"
    else:
        largest = float(np.finfo(dtype).max)
        fits = not is_finite or abs(value) <= largest
        numbers = f"a number from {-largest:g} to {largest:g}"
    if not fits:
        raise ConfigError(f"pad is {shown(value)} for {name}, but the type of this field is {dtype}; give {numbers}")


def _number(index: Any) -> int | None:
    """The index of one sample; None for any other index."""
    if getattr(index, "ndim", 0):  # a tensor of one number also converts to an int, but it stands for a batch
        return None
    try:
        return operator.index(index)
    except TypeError:
        return None


def _paths(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """The files in the given order; those of a pattern sorted by name."""
    if not isinstance(files, str | os.PathLike):
        return [_absolute(os.fspath(path)) for path in files]
    path = _absolute(os.fspath(files))
    if is_remote(path):
        found = expanded(path)
    elif not glob.has_magic(path) or Path(path).exists():
        return [path]
    else:
        found = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - the whole path is a pattern
    if not found:
        raise DataError(f"no file matches {path}")
    return found
