"""The manifest of a checkpoint: sizes and checksums of its files and of every tensor in them, and how to verify them.

Neither torch.load nor safetensors checks what it reads: a flipped bit is loaded without notice. xxh3-128 protects against
accidents, not against attackers; against these, use `weights_only`. Reading and verifying need no torch: a login node may not
have it.
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

from rankwise.errors import CheckpointError, ConfigError, DamagedError, UnreadableError
from rankwise.host.arguments import shown
from rankwise.host.text import listed

if TYPE_CHECKING:
    import torch

VERSION = 1
VERSION_WITH_RANKS = 3
"""For a checkpoint with a state per rank: a version of rankwise that does not know this state would not resume the same
training."""

_READ = (VERSION, 2, VERSION_WITH_RANKS)  # 2: with all ranks in one file

NAME = "manifest.json"
_FIRST = "{\n"  # the form that `text` writes; if the user has reformatted the file, only its checksum is compared
_NAMED = 3  # a message lists this many corrupted tensors of a file
_LARGE = 1 << 20  # bytes
_MOST_CORES = 16  # with more, memory is the limit


@dataclass(frozen=True)
class Layout:
    """The type and shape of a tensor, and its place in the file."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    """The size of its elements; several tensors may share them."""

    offset: int | None
    """The place of its elements in the file; None if they are not there in row-major order, or there are none."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Layout:
        return cls(**{**record, "shape": tuple(record["shape"])})


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    bytes: int
    xxh3_128: str
    """The sum of the whole file; empty if `rest` and the sums of the tensors are used instead."""

    tensors: dict[str, str]
    """xxh3-128 of each tensor's bytes in memory, by its path in the state (`state/0/exp_avg`)."""

    layout: dict[str, Layout] = field(default_factory=dict)
    """By the same paths. Older checkpoints do not have this field; then it is empty."""

    rest: str = ""
    """xxh3-128 of all bytes outside the tensors of `layout`. Together with the sums of the tensors, which many cores can
    compute at once, this covers each byte of the file exactly once."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> FileRecord:
        layout = {name: Layout.of(tensor) for name, tensor in record.get("layout", {}).items()}
        return cls(**{**record, "layout": layout})


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json. A directory without a readable manifest is not a checkpoint."""

    version: int
    step: int
    world_size: int
    torch: str
    files: dict[str, FileRecord]
    info: dict[str, Any]
    """What may differ between runs and change results: threads, precision, settings."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    """The metrics that were measured at this step; None for one that is not finite."""

    best: dict[str, Any] = field(default_factory=dict)
    """`name` and `larger_is_better` of the metric by which the run keeps its best; empty if there is none."""

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())

    def has(self, part: str) -> bool:
        return f"{part}.pt" in self.files

    def text(self) -> str:
        """The manifest as JSON, with a checksum of itself."""
        record = json.loads(json.dumps(asdict(self)))  # what `read` will get: the keys of `info` may be numbers
        return _as_text({**record, "xxh3_128": _record_sum(record)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises CheckpointError if it is missing or corrupted, UnreadableError if it cannot be read and may be intact."""
        path = folder / NAME
        try:
            text = path.read_text()
            record = json.loads(text)
            if record["version"] not in _READ:
                raise UnreadableError(
                    f"{path} has version {record['version']}, and this rankwise reads "
                    f"{listed(map(str, _READ), last=' and ')}; use a newer rankwise"
                )
            # No byte may differ, even if the value is the same (1e-05, 1E-05): if one byte has changed, others may have changed
            # too.
            if text.startswith(_FIRST) and text != _as_text(record):
                raise CheckpointError(f"{path} is corrupted")
            if record.pop("xxh3_128") != _record_sum(record):
                raise CheckpointError(f"{path} is corrupted")
            record["files"] = {name: FileRecord.of(file) for name, file in record["files"].items()}
            return cls(**record)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except OSError as error:
            raise UnreadableError(f"{path} cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is corrupted ({error})") from None


def _as_text(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=1) + "\n"


def _record_sum(record: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(record, sort_keys=True).encode())


def take_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """A copy for the manifest. Raises ConfigError for a value that JSON cannot hold."""
    for name, value in info.items():
        try:
            json.dumps({name: value})
        except (TypeError, ValueError, RecursionError):
            raise ConfigError(
                f"info[{name!r}] is {shown(value)}, which a manifest, a JSON file, cannot hold; give texts, numbers, "
                "and lists and dicts of them"
            ) from None
    return dict(info)


def saved_at(folder: Path) -> float:
    """Seconds since 1970. If a copy was made without the file times, this is the time of the copy."""
    try:
        return (folder / NAME).stat().st_mtime
    except FileNotFoundError:  # corrupted: the manifest is missing
        return folder.stat().st_mtime


def tensors(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) for every tensor in nested mappings and sequences."""
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
    """xxh3-128 of the bytes of a file outside these tensors."""
    with _mapped(path) as view:
        return _rest_sum(view, layout)


def _rest_sum(view: memoryview, layout: Mapping[str, Layout]) -> str:
    total = xxhash.xxh3_128()
    for begin, end in rest(layout, len(view)):
        total.update(view[begin:end])
    return total.hexdigest()


def rest(layout: Mapping[str, Layout], size: int) -> Iterator[tuple[int, int]]:
    """The parts of a file outside these tensors, each as (begin, end)."""
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
    """Read every byte. Raises DamagedError with the corrupted file, and the tensor if it is known; UnreadableError if a file
    cannot be read."""
    manifest = Manifest.read(folder)
    for text in damages(folder, manifest):
        raise DamagedError(text)
    return manifest


def glance(folder: Path) -> Manifest:
    """Like `verify`, but only for the manifest and the lengths of the files."""
    manifest = Manifest.read(folder)
    for name, record in manifest.files.items():
        if text := length_damage(folder / name, record):
            raise DamagedError(text)
    return manifest


def damages(folder: Path, manifest: Manifest, only: str | None = None) -> Iterator[str]:
    """What is wrong with each file, or with `only`, as the text of an error. Reads every byte, on all cores. Raises
    UnreadableError if a file cannot be read."""
    for name, record in manifest.files.items():
        if only in (None, name) and (found := damage(folder / name, record)):
            yield found


def damage(path: Path, record: FileRecord) -> str:
    """What is wrong with one file; empty if it is intact. Raises UnreadableError if it cannot be read."""
    if found := length_damage(path, record):
        return found
    try:
        with ThreadPoolExecutor(cores(), "rankwise-verify") as pool:
            place = _damage(path, record, pool)
        return f"{path} is corrupted{place}" if place else ""
    except OSError as error:
        return _missing(path, error)


def _missing(path: Path, error: OSError) -> str:
    """The damage, if the file is missing. After any other error it may be intact: raises UnreadableError."""
    text = f"{path} cannot be read ({error.strerror})"
    if not isinstance(error, FileNotFoundError):
        raise UnreadableError(text) from None
    return text


def length_damage(path: Path, record: FileRecord) -> str:
    """What is wrong with the length of a file; empty if it is right. Raises UnreadableError if it cannot be read."""
    try:
        size = path.stat().st_size
    except OSError as error:
        return _missing(path, error)
    return f"{path} has {size} of {record.bytes} bytes{_cut_tensors(record, size)}" if size != record.bytes else ""


def cores() -> int:
    """The number of threads that read and compute checksums."""
    return min(len(os.sched_getaffinity(0)), _MOST_CORES)


def _cut_tensors(record: FileRecord, size: int) -> str:
    found = [n for n, at in record.layout.items() if at.offset is not None and at.offset + at.bytes > size]
    if not found:
        return ""
    return f", it ends in tensor {found[0]}" if len(found) == 1 else f", it ends before tensors {listed(found, _NAMED)}"


def _damage(path: Path, record: FileRecord, pool: Executor) -> str:
    """Where the file is corrupted; empty if it is intact. Its length must be right."""
    if not record.rest and file_sum(path) == record.xxh3_128:
        return ""
    placed = {name: at for name, at in record.layout.items() if at.offset is not None}
    with _mapped(path) as view:

        def is_damaged(name: str) -> bool:
            begin = placed[name].offset
            assert begin is not None
            return xxhash.xxh3_128_hexdigest(view[begin : begin + placed[name].bytes]) != record.tensors[name]

        # A thread for a small tensor takes longer than its checksum.
        large = [name for name, at in placed.items() if at.bytes >= _LARGE]
        try:
            found_by = list(pool.map(is_damaged, large))
        except RuntimeError:  # the interpreter is shutting down, and starts no more threads
            found_by = list(map(is_damaged, large))
        damaged = dict(zip(large, found_by, strict=True))
        damaged |= {name: is_damaged(name) for name in placed if name not in damaged}
        rest_is_whole = bool(record.rest) and _rest_sum(view, placed) == record.rest
    found = [name for name in placed if damaged[name]]
    if not found and rest_is_whole:
        return ""
    if not found and placed.keys() != record.tensors.keys():
        try:
            found = _damaged_when_loaded(path, record)
        except Exception as error:  # a corrupted pickle raises one of many types, or torch is not installed
            return f" (it cannot be loaded: {type(error).__name__})"
    return where(found)


def where(damaged: list[str]) -> str:
    """The words after `is corrupted`."""
    if not damaged:
        return " outside its tensors"
    return f" in tensor {damaged[0]}" if len(damaged) == 1 else f" in tensors {listed(damaged, _NAMED)}"


def _damaged_when_loaded(path: Path, record: FileRecord) -> list[str]:
    """The corrupted tensors of a file in which the place of a tensor is not known."""
    import torch

    state = torch.load(path, map_location="cpu", weights_only=True)
    return [name for name, tensor in tensors(state) if record.tensors.get(name) != tensor_sum(tensor)]
