"""What makes a checkpoint verifiable: sizes and checksums of its files, and of every tensor in them.

Neither torch.load nor safetensors checks what it reads: a flipped bit loads silently. xxh3-128 guards against accident, not
against tampering; that is what `weights_only` is for.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from rankwise.errors import CheckpointError

VERSION = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    bytes: int
    xxh3_128: str
    tensors: dict[str, str]
    """xxh3-128 of each tensor's bytes in memory, by its path in the state (`state/0/exp_avg`)."""


@dataclass(frozen=True)
class Manifest:
    """manifest.json; a directory without a readable one is no checkpoint."""

    version: int
    step: int
    world_size: int
    torch: str
    files: dict[str, FileRecord]
    info: dict[str, Any]
    """What differs from run to run and may change numbers: threads, precision, settings."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    """The figures that were measured at this very step; None for one that is not finite."""

    def text(self) -> str:
        """With a checksum of itself."""
        record = asdict(self)
        return json.dumps({**record, "xxh3_128": _record_sum(record)}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        path = folder / NAME
        try:
            record = json.loads(path.read_text())
            if record["version"] != VERSION:
                raise CheckpointError(f"{path}: version {record['version']}, this rankwise reads version {VERSION}")
            if record.pop("xxh3_128") != _record_sum(record):
                raise CheckpointError(f"{path} is damaged")
            record["files"] = {name: FileRecord(**file) for name, file in record["files"].items()}
            return cls(**record)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged ({error})") from None


def _record_sum(record: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(record, sort_keys=True).encode())


def tensors(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a nest of mappings and sequences, with its path."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from tensors(value, f"{path}/{key}" if path else str(key))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from tensors(value, f"{path}/{index}" if path else str(index))


def tensor_sum(tensor: torch.Tensor) -> str:
    """xxh3-128 of the elements' bytes in row-major order."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(data.numpy().data)


def file_sum(path: Path) -> str:
    """xxh3-128 of a whole file."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return xxhash.xxh3_128_hexdigest(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return xxhash.xxh3_128_hexdigest(data)


def verify(folder: Path) -> Manifest:
    """Read every byte. Raises CheckpointError that names the damaged file, and the tensor where that can be told."""
    manifest = Manifest.read(folder)
    for name, record in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != record.bytes:
                raise CheckpointError(f"{path} has {size} of {record.bytes} bytes")
            if file_sum(path) != record.xxh3_128:
                raise CheckpointError(f"{path} is damaged{_damaged_tensor(path, record)}")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    return manifest


def _damaged_tensor(path: Path, record: FileRecord) -> str:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        for name, tensor in tensors(state):
            if record.tensors.get(name) != tensor_sum(tensor):
                return f" in tensor {name}"
    except Exception as error:  # a damaged pickle raises one of many types
        return f" (it does not even load: {type(error).__name__})"
    return " outside its tensors"
