"""One file of a checkpoint: the space for it reserved, written, summed, flushed, and read again.

record = write_file(folder / "model.pt", make_plain(model.state_dict(), "model"))
"""

from __future__ import annotations

import errno
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.manifest import FileRecord, Layout, tensors
from rankwise.checkpoint.reader import storages
from rankwise.errors import CheckpointError, ConfigError
from rankwise.training.state import Stateful


def collect_states(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """What each part gives. Raises ConfigError for a tensor that is not strided (a sparse one), by its path: no later save
    could hold it either."""
    states = {name: part.state_dict() for name, part in parts.items()}
    for path, tensor in manifests.tensors(states):
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"{path} is a tensor of the layout {tensor.layout}, which a checkpoint cannot hold; let state_dict give what "
                "it is made of (its indices and values), or tensor.to_dense()"
            )
    return states


def make_plain(state: Any, path: str) -> Any:
    """The state without numpy's numbers, which `weights_only` would refuse to read; an array is refused here, by its path."""
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, np.ndarray):
        raise CheckpointError(f"{path} is a numpy array, which could not be loaded again; keep it as a tensor")
    if isinstance(state, dict):
        changed = {key: new for key, value in state.items() if (new := make_plain(value, f"{path}/{key}")) is not value}
        if changed:
            state = state.copy()
            state.update(changed)
    elif isinstance(state, list | tuple) and not hasattr(state, "_fields"):
        parts = [make_plain(value, f"{path}/{index}") for index, value in enumerate(state)]
        if any(new is not old for new, old in zip(parts, state, strict=True)):
            return type(state)(parts)
    return state


def write_file(path: Path, state: Any) -> FileRecord:
    """Reserve the space, write, make it durable. An OSError for want of space comes before anything is written."""
    sums = {name: manifests.tensor_sum(tensor) for name, tensor in manifests.tensors(state)}
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, _size(state))
        torch.save(state, file)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    try:
        again = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many types: what cannot be loaded again is no checkpoint
        text = " ".join(str(error).split())
        raise CheckpointError(f"{path.stem} could not be loaded again: {text[:300]}") from None
    places = {name: at for name, at in locate_tensors(path, again).items() if name in sums}
    return FileRecord(size, "", sums, places, manifests.rest_sum(path, places))


def locate_tensors(path: Path, mapped: Any) -> dict[str, Layout]:
    """Where each tensor lies in a file, by its path, so that a damaged one is named without the pickle around it.

    `mapped`: what `torch.load(path, mmap=True)` gave.
    """
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


def _size(state: Any) -> int:
    """Bytes that a state needs on disk, to within a few per cent: its tensors, and what else is in it."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in manifests.tensors(state)}
    return sum(storages.values()) + 256 * len(storages) + 4096 + _size_of_others(state)


def _size_of_others(state: Any) -> int:
    if isinstance(state, Mapping):
        return sum(_size_of_others(key) + _size_of_others(value) for key, value in state.items())
    if isinstance(state, list | tuple | set):
        return sum(map(_size_of_others, state))
    return len(state) if isinstance(state, str | bytes) else 2


def explain_failure(final: Path, states: Mapping[str, Any], error: OSError | RuntimeError) -> str:
    need = sum(map(_size, states.values()))
    parent = next(p for p in final.parents if p.exists())
    free = shutil.disk_usage(parent).free
    if isinstance(error, RuntimeError):
        if free > need:
            return f"cannot write {final}: {error}"
    elif error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write {final}: {error.strerror}"
    return f"cannot write {final}: it needs {need / 1e6:.1f} MB and {free / 1e6:.1f} MB are free there"
