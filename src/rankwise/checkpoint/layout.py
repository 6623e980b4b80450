"""Where the tensors of a torch file lie in it: so that a damaged one is named, and read, without the pickle around it."""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path
from typing import Any

from rankwise.checkpoint.manifest import Layout, tensors

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")  # of a zip's entry: the last two are the lengths of its name and its extra field


def layout(path: Path, mapped: Any) -> dict[str, Layout]:
    """Of each tensor, by its path. `mapped`: what `torch.load(path, mmap=True)` gave."""
    found = dict(tensors(mapped))
    first = min((t.untyped_storage().data_ptr() for t in found.values() if t.untyped_storage().nbytes()), default=0)
    # The file is mapped in one piece: addresses differ as offsets do. One of them must be known.
    base = first - _first_storage(path) if first else 0
    places = {}
    for name, tensor in found.items():
        lies_there = tensor.is_contiguous() and tensor.numel()
        offset = tensor.data_ptr() - base if lies_there else None
        kind = str(tensor.dtype).removeprefix("torch.")
        places[name] = Layout(kind, tuple(tensor.shape), tensor.numel() * tensor.element_size(), offset)
    return places


def _first_storage(path: Path) -> int:
    """The offset of the first storage that is not empty."""
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        return min(offset for offset, size in storages(archive, file.fileno()).values() if size)


def storages(archive: zipfile.ZipFile, fd: int) -> dict[str, tuple[int, int]]:
    """(offset, bytes) of each storage in the file `fd`, by its key in the pickle. Raises ValueError where one is compressed."""
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
