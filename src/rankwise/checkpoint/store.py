"""The checkpoints of one run: whole or absent, verified on load, the one before used when the newest is damaged.

    checkpoints = Checkpoints(run_dir / "checkpoints")
    manifest = checkpoints.load_latest({"model": model, "optimizer": optimizer, "loader": loader})
    checkpoints.save({"model": model, ...}, step=400)

    checkpoints/step-00000400/{manifest.json, model.pt, optimizer.pt, ..., rng.pt}

One file for each Stateful thing, written by the main rank; `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankwise import comm, log, seed
from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.manifest import FileRecord, Manifest
from rankwise.errors import CheckpointError, ConfigError
from rankwise.guards import run_on_main
from rankwise.state import Stateful

_RNG = "rng"
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")  # what else lies there is somebody's own


class Checkpoints:
    """`keep_last`: how many stay; the newest is never deleted."""

    def __init__(self, folder: Path, keep_last: int = 2) -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last={keep_last}: at least one checkpoint must stay")
        self.folder = folder
        self._keep_last = keep_last
        self._damaged: set[Path] = set()  # known to the main rank
        self.wait_s = 0.0
        """Seconds that the loop has spent in saving so far."""

    # --- saving

    def save(self, parts: Mapping[str, Stateful], step: int, info: Mapping[str, Any] | None = None) -> Path:
        """Collective. Write all parts and every rank's random state; returns the checkpoint's folder.

        Raises CheckpointError on every rank when it cannot be written; nothing half-written is left, older ones stay.
        """
        began = time.perf_counter()
        streams = comm.all_gather_object(seed.rng_state())

        def write() -> Path:
            final = self._free_name(step)
            states = {name: part.state_dict() for name, part in parts.items()}
            states[_RNG] = {str(rank): stream for rank, stream in enumerate(streams)}
            self._write(final, states, step, dict(info or {}))
            self._prune(final)
            return final

        try:
            return run_on_main(write)
        finally:
            self.wait_s += time.perf_counter() - began

    def _write(self, final: Path, states: Mapping[str, Any], step: int, info: dict[str, Any]) -> None:
        temporary = self.folder / f"tmp.{uuid.uuid4().hex}"
        states = {name: _plain(state, name) for name, state in states.items()}
        try:
            self._remove_leftovers()
            temporary.mkdir(parents=True)
            files = {f"{name}.pt": _write_file(temporary / f"{name}.pt", state) for name, state in states.items()}
            record = Manifest(manifests.VERSION, step, comm.world_size(), torch.__version__, files, info)
            with open(temporary / manifests.NAME, "w") as file:
                file.write(record.text())
                file.flush()
                os.fsync(file.fileno())
            _fsync(temporary)
            os.rename(temporary, final)
            _fsync(self.folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: what torch makes of an OSError
            raise CheckpointError(_why_not(final, states, error)) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # not there if all went well

    def _remove_leftovers(self) -> None:
        """What a killed writer left. Only one run writes here (rundir's lease), so nobody is in there."""
        for leftover in self.folder.glob("tmp.*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _free_name(self, step: int) -> Path:
        """A step may be saved again (a life that went on from an older checkpoint): beside the first, which goes after."""
        count = max((time for path in self.all() for saved, time in [_order(path)] if saved == step), default=0) + 1
        return self.folder / (f"step-{step:08d}" + (f"-{count}" if count > 1 else ""))

    def _prune(self, newest: Path) -> None:
        """Keep the last few up to `newest`. What is damaged is not counted, and goes once something newer is whole; what lies
        after `newest` is damaged too, else it had been loaded."""
        older = [path for path in self.all() if _order(path) < _order(newest)]
        again = [path for path in older if _order(path)[0] == _order(newest)[0] or path in self._damaged]
        kept = [path for path in older if path not in again]
        for old in again + kept[: max(0, len(kept) - (self._keep_last - 1))]:
            # Out of sight in one step: a kill in the middle of a deletion must not leave half a checkpoint by its name.
            hidden = self.folder / f"tmp.{uuid.uuid4().hex}"
            with contextlib.suppress(OSError):
                os.rename(old, hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    # --- finding and loading

    def all(self) -> list[Path]:
        """Every checkpoint's folder, the oldest first. Not verified."""
        return sorted((p for p in self.folder.glob("step-*") if _NAME.fullmatch(p.name) and p.is_dir()), key=_order)

    def find_latest(self) -> tuple[Path, Manifest] | None:
        """The newest that verifies; each one passed over is said. None if there is none at all.

        Raises CheckpointError when there are some and all are damaged.
        """
        damaged: list[str] = []
        for folder in reversed(self.all()):
            try:
                manifest = manifests.verify(folder)
            except CheckpointError as error:
                damaged.append(str(error))
                self._damaged.add(folder)
                log.warn(f"checkpoint passed over: {error}")
            else:
                return folder, manifest
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole ({damaged[0]}); start anew with --fresh, or beside it with --name"
            )
        return None

    def load_latest(self, parts: Mapping[str, Stateful]) -> Manifest | None:
        """Collective. Load the newest whole checkpoint into `parts` on every rank; returns its manifest, None if none.

        The main rank chooses and verifies, all load the same. Raises ConfigError when the parts are not those saved.
        """
        found = run_on_main(self.find_latest)
        if found is None:
            return None
        folder, manifest = found
        error: ConfigError | CheckpointError | None = None
        try:
            for name, part in parts.items():
                _load_part(folder, name, part)
            self._load_stream(folder, manifest)
        except (ConfigError, CheckpointError) as problem:
            error = problem
        # One rank that cannot read must not leave the others in their first collective.
        for first in comm.all_gather_object(error):
            if first is not None:
                raise first
        return manifest

    def _load_stream(self, folder: Path, manifest: Manifest) -> None:
        streams = _read(folder / f"{_RNG}.pt")
        mine = streams.get(str(comm.rank()))
        if mine is not None:
            seed.set_rng_state(mine)
        if manifest.world_size != comm.world_size():
            log.say(
                f"the checkpoint was made on {manifest.world_size} rank(s), this is {comm.world_size()}: same data order and "
                "global batches, but other dropout and another order of additions"
            )


def _order(folder: Path) -> tuple[int, int]:
    """(step, which time it was saved) of step-00000400 or step-00000400-2."""
    found = _NAME.fullmatch(folder.name)
    assert found is not None
    return int(found[1]), int(found[2] or 1)


def _plain(state: Any, path: str) -> Any:
    """The state without numpy's numbers, which `weights_only` would refuse to read; an array is refused here, by its path."""
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, np.ndarray):
        raise CheckpointError(f"{path} is a numpy array, which could not be loaded again; keep it as a tensor")
    if isinstance(state, dict):
        changed = {key: new for key, value in state.items() if (new := _plain(value, f"{path}/{key}")) is not value}
        if changed:
            state = state.copy()
            state.update(changed)
    elif isinstance(state, list | tuple) and not hasattr(state, "_fields"):
        parts = [_plain(value, f"{path}/{index}") for index, value in enumerate(state)]
        if any(new is not old for new, old in zip(parts, state, strict=True)):
            return type(state)(parts)
    return state


def _write_file(path: Path, state: Any) -> FileRecord:
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
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many types: what cannot be loaded again is no checkpoint
        text = " ".join(str(error).split())
        raise CheckpointError(f"{path.stem} could not be loaded again: {text[:300]}") from None
    return FileRecord(size, manifests.file_sum(path), sums)


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


def _why_not(final: Path, states: Mapping[str, Any], error: OSError | RuntimeError) -> str:
    need = sum(map(_size, states.values()))
    parent = next(p for p in final.parents if p.exists())
    free = shutil.disk_usage(parent).free
    if isinstance(error, RuntimeError):
        if free > need:
            return f"cannot write {final}: {error}"
    elif error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write {final}: {error.strerror}"
    return f"cannot write {final}: it needs {need / 1e6:.1f} MB and {free / 1e6:.1f} MB are free there"


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing on rank {comm.rank()}: all ranks must see the same folder") from None
    except Exception as error:  # torch raises many types; the file is whole, so it is not one of ours
        raise CheckpointError(f"{path} does not load: {error}") from None


def _load_part(folder: Path, name: str, part: Stateful) -> None:
    path = folder / f"{name}.pt"
    if not path.exists():
        raise ConfigError(
            f"the checkpoint {folder} has no {name}; it was made by another program: --fresh starts anew, --name beside it"
        )
    try:
        part.load_state_dict(_read(path))
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"{name} does not fit its checkpoint {path}: {text[:400]}; undo the change, or start anew with --fresh, "
            "or beside it with --name NAME"
        ) from None


def _fsync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
