"""A checkpoint that all ranks write together: of a model and an optimizer that are alike on every rank, each writes a share.

    model.pt             the nest, with the main rank's share; None where a tensor is in another's
    model.shard-1.pt     {"0.weight": tensor, ...}: rank 1's share of the same part, by the tensors' paths
    rank-1.json          while they write: rank 1 has written its shares, with their records; or what kept it from it

Each rank works in a thread, and threads call no collectives: what they have to tell lies in the folder that they write into.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import platform
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from rankwise.checkpoint.manifest import FileRecord, Manifest, length_damage, tensors
from rankwise.checkpoint.reader import own_tensors, read
from rankwise.checkpoint.writer import explain_failure, write_file
from rankwise.errors import CheckpointError, RunDirError
from rankwise.run.directory import write_bytes

Shares = dict[str, dict[str, int]]
"""part -> path of a tensor -> the rank that writes it; what is not in it is the main rank's."""

_SMALL = 1 << 10  # bytes: what is less stays with the main rank
_WAIT_S = 1800.0  # for the other ranks' shares: a rank that is dead ends the run before, one that hangs does not
_LAST_WAIT_S = 20.0  # when the loop has ended without an agreement
_SEEN_S = 5.0  # how long a network file system may take to show a new folder
_SHARD = re.compile(r"(.+)\.shard-(\d+)\.pt")


# --- who writes what


def divided(parts: Mapping[str, object], states: Mapping[str, Any], ranks: int) -> Shares:
    """Pure: by bytes, as evenly as whole tensors allow; those that share memory go together.

    Of modules the parameters, of optimizers the state: buffers may differ between ranks, and the main rank's are what counts.
    """
    units: list[tuple[int, str, list[str]]] = []
    loads = [0] * ranks
    for part, state in states.items():
        groups: dict[tuple[str, int], list[str]] = {}
        sizes: dict[tuple[str, int], int] = {}
        found = list(tensors(state))
        times = Counter(path for path, _ in found)
        mine = set()
        for path, tensor in found:
            if not _is_strided(tensor):
                continue
            storage = tensor.untyped_storage()
            key = (str(tensor.device), storage.data_ptr())
            groups.setdefault(key, []).append(path)
            sizes[key] = storage.nbytes()
            if times[path] > 1 or not _is_shared_out(parts.get(part), path):
                mine.add(key)
        for key, paths in groups.items():
            if key in mine or sizes[key] < _SMALL:
                loads[0] += sizes[key]
            else:
                units.append((sizes[key], part, paths))
    shares: Shares = {}
    for size, part, paths in sorted(units, key=lambda unit: (-unit[0], unit[1], unit[2])):
        rank = loads.index(min(loads))
        loads[rank] += size
        if rank:
            shares.setdefault(part, {}).update(dict.fromkeys(paths, rank))
    return shares


def _is_strided(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


def _is_shared_out(part: object, path: str) -> bool:
    if isinstance(part, Optimizer):
        return path.startswith("state/")
    if not isinstance(part, nn.Module):
        return False
    prefix, _, name = path.rpartition(".")
    try:
        return name in part.get_submodule(prefix)._parameters
    except AttributeError:
        return False


def digest(shares: Shares, states: Mapping[str, Any]) -> str:
    """Equal on ranks of which the tensors are of the same paths, types and shapes."""
    total = xxhash.xxh3_128()
    for part in sorted(shares):
        for path, tensor in tensors(states[part]):
            total.update(repr((part, path, shares[part].get(path, 0), tensor.dtype, tuple(tensor.shape))).encode())
    return total.hexdigest()


def share_of(rank: int, shares: Shares, states: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank writes: of the main rank all but the others' tensors, of another its tensors by their paths, by file."""
    if rank == 0:
        return {part: _without(state, shares.get(part, {}), "") for part, state in states.items()}
    found = {}
    for part, of in shares.items():
        mine = {path: tensor for path, tensor in tensors(states[part]) if of.get(path) == rank}
        if mine:
            found[f"{part}.shard-{rank}"] = mine
    return found


def _without(state: Any, gone: Mapping[str, int], path: str) -> Any:
    """The same nest, with None for tensors."""
    if isinstance(state, torch.Tensor):
        return None if path in gone else state
    if isinstance(state, dict):
        if not gone:
            return state
        changed = copy.copy(state)  # of its own kind; an OrderedDict's attributes are a module's versions
        for key, value in state.items():
            changed[key] = _without(value, gone, f"{path}/{key}" if path else str(key))
        if isinstance(state, OrderedDict):
            vars(changed).update(vars(state))
        return changed
    if isinstance(state, list | tuple) and gone and not hasattr(state, "_fields"):
        return type(state)(
            _without(value, gone, f"{path}/{index}" if path else str(index)) for index, value in enumerate(state)
        )
    return state


# --- writing, in each rank's thread


def await_folder(temporary: Path, rank: int) -> None:
    """Raises CheckpointError where this rank does not see the folder that the main rank has made."""
    deadline = time.monotonic() + _SEEN_S
    while not temporary.is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank {rank} on {platform.node()} does not see {temporary}, which the main rank has made: a sharded save "
                "needs a folder that all ranks see; leave sharded out, or choose another folder"
            )
        time.sleep(0.05)
        os.scandir(temporary.parent).close() if temporary.parent.is_dir() else None  # NFS looks again


def write_share(final: Path, states: Mapping[str, Any], temporary: Path, rank: int) -> None:
    """Write these parts of the checkpoint that will be `final`, and leave word. Raises CheckpointError."""
    try:
        files = {f"{name}.pt": write_file(temporary / f"{name}.pt", state) for name, state in states.items()}
        tell(temporary, rank, files)
    except (OSError, RuntimeError, CheckpointError, RunDirError) as error:  # RuntimeError: what torch makes of an OSError
        text = explain_failure(final, states, error) if isinstance(error, OSError | RuntimeError) else str(error)
        text += f" (the share of rank {rank} on {platform.node()})"
        with contextlib.suppress(RunDirError):  # then the main rank hears of it when all meet
            tell(temporary, rank, {}, text)
        raise CheckpointError(text) from None


def tell(temporary: Path, rank: int, files: Mapping[str, FileRecord], error: str = "") -> None:
    """Leave word for the main rank's thread."""
    text = json.dumps({"error": error, "files": {name: asdict(record) for name, record in files.items()}})
    write_bytes(temporary / f"rank-{rank}.json", text.encode())


class Others:
    """What the main rank's thread waits for, and what makes it stop waiting."""

    def __init__(self, temporary: Path, ranks: int) -> None:
        self._folder = temporary
        self._left = list(range(1, ranks))
        self._until = time.monotonic() + _WAIT_S
        self._wake = threading.Event()
        self._error: BaseException | None = None

    def cancel(self, error: BaseException) -> None:
        """A rank has failed, and could not leave word."""
        self._error = error
        self._wake.set()

    def hurry(self) -> None:
        """Nobody will say any more whether the others live."""
        self._until = min(self._until, time.monotonic() + _LAST_WAIT_S)

    def wait(self) -> dict[str, FileRecord]:
        """Their files. Raises CheckpointError where one could not write its own, or is not heard of."""
        files: dict[str, FileRecord] = {}
        while self._left:
            self._left = [rank for rank in self._left if not self._heard(rank, files)]
            if self._error is not None:
                raise self._error
            if self._left and time.monotonic() > self._until:
                who = ", ".join(map(str, self._left))
                raise CheckpointError(f"no word of the shares of rank {who}, in {self._folder}: not a whole checkpoint")
            if self._left:
                self._wake.wait(0.02)
        for name, record in files.items():
            if damage := length_damage(self._folder / name, record):
                raise CheckpointError(f"{damage} as the main rank sees it: a checkpoint that all ranks write needs one folder")
        return files

    def _heard(self, rank: int, files: dict[str, FileRecord]) -> bool:
        path = self._folder / f"rank-{rank}.json"
        try:
            told = json.loads(path.read_text())
        except OSError:
            return False
        if told["error"]:
            raise CheckpointError(told["error"])
        files.update({name: FileRecord.of(record) for name, record in told["files"].items()})
        path.unlink()
        return True


# --- reading


def files_of(manifest: Manifest, part: str) -> list[str]:
    """The part's own file first, then its shards."""
    shards = [name for name in manifest.files if (found := _SHARD.fullmatch(name)) and found[1] == part]
    return [f"{part}.pt", *sorted(shards, key=lambda name: int(name.split("-")[-1].removesuffix(".pt")))]


def parts_of(manifest: Manifest) -> list[str]:
    return [name.removesuffix(".pt") for name in manifest.files if not _SHARD.fullmatch(name)]


def read_part(folder: Path, manifest: Manifest, part: str, into: object = None, verify: bool = True) -> Any:
    """`reader.read` of a part, whoever wrote its tensors."""
    first, *shards = files_of(manifest, part)
    own = own_tensors(into)
    state = read(folder / first, manifest.files[first], into, verify, own)
    shares: dict[str, torch.Tensor] = {}
    for name in shards:
        shares |= read(folder / name, manifest.files[name], into, verify, own)
    return _filled(state, shares, "") if shares else state


def _filled(state: Any, shares: Mapping[str, torch.Tensor], path: str) -> Any:
    """In place, as far as a nest allows."""
    if state is None:
        return shares.get(path)
    if isinstance(state, dict):
        for key, value in state.items():
            if value is None or isinstance(value, dict | list | tuple):
                state[key] = _filled(value, shares, f"{path}/{key}" if path else str(key))
    elif isinstance(state, list | tuple) and not hasattr(state, "_fields"):
        return type(state)(
            _filled(value, shares, f"{path}/{index}" if path else str(index)) for index, value in enumerate(state)
        )
    return state
