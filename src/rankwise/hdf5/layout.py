"""What an HDF5 file contains for training: its fields, the number of samples, and where their rows are.

    layout = read("train.h5", fields=None, lengths={})
    layout.samples, layout.fields["image"].stored.shape

There are two kinds of files: ordinary ones, in which each dataset is a field, and RETURNN's (returnn.py). If the samples of a
field have different lengths, all its rows are stored one after the other, and another dataset has the number of rows per
sample. In files of HDF5Writer these datasets are in the group /rankwise/lengths.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import math
import os
import platform
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from rankwise.errors import ConfigError, DataError
from rankwise.files.remote import RemoteFile, is_remote
from rankwise.hdf5.remote_file import RemoteHDF5
from rankwise.host.disk import exists
from rankwise.host.text import count, listed

OURS = "rankwise"
"""The group of rankwise in a file."""

LENGTHS_SUFFIX = "_lengths"
"""The entry `features_lengths` of a batch has the lengths of `features`."""

Lengths = npt.NDArray[np.int64]

_NUMBERS = {np.dtype(code) for code in "?bhilqBHILQefdFD"}
_SHOWN = 12  # names in an error, at most


class LengthsAt(NamedTuple):
    """The lengths of samples in a file."""

    name: str
    checksum: int

    @classmethod
    def of(cls, table: npt.NDArray[Any], name: str) -> LengthsAt:
        """`table`: what the dataset contains, of all fields. The hash takes a tenth of the time that reading it takes."""
        return cls(name, xxhash.xxh3_64_intdigest(np.ascontiguousarray(table).data))

    def now(self, file: Any) -> LengthsAt:
        """The same in a file that may be another by now."""
        return self.of(file[self.name][...] if self.name in file else np.zeros(0), self.name)


@dataclass(frozen=True)
class Stored:
    """One dataset of a file, and how its rows can be read. The first axis counts the rows."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_text: bool
    offset: int | None
    """The place in the file, if all rows are stored one after the other; None if they are in chunks or were never written."""

    chunk_rows: int
    """Rows per chunk; 0 if the dataset has no chunks."""

    rows_of_entry: int = 1
    """How many rows one entry of the dataset's first axis has: more than one if a row here is a part of a row there."""

    identity: tuple[str, int, int, int] | None = None
    """Of the file that was looked at."""

    lengths: LengthsAt | None = None
    """The lengths by which its rows are cut into samples; None if they are not in the file."""

    @property
    def is_mapped(self) -> bool:
        """Whether its rows are gathered from a memory map of the file."""
        return self.offset is not None and not is_remote(self.file)

    def by_second_axis(self) -> Stored:
        """The same numbers, with the first two axes as one axis of rows."""
        entries, length, *rest = self.shape
        return replace(
            self,
            shape=(entries * length, *rest),
            chunk_rows=self.chunk_rows * length,
            rows_of_entry=self.rows_of_entry * length,
        )

    @property
    def end(self) -> int:
        """The number of bytes that the file must have, if `offset` is known."""
        return (self.offset or 0) + nbytes(self.shape, self.dtype)


@dataclass(frozen=True)
class Field:
    """One entry of a batch."""

    stored: Stored
    lengths: Lengths | None = None
    """The number of rows of each sample. None: one row per sample."""

    ends: Lengths | None = None
    """The row after which each sample ends."""

    axes: tuple[Stored, Lengths] | None = None
    """If the rows of a sample are several axes in one, row by row: (the lengths of these axes, how many axes each sample
    has)."""

    @classmethod
    def with_lengths(cls, stored: Stored, lengths: npt.NDArray[Any]) -> Field:
        lengths = lengths.astype(np.int64)
        return cls(stored, lengths, np.cumsum(lengths))

    @property
    def total(self) -> int:
        """The sum of all lengths, in rows."""
        return int(self.ends[-1]) if self.ends is not None and len(self.ends) else 0

    @property
    def samples(self) -> int:
        return self.stored.shape[0] if self.lengths is None else len(self.lengths)


@dataclass(frozen=True)
class FileLayout:
    file: str
    samples: int
    fields: dict[str, Field]


def need_h5py() -> ModuleType:
    """The h5py module. Raises ConfigError if it is not installed."""
    try:
        return import_module("h5py")
    except ImportError:
        raise ConfigError("HDF5 files need h5py, which is not installed; type: pip install 'rankwise[hdf5]'") from None


def nbytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


@contextlib.contextmanager
def opened(path: str) -> Iterator[Any]:
    """An open h5py.File to read. Raises DataError, with the name of the file, if it is not an HDF5 file or is corrupted."""
    with explained(path), open_file(path) as file:
        yield file


def open_file(path: str) -> Any:
    """An open h5py.File. Files on a file system without locks can also be read."""
    h5py = need_h5py()
    if not is_remote(path):
        file = h5py.File(path, "r", locking="best-effort", rdcc_nbytes=0)  # no cache: whole chunks are read, once
        if file.id.get_intent() & h5py.h5f.ACC_RDWR:  # HDF5 shares what it has not written yet, but only with its own reads
            file.close()
            raise DataError(f"{path} is being written: this process has it open for writing; close it first (file.close())")
        return file
    file = h5py.File(RemoteHDF5(path), "r", rdcc_nbytes=0)
    _remote.add(file)
    return file


def open_bytes(path: str) -> io.RawIOBase:
    return RemoteFile(path) if is_remote(path) else io.FileIO(path)


_remote: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _close_remote() -> None:
    """Files that are still open when the interpreter exits kill the process with a signal (h5py 3.16)."""
    for file in list(_remote):
        file.close()


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Turns h5py's exceptions into a DataError with the name of the file."""
    try:
        yield
    except BlockingIOError:
        raise DataError(f"{path} is being written: another program has it open; wait until it closes the file") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a folder; give the files in it, for example '{path}/*.h5'") from None
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file") from None
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise DataError(f"{path} {_explained(error)}") from None


def _explained(error: Exception) -> str:
    text = " ".join(str(error).strip("'\"").split())
    if "signature not found" in text:
        return "is not an HDF5 file"
    if "truncated file" in text:
        return f"is truncated; copy it or create it again ({text})"
    if isinstance(error, OSError) and error.errno:
        return f"cannot be read: {errno.errorcode.get(error.errno, '')} {text}"
    return f"is corrupted, or its writer did not close it; copy it or create it again ({text})"


def read(path: str, fields: Sequence[str] | None, lengths: Mapping[str, str]) -> FileLayout:
    """`fields`: the names to read (`features_lengths` stands for `features`), None for all. `lengths`: by the name of a field,
    the name of the dataset with its lengths. Only lengths are read. Raises DataError for an inconsistent file, and ConfigError
    if `lengths` is not for this file."""
    from rankwise.hdf5 import returnn

    with opened(path) as file:
        is_returnn = _our_fields(file.get(OURS)) is None and returnn.is_one(file)  # our fields may have any names
        if is_returnn and lengths:
            raise ConfigError("lengths is for ordinary files, but a file of RETURNN has its own in seqLengths; remove lengths")
        found = returnn.fields_of(file, path, fields) if is_returnn else _plain(file, path, fields, lengths)
        samples = {name: field.samples for name, field in found.items()}
        for name, field in found.items():
            _check_lengths(path, name, field)
    if len(set(samples.values())) > 1:
        raise DataError(
            f"{path}: its datasets have different numbers of samples: "
            f"{listed((f'{k} {n}' for k, n in samples.items()), _SHOWN)}; give fields=[...] that belong together; for several "
            "rows per sample give lengths={'features': 'feature_lengths'}"
        )
    return FileLayout(path, next(iter(samples.values())), found)


def stored(file: Any, path: str, name: str) -> Stored:
    """The dataset of this name. Raises DataError if it is not a dataset of numbers or strings."""
    h5py = need_h5py()
    dataset = file.get(name)
    if not isinstance(dataset, h5py.Dataset):
        what = "a group" if isinstance(dataset, h5py.Group) else "not there"
        raise DataError(f"{path}: the dataset {name} is {what}; there {_there(file)}")
    if dataset.is_virtual:
        _check_sources(dataset, path, name)
    is_text = dataset.dtype.kind == "S" or h5py.check_string_dtype(dataset.dtype) is not None
    if not is_text and dataset.dtype.newbyteorder("=") not in _NUMBERS:
        raise DataError(f"{path}: {name} has the type {dataset.dtype}; only numbers, bool and strings can be read")
    if dataset.ndim == 0:
        raise DataError(f"{path}: {name} is a single value; a field has one or more rows per sample")
    chunk_rows = dataset.chunks[0] if dataset.chunks else 0
    # The offset of an external or empty dataset is missing or has no meaning; that of a link's target is one in another file.
    is_here = not dataset.external and h5py.h5f.get_name(dataset.id) == h5py.h5f.get_name(file.id)
    offset = dataset.id.get_offset() if is_here and has_bytes_of_numpy(dataset) else None
    return Stored(path, name, dataset.shape, dataset.dtype, is_text, offset, chunk_rows, identity=identity_of(path))


def _check_sources(dataset: Any, path: str, name: str) -> None:
    """HDF5 reads a virtual dataset as zeros where one of its files is missing."""
    for source in dataset.virtual_sources():
        file = source.file_name
        if file == "." or "%" in file:  # this file, or a pattern
            continue
        if is_remote(path) or not any(exists(Path(home, file)) for home in (Path(path).parent, ".")):
            raise DataError(
                f"{path}: {name} is a virtual dataset, and its data is in {file}, which is not beside it: HDF5 would read "
                "zeros; give HDF5Dataset the files with the data (cache= does not copy them for a virtual dataset)"
            )


def has_bytes_of_numpy(dataset: Any) -> bool:
    """Whether each element is stored as numpy has it in memory: bfloat16, an integer of 24 bits and some enums are not."""
    h5py = need_h5py()
    kind = dataset.dtype
    return kind.kind != "O" and bool(h5py.h5t.py_create(kind, logical=True) == dataset.id.get_type())


def identity_of(path: str) -> tuple[str, int, int, int] | None:
    """(host, inode, bytes, time): changes if the file is replaced or written. None for a URL."""
    if is_remote(path):
        return None
    found = os.stat(path)
    return platform.node(), found.st_ino, found.st_size, found.st_mtime_ns


def lengths_in(file: Any, path: str, name: str) -> npt.NDArray[Any]:
    """The lengths, one number per sample."""
    dataset = stored(file, path, name)
    if len(dataset.shape) != 1 or dataset.dtype.kind not in "iu":
        kind = "x".join(map(str, dataset.shape))
        raise DataError(f"{path}: {name} must have one integer per sample, but is {kind} of {dataset.dtype}")
    found: npt.NDArray[Any] = file[name][...]
    return found


def _check_lengths(path: str, name: str, field: Field) -> None:
    if field.lengths is None:
        return
    rows = field.stored.shape[0]
    if len(field.lengths) and field.lengths.min() < 0:
        at = int(field.lengths.argmin())
        raise DataError(f"{path}: the length of sample {at} of {name} is {field.lengths[at]}; lengths must be 0 or more")
    if field.total != rows:
        raise DataError(
            f"{path}: {name} has {count(rows, 'row')} ({field.stored.name}), but the lengths of its samples add up to "
            f"{field.total}"
        )


def bases(fields: Sequence[str], has: Callable[[str], bool]) -> list[str]:
    """The fields that these names require: `features` for `features_lengths`, unless there is a field with that very name."""
    found = [name if has(name) or not name.endswith(LENGTHS_SUFFIX) else name.removesuffix(LENGTHS_SUFFIX) for name in fields]
    return list(dict.fromkeys(found))


def _plain(file: Any, path: str, fields: Sequence[str] | None, lengths: Mapping[str, str]) -> dict[str, Field]:
    if unknown := [name for name in lengths if name not in file]:
        raise ConfigError(f"lengths has the field {unknown[0]!r}, which is not in the file; there {_there(file)}")
    ours = file.get(OURS)
    of = {**_our_lengths(ours), **lengths}
    names = bases(fields, file.__contains__) if fields is not None else _names(file, ours, set(of.values()))
    if not names:
        raise DataError(f"{path} has no dataset at the top level; there {_there(file)}; give fields=['group/name']")
    return {name: _field(file, path, name, of.get(name)) for name in names}


def _field(file: Any, path: str, name: str, lengths: str | None) -> Field:
    rows = stored(file, path, name)
    if lengths is None:
        return Field(rows)
    found = lengths_in(file, path, lengths)
    return Field.with_lengths(replace(rows, lengths=LengthsAt.of(found, lengths)), found)


def _our_lengths(ours: Any) -> dict[str, str]:
    return {name: f"{OURS}/lengths/{name}" for name in ours["lengths"]} if ours is not None and "lengths" in ours else {}


def _our_fields(ours: Any) -> list[str] | None:
    """The names of the fields in a file of HDF5Writer; None in other files, and in those that it wrote for RETURNN."""
    return [str(name) for name in ours.attrs["fields"]] if ours is not None and "fields" in ours.attrs else None


def _names(file: Any, ours: Any, taken: set[str]) -> list[str]:
    """The names that HDF5Writer wrote, or all datasets at the top of the file that have an axis; without `taken`."""
    names = _our_fields(ours)
    if names is None:
        names = [name for name, item in file.items() if getattr(item, "shape", ())]
    return [name for name in names if name not in taken]


def _there(file: Any) -> str:
    names = [name for name in file if name != OURS]
    return f"are {listed(names, _SHOWN)}" if len(names) > 1 else f"is {names[0]}" if names else "is nothing"
