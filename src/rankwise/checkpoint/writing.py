"""One file of a checkpoint: the space for it reserved, written, summed, flushed, and read again.

record = write_file(folder / "model.pt", plain(model.state_dict(), "model"))
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.layout import layout
from rankwise.checkpoint.manifest import FileRecord
from rankwise.errors import CheckpointError, ConfigError
from rankwise.training.state import Stateful


def states_of(parts: Mapping[str, Stateful]) -> dict[str, Any]:
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


def plain(state: Any, path: str) -> Any:
    """The state without numpy's numbers, which `weights_only` would refuse to read; an array is refused here, by its path."""
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, np.ndarray):
        raise CheckpointError(f"{path} is a numpy array, which could not be loaded again; keep it as a tensor")
    if isinstance(state, dict):
        changed = {key: new for key, value in state.items() if (new := plain(value, f"{path}/{key}")) is not value}
        if changed:
            state = state.copy()
            state.update(changed)
    elif isinstance(state, list | tuple) and not hasattr(state, "_fields"):
        parts = [plain(value, f"{path}/{index}") for index, value in enumerate(state)]
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
    places = {name: at for name, at in layout(path, again).items() if name in sums}
    return FileRecord(size, "", sums, places, manifests.rest_sum(path, places))


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


def why_not(final: Path, states: Mapping[str, Any], error: OSError | RuntimeError) -> str:
    need = sum(map(_size, states.values()))
    parent = next(p for p in final.parents if p.exists())
    free = shutil.disk_usage(parent).free
    if isinstance(error, RuntimeError):
        if free > need:
            return f"cannot write {final}: {error}"
    elif error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write {final}: {error.strerror}"
    return f"cannot write {final}: it needs {need / 1e6:.1f} MB and {free / 1e6:.1f} MB are free there"
