"""Writes a checkpoint: each rank writes its share, file by file; then one rank writes the manifest and renames the folder.

    writer = CheckpointWriter(folder)
    writer.write(folder / "step-00000400", {"model": state, ...}, manifest, others=None, fence=None)

If several ranks write, each does so in a thread, and threads must not call collectives. So they leave records in the folder:

    rank-1.json          rank 1 has written its share: the records of its files, or its error
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import platform
import re
import shutil
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.serialization import config

from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.background import ATOMS
from rankwise.checkpoint.folders import remove_whole
from rankwise.checkpoint.manifest import FileRecord, Layout, Manifest, length_damage
from rankwise.checkpoint.reader import load_mapped
from rankwise.dist import log
from rankwise.dist.divided import is_divided
from rankwise.errors import CheckpointError, ConfigError, RunDirError
from rankwise.host.disk import NO_SPACE, fsync, reserve
from rankwise.host.text import numbered, size
from rankwise.run.directory import write_bytes
from rankwise.run.lease import Fence
from rankwise.training.state import Stateful

_TEMPORARY = re.compile(r"tmp\.[0-9a-f]{32}")  # with uuid4().hex; `mktemp -d` of the user makes other names

_WAIT_S = 1800.0  # for the shares of other ranks: a dead rank ends the run earlier, but a rank that hangs does not
_LAST_WAIT_S = 20.0  # if the loop was interrupted
_SEEN_S = 5.0  # a network file system may take this long to show a new folder


# --- the checkpoint


class CheckpointWriter:
    """Writes checkpoints to one folder, for one rank. Nothing here is collective, so a thread may call it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._durable = False
        self._has_warned = False

    def make_folder(self, final: Path) -> Path:
        """The temporary folder in which several ranks write the checkpoint `final`. Raises CheckpointError."""
        temporary = self._unique()
        try:
            self._make(temporary)
        except OSError as error:
            raise CheckpointError(explain_failure(final, {}, error)) from None
        return temporary

    def write(
        self, final: Path, states: Mapping[str, Any], record: Manifest, others: Others | None, fence: Fence | None
    ) -> None:
        """Write this share of the checkpoint (everything, without `others`), wait for the other shares, and rename the folder.

        Raises CheckpointError; then nothing of this checkpoint is left, and older ones remain.
        """
        temporary = others.folder if others is not None else self._unique()
        states = {name: make_plain(state) for name, state in states.items()}
        try:
            if others is None:
                self._make(temporary)
            files = write_files(temporary, states)
            files |= others.wait() if others is not None else {}
            with open(temporary / manifests.NAME, "w") as file:
                file.write(replace(record, files=files).text())
                file.flush()
                os.fsync(file.fileno())
            fsync(temporary)
            if fence is not None:
                fence.check()
            os.rename(temporary, final)
            fsync(self._folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's form of an OSError
            if _is_of_a_worker(error):
                raise
            raise CheckpointError(explain_failure(final, states, error)) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # after a success, it does not exist any more

    def warn_of_little_space(self, final: Path, missing: int) -> None:
        """Warn, once, if the disk has no room for the next save, or for the first `missing` of the checkpoints to be kept: the
        user may have left when a save fails. Expects them to be as large as `final`."""
        if self._has_warned:
            return
        try:
            need = sum(file.stat().st_size for file in final.iterdir()) * (max(missing, 0) + 1)
            free = shutil.disk_usage(final).free
        except OSError:  # the next save reports it
            return
        if free < need:
            self._has_warned = True
            which = "the next checkpoint needs" if missing <= 0 else f"the next {missing + 1} checkpoints need"
            text = f"{which} {size(need)} in {self._folder}, and {size(free)} are free; free some space, or saves will fail"
            log.say_per_node(f"warning: {text}")  # each may have its own disk

    def _unique(self) -> Path:
        return self._folder / f"tmp.{uuid.uuid4().hex}"

    def _make(self, temporary: Path) -> None:
        self.remove_leftovers()
        self._make_durable()
        temporary.mkdir()

    def _make_durable(self) -> None:
        """At the first write, also flush the folders above: a power failure must not remove the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._durable:
            return
        for parent in self._folder.absolute().parents:
            with contextlib.suppress(OSError):  # not readable: then it is not ours, and older than this run
                fsync(parent)
                if parent.is_mount():
                    break
        self._durable = True

    def remove_leftovers(self) -> None:
        """Remove what a killed writer has left. Only one run writes here (run/lease.py), so no other process uses it."""
        with contextlib.suppress(OSError):  # not reachable: the write itself reports it
            for leftover in self._folder.glob("tmp.*"):
                if _TEMPORARY.fullmatch(leftover.name):
                    remove_whole(leftover)


# --- the shares of other ranks


def await_folder(temporary: Path, rank: int) -> None:
    """Raises CheckpointError if this rank does not see the folder that the main rank has created."""
    deadline = time.monotonic() + _SEEN_S
    while not temporary.is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank {rank} on {platform.node()} does not see {temporary}, which rank 0 has created: sharded=True "
                "needs a folder that all ranks share; choose another folder, or remove sharded"
            )
        time.sleep(0.05)
        os.scandir(temporary.parent).close() if temporary.parent.is_dir() else None  # makes NFS look again


def write_share(final: Path, states: Mapping[str, Any], temporary: Path, rank: int) -> None:
    """Write these parts of the future checkpoint `final`, and leave a record. Raises CheckpointError."""
    try:
        leave_word(temporary, rank, write_files(temporary, states))
    except (OSError, RuntimeError, CheckpointError, RunDirError) as error:  # RuntimeError: torch's form of an OSError
        text = explain_failure(final, states, error) if isinstance(error, OSError | RuntimeError) else str(error)
        text += f" (the share of rank {rank} on {platform.node()})"
        with contextlib.suppress(RunDirError):  # then the main rank learns of it at the next save
            leave_word(temporary, rank, {}, text)
        raise CheckpointError(text) from None


def leave_word(temporary: Path, rank: int, files: Mapping[str, FileRecord], error: str = "") -> None:
    """Leave a record for the thread of the main rank."""
    text = json.dumps({"error": error, "files": {name: asdict(record) for name, record in files.items()}})
    write_bytes(temporary / f"rank-{rank}.json", text.encode())


class Others:
    """The ranks that write the other shares into `folder`. The thread of the main rank waits for them."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        self._left = list(range(1, ranks))
        self._until = time.monotonic() + _WAIT_S
        self._wake = threading.Event()
        self._error: BaseException | None = None

    def cancel(self, error: BaseException) -> None:
        """Stop waiting: a rank has failed and could not leave a record."""
        self._error = error
        self._wake.set()

    def hurry(self) -> None:
        """Wait only a short time from now on: it is not known whether the others still run."""
        self._until = min(self._until, time.monotonic() + _LAST_WAIT_S)

    def wait(self) -> dict[str, FileRecord]:
        """The records of the other ranks' files. Raises CheckpointError if a rank could not write its share, or leaves no
        record."""
        files: dict[str, FileRecord] = {}
        while self._left:
            self._left = [rank for rank in self._left if not self._heard(rank, files)]
            if self._error is not None:
                raise self._error
            if self._left and time.monotonic() > self._until:
                who = numbered("rank", self._left, ranges=True)
                raise CheckpointError(f"the checkpoint in {self.folder} is incomplete: the share of {who} is missing")
            if self._left:
                self._wake.wait(0.02)
        for name, record in files.items():
            if damage := length_damage(self.folder / name, record):
                raise CheckpointError(f"{damage}, as rank 0 sees it: sharded=True needs a folder that all ranks share")
        return files

    def _heard(self, rank: int, files: dict[str, FileRecord]) -> bool:
        path = self.folder / f"rank-{rank}.json"
        try:
            told = json.loads(path.read_text())
        except OSError:
            return False
        if told["error"]:
            raise CheckpointError(told["error"])
        files.update({name: FileRecord.of(record) for name, record in told["files"].items()})
        path.unlink()
        return True


# --- one file


def collect_states(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """The state of each part. Raises ConfigError for a value that could not be loaded, and for a tensor that is not strided (a
    sparse one), with its path: no later save could contain it either."""
    states = {name: part.state_dict() for name, part in parts.items()}
    for name, state in states.items():
        check_loadable(state, name)
    for path, tensor in manifests.tensors(states):
        if is_divided(tensor):
            raise ConfigError(
                f"{path} is a DTensor, of which this rank has only a part; its state_dict must return tensor.full_tensor(), "
                "which all ranks must call"
            )
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"{path} is a tensor of layout {tensor.layout}, which a checkpoint cannot hold; state_dict must return its "
                "indices and values, or tensor.to_dense()"
            )
    return states


def check_loadable(state: Any, path: str) -> None:
    """Raises ConfigError for a value or a key that torch.load(weights_only=True) would refuse, with its path. Numbers of numpy
    pass if Python has them too: they are saved as plain ones."""
    kind = type(state)
    if kind in ATOMS or isinstance(state, torch.Tensor) or (isinstance(state, np.generic) and type(state.item()) in ATOMS):
        return
    if isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            if type(key) not in ATOMS:
                check_loadable(key, f"{path}: the key {key!r}")
            check_loadable(value, f"{path}/{key}")
        if kind in (dict, list, tuple, OrderedDict):
            return
    memory = io.BytesIO()
    try:
        torch.save(make_plain(state), memory)
        memory.seek(0)
        torch.load(memory, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError):  # others may be of a signal handler, or of the memory
        instead = "keep it as a tensor" if kind is np.ndarray else "keep it as tensors, numbers, text, lists and dicts"
        raise ConfigError(f"{path} is a {kind.__name__}, which could not be loaded from a checkpoint; {instead}") from None


def make_plain(state: Any) -> Any:
    """The state with plain numbers instead of numpy's, which `weights_only` refuses, also as keys."""
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, dict):
        pairs = [(make_plain(key), make_plain(value)) for key, value in state.items()]
        if any(pair[0] is not key or pair[1] is not state[key] for pair, key in zip(pairs, state, strict=True)):
            state = copy.copy(state)  # keeps the attributes, such as the versions of modules
            state.clear()
            for key, value in pairs:  # not update: a Counter would add
                state[key] = value
    elif isinstance(state, list | tuple) and not hasattr(state, "_fields"):
        parts = [make_plain(value) for value in state]
        if any(new is not old for new, old in zip(parts, state, strict=True)):
            return type(state)(parts)
    return state


def write_files(folder: Path, states: Mapping[str, Any]) -> dict[str, FileRecord]:
    return {f"{name}.pt": write_file(folder / f"{name}.pt", state) for name, state in states.items()}


def write_file(path: Path, state: Any) -> FileRecord:
    """Reserve the space, write, and flush. If the disk is full, the OSError comes before anything is written."""
    sums = {name: manifests.tensor_sum(tensor) for name, tensor in manifests.tensors(state)}
    with open(path, "wb") as file:
        reserve(file.fileno(), _size(state))
        # torch's CRC-32 would take a third of the time. torch.load ignores it, and the sums above find the same damage.
        with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            torch.save(state, file)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    try:
        again = load_mapped(path)
    except Exception as error:  # of many types: what cannot be loaded is not a checkpoint
        text = " ".join(str(error).split())
        raise CheckpointError(f"{path.stem} could not be loaded again: {text[:300]}") from None
    places = {name: at for name, at in locate_tensors(path, again).items() if name in sums}
    return FileRecord(size, "", sums, places, manifests.rest_sum(path, places))


def locate_tensors(path: Path, mapped: Any) -> dict[str, Layout]:
    """The place of each tensor in a file, by its path: with it, a corrupted tensor is found without the pickle.

    `mapped`: the result of `load_mapped(path)`.
    """
    found = dict(manifests.tensors(mapped))
    begin, end = _mapping([t.data_ptr() for t in found.values() if t.numel()], path.stat().st_size)
    places = {}
    for name, tensor in found.items():
        lies_there = tensor.is_contiguous() and tensor.numel() and begin <= tensor.data_ptr() < end
        offset = tensor.data_ptr() - begin if lies_there else None
        kind = str(tensor.dtype).removeprefix("torch.")
        places[name] = Layout(kind, tuple(tensor.shape), tensor.numel() * tensor.element_size(), offset)
    return places


def _mapping(addresses: Iterable[int], size: int) -> tuple[int, int]:
    """(begin, end) in memory of the mapped file of `size` bytes that contains one of these addresses; (0, 0) if none does."""
    files = []
    with open("/proc/self/maps", errors="surrogateescape") as maps:  # it has the names of all mapped files
        for line in maps:
            area, _, offset, _, inode = line.split(maxsplit=5)[:5]
            if inode != "0":
                begin, end = (int(bound, 16) for bound in area.split("-"))
                files.append((begin, end, begin - int(offset, 16)))
    found = (start for address in addresses for begin, end, start in files if begin <= address < end)
    start = next(found, None)
    return (start, start + size) if start is not None else (0, 0)


def _size(state: Any) -> int:
    """The bytes that a state needs on disk, within a few per cent: its tensors, and everything else."""
    storages = {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for _, t in manifests.tensors(state)}
    return sum(size for _, size in storages) + 256 * len(storages) + 4096 + _size_of_others(state)


def _size_of_others(state: Any) -> int:
    if isinstance(state, Mapping):
        return sum(_size_of_others(key) + _size_of_others(value) for key, value in state.items())
    if isinstance(state, list | tuple | set):
        return sum(map(_size_of_others, state))
    return len(state) if isinstance(state, str | bytes) else 2


def _is_of_a_worker(error: Exception) -> bool:
    """torch's SIGCHLD handler raises the death of a loader's worker at any place of the main thread, also within a save."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")


def explain_failure(final: Path, states: Mapping[str, Any], error: OSError | RuntimeError) -> str:
    need = sum(map(_size, states.values()))
    try:
        parent = next(p for p in final.parents if p.exists())
        free = shutil.disk_usage(parent).free
    except OSError:  # the folder is not reachable any more
        return f"cannot write {final}: {error.strerror if isinstance(error, OSError) else error}"
    if isinstance(error, RuntimeError):
        if free > need:
            return f"cannot write {final}: {error}"
    elif error.errno not in NO_SPACE or free > need:  # a quota, or no more inodes: the free space does not explain it
        return f"cannot write {final}: {error.strerror}"
    return f"cannot write {final}: it needs {size(need)}, and {size(free)} are free"
