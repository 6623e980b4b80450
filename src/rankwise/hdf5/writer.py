"""Writes HDF5 files of samples, one sample at a time. The file is complete, or it does not exist.

    with HDF5Writer("train.h5") as writer:
        for image, label in images:
            writer.add(image=image, label=label)

Until `close`, added samples are in a folder beside the file. `close` writes the rows of each field one after the other to a
single file, with checksums, and then gives it its name. So the disk needs twice the space of the data.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import shutil
import uuid
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import psutil
import torch

from rankwise.errors import ConfigError, DataError
from rankwise.hdf5 import checksums, returnn
from rankwise.hdf5.layout import OURS, nbytes, need_h5py, read
from rankwise.host import processes
from rankwise.host.arguments import FLAG, MAPPING, PATH, SEQUENCE, one_of, shown, takes
from rankwise.host.disk import fsync, is_folder
from rankwise.host.text import count, listed, size

_ALIGNED = {"alignment_threshold": 65536, "alignment_interval": 4096}
_VERSIONS = ("earliest", "v110")  # h5dump of Debian stable reads these files, but not those of "latest"
_CHUNK_BYTES = 1 << 19

_MOST_FIELDS = 4000  # an attribute has their names: 16 bytes each, and at most 64 kB together

_OPEN_IN_CLOSE = 8
"""More than the files that `close` has open beside those of the fields: it must not fail when all samples are there."""

_PADDED_BYTES, _PADDED = 16 << 20, 8
"""Texts are padded to one length if this takes at most so many bytes, or so many times the bytes of the texts."""

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""What a file system without hard links answers; AFS answers EXDEV because the two names are in different folders."""


class HDF5Writer:
    """Writes `path` when it is closed. If the `with` block raises, nothing is written.

    The first sample sets the fields and their types. Fields are arrays, tensors, numbers or str. Python's numbers are
    stored as int64, float32 or bool, those of numpy and torch keep their type. If samples differ in the first axis of a field,
    its rows are stored one after the other, with the lengths of the samples. `variable` names fields that are stored like this
    even if their samples do not differ. `compress`: "gzip", which is read by whole chunks and much slower; None: rows are read
    at the speed of memory. `layout`: "returnn" for RETURNN's HDFDataset: the field `data` is its inputs, `tag` (a str) its
    sequence tag, others its targets. `dims`: the number of classes of sparse fields.

    Raises ConfigError if the file already exists, at the beginning or in `close` (`overwrite` replaces it), if it is a
    folder, or if arguments contradict each other. Raises DataError for a sample that cannot be stored or does not match the
    samples before, and if the file cannot be written.
    """

    @takes(
        path=PATH, variable=SEQUENCE, compress=one_of("gzip").or_none, layout=one_of("plain", "returnn"), dims=MAPPING.or_none,
        overwrite=FLAG,
    )  # fmt: skip
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        variable: Collection[str] = (),
        compress: str | None = None,
        layout: str = "plain",
        dims: Mapping[str, int] | None = None,
        overwrite: bool = False,
    ) -> None:
        need_h5py()
        self._given = Path(path)  # for messages
        self._path = self._given.absolute()  # the script may change its folder before `close`
        self._overwrite = overwrite
        if is_folder(self._path):
            raise ConfigError(f"{self._given} is a folder; give the name of a file in it: {self._given / 'train.h5'}")
        if not overwrite and os.path.lexists(self._path):
            raise self._exists()
        if layout == "returnn" and compress is not None:
            raise ConfigError("layout='returnn' is written without compression; remove compress")
        self._variable, self._compress, self._dims = frozenset(variable), compress, dict(dims or {})
        self._is_returnn = layout == "returnn"
        self._fields: dict[str, _Spool] = {}
        self._samples = 0
        try:
            self._folder: Path | None = _make_folder(self._path)
        except OSError as error:
            raise DataError(f"{self._given} cannot be written: {_reason(error)} ({self._given.parent})") from None

    def __enter__(self) -> HDF5Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self.discard()
        elif self._folder is not None:  # the block may have closed it
            self.close()

    def add(self, **fields: Any) -> None:
        """Add one sample."""
        self._check_names(fields)
        for name, value in fields.items():
            if isinstance(value, str) and (why := _no_text(value)):
                raise DataError(f"sample {self._samples} cannot be stored: {name} is {shown(value)}, {why}")
        try:
            values = {name: _as_array(name, value) for name, value in fields.items()}
        except DataError as error:
            raise DataError(f"sample {self._samples} cannot be stored: {error}") from None
        if not self._fields:
            self._open_spools(values)
        for name, value in values.items():
            if not value.size and isinstance(fields[name], list | tuple) and not self._fields[name].is_text:
                values[name] = value.astype(self._fields[name].dtype)  # an empty list has numbers of any type
            self._fields[name].check(values[name], self._samples)
        try:
            for name, value in values.items():
                self._fields[name].add(value)
        except OSError as error:
            self.discard()
            raise DataError(f"{self._given} cannot be written: {_reason(error)}") from None
        except BaseException:  # Ctrl-C, after which a script may close what it has written so far
            for spool in self._fields.values():
                spool.cut(self._samples)
            raise
        self._samples += 1

    def _open_spools(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        try:
            for number, (name, value) in enumerate(values.items()):
                self._fields[name] = _Spool(name, value, self._open_folder() / f"{number}.rows", self._is_long(name))
            with contextlib.ExitStack() as spare:
                for _ in range(_OPEN_IN_CLOSE):
                    spare.enter_context(open(os.devnull, "rb"))
        except OSError as error:
            self.discard()
            why = _reason(error)
            if error.errno == errno.EMFILE:
                fields = count(len(values), "field")
                why = (
                    f"samples have {fields}, each needs an open file, but {why}; raise the limit, or use arrays of many values"
                )
            raise DataError(f"{self._given} cannot be written: {why}") from None

    def _is_long(self, name: str) -> bool:
        return name in self._variable or (self._is_returnn and name != returnn.TAG)

    def _open_folder(self) -> Path:
        if self._folder is None:
            raise ConfigError(f"the writer of {self._given} is closed")
        return self._folder

    def _check_names(self, fields: Mapping[str, Any]) -> None:
        self._open_folder()
        if self._fields and fields.keys() != self._fields.keys():
            odd = listed(sorted(fields.keys() ^ self._fields.keys()))
            raise DataError(f"sample {self._samples} does not have the same fields as the samples before: {odd}")
        if not fields:
            raise DataError("a sample needs at least one field; type writer.add(image=..., label=...)")
        if wrong := [name for name in fields if name in ("", OURS) or "/" in name or name.startswith(".") or _no_text(name)]:
            raise DataError(f"a field cannot be called {wrong[0]!r}: HDF5 or rankwise cannot use this name; choose another")
        if self._is_returnn and not isinstance(fields.get(returnn.TAG), str):
            raise DataError("layout='returnn' needs tag=..., the sequence tag (a str), in each sample")
        if not self._is_returnn and len(fields) > _MOST_FIELDS:
            raise DataError(f"a sample has {len(fields)} fields, but at most {_MOST_FIELDS} fit; use arrays of many values")
        if self._is_returnn and returnn.SIZES in fields:
            raise DataError("layout='returnn': RETURNN reads a field `sizes` as the axes of `data`; give it another name")
        if self._is_returnn and len(fields) == 1:
            raise DataError("layout='returnn' needs a field besides tag=...: data=..., the inputs, or a target")
        if unknown := self._variable - fields.keys():
            raise ConfigError(
                f"variable has {listed(sorted(unknown))}, which samples do not have; their fields are {listed(fields)}"
            )

    def discard(self) -> None:
        """Write no file, and remove what was added."""
        for spool in self._fields.values():
            with contextlib.suppress(OSError):  # it writes what is buffered, and the disk may be full
                spool.file.close()
            with contextlib.suppress(OSError):
                Path(spool.file.name).unlink()
        if self._folder is not None:
            with contextlib.suppress(OSError):  # rmtree opens the folder, and this process may have no free file descriptor
                self._folder.rmdir()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def close(self) -> None:
        """Write the file. Raises DataError if there is no sample, or not enough space, and ConfigError if there is a file of
        this name by now. Then nothing is written."""
        folder = self._open_folder()
        try:
            if not self._samples:
                raise DataError(f"{self._given} is not written because no sample was added")
            self._write(folder / "whole.h5")
            read(str(folder / "whole.h5"), None, {})
            fsync(folder / "whole.h5")
            self._give_name(folder / "whole.h5")
            fsync(self._path.parent)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{self._given} cannot be written: {_reason(error)}") from None
        finally:
            self.discard()

    def _give_name(self, whole: Path) -> None:
        """Raises ConfigError if another writer has written a file of this name meanwhile. Only a link refuses to replace it."""
        if self._overwrite:
            whole.replace(self._path)
            return
        try:
            os.link(whole, self._path)
        except FileExistsError:
            # NFS may repeat a request whose answer was lost: then this is our own link.
            if not (self._path.exists() and self._path.samefile(whole)):
                raise self._exists() from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(self._path):
                raise self._exists() from None
            whole.rename(self._path)

    def _exists(self) -> ConfigError:
        return ConfigError(f"{self._given} exists already; choose another name, or replace it with overwrite=True")

    # --- the file

    def _write(self, path: Path) -> None:
        for spool in self._fields.values():
            spool.file.flush()
        needed = sum(spool.bytes for spool in self._fields.values())
        if (free := shutil.disk_usage(path.parent).free) < needed:
            raise DataError(f"{self._given} cannot be written: it needs {size(needed)}, but only {size(free)} are free there")
        with need_h5py().File(path, "w", libver=_VERSIONS, **_ALIGNED) as file:
            places = self._create(file)
        with path.open("r+b") as raw:
            for spool, offset, sums_offset in places:
                sums = spool.pour(raw, offset)
                if sums_offset is not None:
                    raw.seek(sums_offset)
                    raw.write(sums.tobytes())

    def _create(self, file: Any) -> list[tuple[_Spool, int, int | None]]:
        """Create the file without the rows; returns (the data of a field, its place in the file, the place of its checksums)
        for each."""
        places: list[tuple[_Spool, int, int | None]] = []
        homes = _returnn_homes(self._fields) if self._is_returnn else {name: name for name in self._fields}
        for name, spool in self._fields.items():
            if spool.is_text:
                _put_text(file, homes[name], spool.texts)
                checksums.add(file, homes[name])
            elif self._compress is not None and spool.bytes:
                spool.compress_into(file, homes[name], self._compress)
            else:
                offset = _reserve(file, homes[name], spool.shape, spool.dtype)
                if offset is not None:
                    sums = _reserve(
                        file, f"{checksums.HOME}/{homes[name]}", (-(-spool.bytes // checksums.PIECE),), np.dtype("<u4")
                    )
                    places.append((spool, offset, sums))
        if self._is_returnn:
            _describe_for_returnn(file, self._fields, self._dims)
            checksums.add(file, "seqLengths")
        else:
            ours = file.require_group(OURS)
            ours.attrs["fields"] = list(self._fields)
            for name, spool in self._fields.items():
                if spool.is_uneven:
                    ours.create_dataset(f"lengths/{name}", data=np.array(spool.lengths, "<i8"))
                    checksums.add(file, f"{OURS}/lengths/{name}")
        return places


class _Spool:
    """The values that were added to one field."""

    def __init__(self, name: str, first: npt.NDArray[Any], path: Path, is_long: bool) -> None:
        self.name = name
        self.is_text = first.dtype == object
        self._is_long = is_long
        if is_long and first.ndim == 0:
            first = first.reshape(1)
        self.dtype = first.dtype.newbyteorder("<")
        self.row_shape = first.shape[1:] if first.ndim else ()
        self._is_scalar = first.ndim == 0
        self.lengths: list[int] = []
        self.texts: list[str] = []
        self.bytes = 0
        self.file: BinaryIO = path.open("w+b")

    def check(self, value: npt.NDArray[Any], sample: int) -> None:
        """Raises DataError if the value does not match the samples before."""
        shape = (1,) if self._is_long and value.ndim == 0 else value.shape
        fits = (len(shape) == 0) == self._is_scalar and shape[1:] == self.row_shape
        if value.dtype.newbyteorder("<") == self.dtype and fits:
            return
        ours = "a single value" if self._is_scalar else " x ".join(["any", *map(str, self.row_shape)])
        theirs = " x ".join(map(str, shape)) or "a single value"
        raise DataError(
            f"sample {sample} does not fit the samples before: {self.name} is {theirs} of {value.dtype}, but was {ours} of "
            f"{self.dtype}"
        )

    def add(self, value: npt.NDArray[Any]) -> None:
        if self.is_text:
            self.texts.append(value.item())
            self.lengths.append(1)
            return
        content = np.ascontiguousarray(value, self.dtype).tobytes()
        self.file.write(content)
        self.bytes += len(content)
        self.lengths.append(len(value) if value.ndim else 1)

    def cut(self, samples: int) -> None:
        """Keep only this number of samples."""
        del self.lengths[samples:], self.texts[samples:]
        if not self.is_text:
            self.bytes = sum(self.lengths) * nbytes(self.row_shape, self.dtype)
            self.file.seek(self.bytes)
            self.file.truncate()

    @property
    def is_uneven(self) -> bool:
        """Whether rows are stored one after the other, with lengths."""
        return not self.is_text and not self._is_scalar and (self._is_long or len(set(self.lengths)) > 1)

    @property
    def shape(self) -> tuple[int, ...]:
        if self.is_uneven:
            return (sum(self.lengths), *self.row_shape)
        return (len(self.lengths),) if self._is_scalar else (len(self.lengths), self.lengths[0], *self.row_shape)

    def pour(self, raw: BinaryIO, offset: int) -> npt.NDArray[np.uint32]:
        """Copy all rows to `offset` in a file, and return their checksums."""
        sums = []
        raw.seek(offset)
        for piece in checksums.pieces(self.file, 0, self.bytes):
            sums.append(zlib.crc32(piece))
            raw.write(piece)
        return np.array(sums, "<u4")

    def compress_into(self, file: Any, home: str, kind: str) -> None:
        row_bytes = max(nbytes(self.shape[1:], self.dtype), 1)
        chunk_rows = min(max(_CHUNK_BYTES // row_bytes, 1), self.shape[0])
        dataset = file.create_dataset(
            home, self.shape, self.dtype, chunks=(chunk_rows, *self.shape[1:]), compression=kind, compression_opts=1,
            shuffle=self.dtype.itemsize > 1, fletcher32=True,
        )  # fmt: skip
        self.file.seek(0)
        for start in range(0, self.shape[0], chunk_rows):
            rows = min(chunk_rows, self.shape[0] - start)
            block = np.frombuffer(self.file.read(rows * row_bytes), self.dtype)
            dataset[start : start + rows] = block.reshape(rows, *self.shape[1:])


def _no_text(text: str) -> str | None:
    """Why HDF5 cannot store this text; None if it can."""
    if "\0" in text:
        return "which has a NUL character, where HDF5 would cut it off; remove the character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "which is not valid Unicode, so there is no UTF-8 of it; decode the bytes with their own encoding"
    return None


def _as_array(name: str, value: Any) -> npt.NDArray[Any]:
    """The value as an array; a string as a single object. Raises DataError if HDF5 has no type for it."""
    if isinstance(value, str):
        return np.array(value, dtype=object)
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        raise DataError(f"{name} is bfloat16, which HDF5 does not have; give it as .half() or .float()")
    try:
        found = np.asarray(value.numpy(force=True) if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:  # lists of different lengths, sparse tensors, types of torch alone
        why = " ".join(str(error).split())[:200]
        raise DataError(f"{name} cannot be converted to a numpy array ({why}); give numbers, bool, or a str") from None
    if found.dtype == np.float64 and isinstance(value, float | list | tuple) and _is_plain(value):
        found = found.astype(np.float32)  # like torch.tensor
    if found.dtype.kind not in "biufc" or found.dtype.itemsize > 16 or found.dtype in (np.longdouble,):
        raise DataError(f"{name} is of {found.dtype}; give numbers, bool, or a str")
    return found


def _is_plain(value: Any) -> bool:
    """Whether all numbers in it are Python's own: np.float64 is a subclass of float, and keeps its type."""
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else type(value) in (float, int, bool)


def _reserve(file: Any, home: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int | None:
    """Create a contiguous dataset and allocate its space, without writing to it. Returns its place, None if it is empty."""
    h5py = need_h5py()
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    kind = h5py.h5t.py_create(dtype, logical=True)
    dataset = h5py.h5d.create(file.id, home.encode(), kind, h5py.h5s.create_simple(shape), properties, links)
    return dataset.get_offset() if all(shape) else None


def _put_text(file: Any, home: str, texts: list[str]) -> None:
    """As UTF-8 strings of one length: they are read a hundred times as fast as strings of different lengths. But not if a few
    long ones would make the file many times as large."""
    content = [text.encode() for text in texts]
    longest = max(map(len, content))
    if longest * len(content) > max(_PADDED_BYTES, _PADDED * sum(map(len, content))):
        file.create_dataset(home, data=np.array(content, object), dtype=need_h5py().string_dtype("utf-8"))
        return
    kind = need_h5py().string_dtype("utf-8", max(longest, 1))
    file.create_dataset(home, data=np.array(content, kind), dtype=kind)


def _reason(error: Exception) -> str:
    """The reason in a few words: h5py's own text is long, and names the temporary file."""
    if isinstance(error, OSError) and error.errno:
        return processes.shortage(error) or os.strerror(error.errno)
    return " ".join(str(error).split())


# --- RETURNN's layout


def _returnn_homes(fields: Mapping[str, _Spool]) -> dict[str, str]:
    known = {returnn.INPUTS: "inputs", returnn.TAG: "seqTags"}
    return {name: known.get(name, f"targets/data/{name}") for name in fields}


def _describe_for_returnn(file: Any, fields: Mapping[str, _Spool], dims: Mapping[str, int]) -> None:
    inputs = fields.get(returnn.INPUTS)
    targets = sorted(name for name in fields if name not in (returnn.INPUTS, returnn.TAG))
    columns = [fields[name].lengths for name in ([returnn.INPUTS] if inputs is not None else []) + targets]
    if inputs is not None and not targets:
        columns.append([0] * len(inputs.lengths))  # for `classes`, which readers count although it does not exist
    lengths = np.array(columns, np.int64).T
    if lengths.max(initial=0) > np.iinfo(np.int32).max:
        raise DataError(
            f"layout='returnn': a sequence has {count(int(lengths.max()), 'row')}, more than its lengths (int32) can hold"
        )
    file.create_dataset("seqLengths", data=lengths.astype("<i4"))
    steps = int(lengths[:, 0].sum()) if inputs is not None else 0
    dim = _dim(inputs, dims) if inputs is not None else 1
    file.attrs.update(numTimesteps=steps, inputPattSize=dim, numDims=1, numLabels=dim, numSeqs=len(lengths))
    for group in ("targets/data", "targets/size", "targets/labels") if targets else ():
        file.require_group(group)
    for name in targets:
        spool = fields[name]
        file["targets/size"].attrs[name] = [1, 1] if spool.is_text else [_dim(spool, dims), len(spool.row_shape) + 1]


def _dim(spool: _Spool, dims: Mapping[str, int]) -> int:
    """The number of features of a dense field; for a sparse field the given number of classes."""
    return int(spool.row_shape[-1]) if spool.row_shape else int(dims.get(spool.name, 1))


# --- the folder for the added samples


def _make_folder(path: Path) -> Path:
    """Create a folder beside the file, and remove those of killed writers. Raises OSError."""
    begin = f".{path.name}.writing-{platform.node()}-"
    with contextlib.suppress(OSError):  # a folder that cannot be listed
        for other in path.parent.iterdir():
            # The whole name, because the folders of host node-1 begin like those of host node.
            found = re.fullmatch(re.escape(begin) + r"(\d+)-[0-9a-f]{6}", other.name)
            if found is not None and not psutil.pid_exists(int(found[1])):
                shutil.rmtree(other, ignore_errors=True)
    folder = path.parent / f"{begin}{os.getpid()}-{uuid.uuid4().hex[:6]}"
    folder.mkdir()
    return folder
