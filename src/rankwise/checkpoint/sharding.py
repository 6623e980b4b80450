"""Sharded checkpoints, which all ranks write: how tensors are divided among the ranks, and how they are read together again.

    model.pt             the nested state, with the main rank's share; None for tensors of other ranks
    model.shard-1.pt     {"0.weight": tensor, ...}: rank 1's share of the same part, by the tensors' paths

Models and optimizers are usually the same on every rank, so each rank has a share of them; the main rank writes everything
else.
"""

from __future__ import annotations

import copy
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from rankwise.checkpoint.manifest import Manifest, tensors
from rankwise.checkpoint.reader import own_tensors, read

Shares = dict[str, dict[str, int]]
"""part -> path of a tensor -> the rank that writes it. Tensors that are not listed are written by the main rank."""

_SMALL = 1 << 10  # bytes: the main rank writes smaller tensors
_SHARD = re.compile(r"(.+)\.shard-(\d+)\.pt")


# --- who writes what


def divide(parts: Mapping[str, object], states: Mapping[str, Any], ranks: int) -> Shares:
    """Pure. Divides the tensors by bytes, as evenly as possible without cutting one. Tensors that share memory stay together.

    Only parameters of modules and the state of optimizers are divided: buffers may differ between ranks, and those of the main
    rank are used. So may the state of optimizers, if a strategy among the parts says so.
    """
    if ranks == 1:  # its share is everything; training waits for this, so do not look at every tensor
        return {}
    units: list[tuple[int, str, list[str]]] = []
    loads = [0] * ranks
    has_own = any(getattr(getattr(part, "held", None), "optimizer", "same") != "same" for part in parts.values())
    for part, state in states.items():
        groups: dict[tuple[str, int], list[str]] = {}
        sizes: dict[tuple[str, int], int] = {}
        found = list(tensors(state))
        times = Counter(path for path, _ in found)
        mine = set()
        others = _shared_out(parts.get(part), times, has_own)
        for path, tensor in found:
            if not _is_strided(tensor):
                continue
            storage = tensor.untyped_storage()
            key = (str(tensor.device), storage.data_ptr())
            groups.setdefault(key, []).append(path)
            sizes[key] = storage.nbytes()
            if times[path] > 1 or path not in others:
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


def _shared_out(part: object, paths: Iterable[str], has_own: bool) -> set[str]:
    """The paths that any rank may write. `has_own`: each rank has its own state of the optimizer."""
    if isinstance(part, Optimizer):
        return set() if has_own else {path for path in paths if path.startswith("state/")}
    if not isinstance(part, nn.Module):
        return set()
    return {name for name, _ in nn.Module.named_parameters(part, remove_duplicate=False)}


def digest_tensors(shares: Shares, states: Mapping[str, Any]) -> str:
    """Equal on ranks whose tensors have the same paths, types and shapes."""
    total = xxhash.xxh3_128()
    for part in sorted(shares):
        for path, tensor in tensors(states[part]):
            total.update(repr((part, path, shares[part].get(path, 0), tensor.dtype, tuple(tensor.shape))).encode())
    return total.hexdigest()


def take_share(rank: int, shares: Shares, states: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank writes, by file: the main rank everything except the tensors of others, another rank its tensors by their
    paths."""
    if rank == 0:
        return {part: _without(state, shares[part], "") if part in shares else state for part, state in states.items()}
    found = {}
    for part, of in shares.items():
        mine = {path: tensor for path, tensor in tensors(states[part]) if of.get(path) == rank}
        if mine:
            found[f"{part}.shard-{rank}"] = mine
    return found


def _without(state: Any, gone: Mapping[str, int], path: str) -> Any:
    """The same nested state, with None for these tensors."""
    if isinstance(state, torch.Tensor):
        return None if path in gone else state
    if isinstance(state, dict):
        if not gone:
            return state
        changed = copy.copy(state)  # keeps the type; the attributes of an OrderedDict are the versions of modules
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


# --- reading


def files_of(manifest: Manifest, part: str) -> list[str]:
    """The files of the part: its main file first, then its shards."""
    shards = [name for name in manifest.files if (found := _SHARD.fullmatch(name)) and found[1] == part]
    return [f"{part}.pt", *sorted(shards, key=lambda name: int(name.split("-")[-1].removesuffix(".pt")))]


def parts_of(manifest: Manifest) -> list[str]:
    return [name.removesuffix(".pt") for name in manifest.files if not _SHARD.fullmatch(name)]


def read_part(folder: Path, manifest: Manifest, part: str, into: object = None, verify: bool = True) -> Any:
    """Like `reader.read`, for a part of which any ranks may have written the tensors."""
    first, *shards = files_of(manifest, part)
    own = own_tensors(into)
    state = read(folder / first, manifest.files[first], into, verify, own)
    shares: dict[str, torch.Tensor] = {}
    for name in shards:
        shares |= read(folder / name, manifest.files[name], into, verify, own)
    return _filled(state, shares, "") if shares else state


def _filled(state: Any, shares: Mapping[str, torch.Tensor], path: str) -> Any:
    """The nested state with the tensors of `shares`. Changed in place if possible."""
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
