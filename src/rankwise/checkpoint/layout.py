"""Where the tensors of a torch file lie in it: so that a damaged one is named, and read, without the pickle around it."""

from __future__ import annotations

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
    with zipfile.ZipFile(path) as archive:
        storages = (e for e in archive.infolist() if e.filename.split("/")[-2:-1] == ["data"] and e.file_size)
        entry = min(storages, key=lambda e: e.header_offset)
    with path.open("rb") as file:
        file.seek(entry.header_offset)
        *_, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return entry.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)
