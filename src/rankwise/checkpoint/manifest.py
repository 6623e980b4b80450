"""The manifest of a checkpoint, and the verification by it: sizes and checksums of its files, and of every tensor in them.

Neither torch.load nor safetensors checks what it reads: a flipped bit loads silently. xxh3-128 guards against accident, not
against tampering; that is what `weights_only` is for. To read and verify needs no torch: a login node may have none.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from rankwise.errors import CheckpointError, DamagedError
from rankwise.host.text import listed

if TYPE_CHECKING:
    import torch

VERSION = 1
VERSION_WITH_RANKS = 3
"""Of a checkpoint that holds what ranks have apart: who does not know of it would resume another training."""

_READ = (VERSION, 2, VERSION_WITH_RANKS)  # 2: with all ranks in one file

NAME = "manifest.json"
_FIRST = "{\n"  # as `text` writes it; one that a person has brought into one line is held to its sum alone
_NAMED = 3  # damaged tensors of one file
_LARGE = 1 << 20  # bytes
_MOST_CORES = 16  # memory is what limits more of them


@dataclass(frozen=True)
class Layout:
    """What a tensor is, and where it lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    """Of its elements; several tensors may share them."""

    offset: int | None
    """Where its elements begin in the file; None where they do not lie there in row-major order, or there are none."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Layout:
        return cls(**{**record, "shape": tuple(record["shape"])})


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    bytes: int
    xxh3_128: str
    """Of the whole file; empty where `rest` and the tensors' sums say as much."""

    tensors: dict[str, str]
    """xxh3-128 of each tensor's bytes in memory, by its path in the state (`state/0/exp_avg`)."""

    layout: dict[str, Layout] = field(default_factory=dict)
    """By the same paths. Empty in checkpoints that are older than this field."""

    rest: str = ""
    """xxh3-128 of all bytes that lie in no tensor of `layout`: with the tensors' sums, which many cores can compare at once,
    each byte of the file is covered, and none is summed twice."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> FileRecord:
        layout = {name: Layout.of(tensor) for name, tensor in record.get("layout", {}).items()}
        return cls(**{**record, "layout": layout})


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

    best: dict[str, Any] = field(default_factory=dict)
    """`name` and `larger_is_better` of the figure by which the run chose its best; empty if it did not."""

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())

    def has(self, part: str) -> bool:
        return f"{part}.pt" in self.files

    def text(self) -> str:
        """With a checksum of itself."""
        record = asdict(self)
        return _as_text({**record, "xxh3_128": _record_sum(record)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        path = folder / NAME
        try:
            text = path.read_text()
            record = json.loads(text)
            if record["version"] not in _READ:
                raise CheckpointError(
                    f"{path} has version {record['version']}, and this rankwise reads "
                    f"{listed(map(str, _READ), last=' and ')}; use a newer rankwise"
                )
            # Not a byte may differ, though it says the same (1e-05 and 1E-05): who damaged one byte may have damaged others.
            if text.startswith(_FIRST) and text != _as_text(record):
                raise CheckpointError(f"{path} is corrupted")
            if record.pop("xxh3_128") != _record_sum(record):
                raise CheckpointError(f"{path} is corrupted")
            record["files"] = {name: FileRecord.of(file) for name, file in record["files"].items()}
            return cls(**record)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is corrupted ({error})") from None


def _as_text(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=1) + "\n"


def _record_sum(record: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(record, sort_keys=True).encode())


def saved_at(folder: Path) -> float:
    """Seconds since 1970. A copy that keeps no times has its own."""
    return (folder / NAME).stat().st_mtime


def tensors(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a nest of mappings and sequences, with its path."""
    import torch

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
    import torch

    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(data.numpy().data)


def file_sum(path: Path) -> str:
    """xxh3-128 of a whole file."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return xxhash.xxh3_128_hexdigest(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return xxhash.xxh3_128_hexdigest(data)


def rest_sum(path: Path, layout: Mapping[str, Layout]) -> str:
    """xxh3-128 of the bytes of a file that lie in none of these tensors."""
    with _mapped(path) as view:
        return _rest_sum(view, layout)


def _rest_sum(view: memoryview, layout: Mapping[str, Layout]) -> str:
    total = xxhash.xxh3_128()
    for begin, end in rest(layout, len(view)):
        total.update(view[begin:end])
    return total.hexdigest()


def rest(layout: Mapping[str, Layout], size: int) -> Iterator[tuple[int, int]]:
    """The parts of a file, (begin, end), that lie in none of these tensors."""
    done = 0
    for begin, length in sorted((at.offset, at.bytes) for at in layout.values() if at.offset is not None):
        if begin > done:  # tensors may share memory
            yield done, begin
        done = max(done, begin + length)
    yield done, size


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    """The bytes of a file that is not empty."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
        yield view


def verify(folder: Path) -> Manifest:
    """Read every byte. Raises DamagedError that names the damaged file, and the tensor where that can be told."""
    manifest = Manifest.read(folder)
    for text in damages(folder, manifest):
        raise DamagedError(text)
    return manifest


def glance(folder: Path) -> Manifest:
    """As `verify`, of the manifest and the lengths of the files alone."""
    manifest = Manifest.read(folder)
    for name, record in manifest.files.items():
        if text := length_damage(folder / name, record):
            raise DamagedError(text)
    return manifest


def damages(folder: Path, manifest: Manifest, only: str | None = None) -> Iterator[str]:
    """What is wrong with each file, or with one, in the words of an error. Reads every byte, on all cores."""
    for name, record in manifest.files.items():
        if only in (None, name) and (found := damage(folder / name, record)):
            yield found


def damage(path: Path, record: FileRecord) -> str:
    """What is wrong with one file; empty if nothing is."""
    if found := length_damage(path, record):
        return found
    try:
        with ThreadPoolExecutor(cores(), "rankwise-verify") as pool:
            place = _damage(path, record, pool)
        return f"{path} is corrupted{place}" if place else ""
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"


def length_damage(path: Path, record: FileRecord) -> str:
    """What is wrong with a file that is not looked into; empty if nothing is."""
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return f"{path} has {size} of {record.bytes} bytes{_cut_tensors(record, size)}" if size != record.bytes else ""


def cores() -> int:
    """How many threads read and sum."""
    return min(len(os.sched_getaffinity(0)), _MOST_CORES)


def _cut_tensors(record: FileRecord, size: int) -> str:
    found = [n for n, at in record.layout.items() if at.offset is not None and at.offset + at.bytes > size]
    if not found:
        return ""
    return f", it ends in tensor {found[0]}" if len(found) == 1 else f", it ends before tensors {listed(found, _NAMED)}"


def _damage(path: Path, record: FileRecord, pool: Executor) -> str:
    """Where it is, empty if nothing is. The file is as long as it was."""
    if not record.rest and file_sum(path) == record.xxh3_128:
        return ""
    placed = {name: at for name, at in record.layout.items() if at.offset is not None}
    with _mapped(path) as view:

        def is_damaged(name: str) -> bool:
            begin = placed[name].offset
            assert begin is not None
            return xxhash.xxh3_128_hexdigest(view[begin : begin + placed[name].bytes]) != record.tensors[name]

        # To hand over a small one takes longer than to sum it.
        large = [name for name, at in placed.items() if at.bytes >= _LARGE]
        damaged = dict(zip(large, pool.map(is_damaged, large), strict=True))
        damaged |= {name: is_damaged(name) for name in placed if name not in damaged}
        rest_is_whole = bool(record.rest) and _rest_sum(view, placed) == record.rest
    found = [name for name in placed if damaged[name]]
    if not found and rest_is_whole:
        return ""
    if not found and placed.keys() != record.tensors.keys():
        try:
            found = _damaged_when_loaded(path, record)
        except Exception as error:  # a damaged pickle raises one of many types; or there is no torch here
            return f" (it cannot be loaded: {type(error).__name__})"
    return where(found)


def where(damaged: list[str]) -> str:
    """What comes after `is damaged`."""
    if not damaged:
        return " outside its tensors"
    return f" in tensor {damaged[0]}" if len(damaged) == 1 else f" in tensors {listed(damaged, _NAMED)}"


def _damaged_when_loaded(path: Path, record: FileRecord) -> list[str]:
    """For tensors of which the place is not known."""
    import torch

    state = torch.load(path, map_location="cpu", weights_only=True)
    return [name for name, tensor in tensors(state) if record.tensors.get(name) != tensor_sum(tensor)]
