"""Resuming: all ranks choose the newest checkpoint that any node has, copy it to nodes without it, and load it.

chosen = choose(catalog, damaged)                        # collective
load_part(chosen.folder, chosen.manifest, "model", model)   # on each rank separately
"""

from __future__ import annotations

import platform
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from rankwise.checkpoint import divided_parts, own_states, sharding
from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.catalog import Catalog
from rankwise.checkpoint.folders import order
from rankwise.checkpoint.manifest import Manifest
from rankwise.checkpoint.replicate import copy_to_ranks, digest_manifest, group_by_folder
from rankwise.checkpoint.writer import check_loadable
from rankwise.dist import comm, log, seed
from rankwise.dist.guards import agreed
from rankwise.errors import CheckpointError, ConfigError, DamagedError, UnreadableError
from rankwise.host.arguments import shown
from rankwise.host.text import count, cut, short
from rankwise.training.optimizer import align_state
from rankwise.training.state import Stateful

RNG = "rng"
"""The part with the random state of every rank."""


def check_parts(parts: Mapping[str, Any]) -> None:
    """Raises ConfigError for a name that cannot be a file name, or a part that cannot be saved, before any work is lost."""
    for name, part in parts.items():
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name) or name == RNG or own_states.is_taken(name):
            raise ConfigError(
                f"a part of a checkpoint cannot be named {name!r}: the name becomes a file's name, and {RNG} and "
                f"{own_states.PART} are taken; give it another"
            )
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")) or isinstance(part, type):
            raise ConfigError(
                f"the part {name!r} is {shown(part)}, which has no state_dict and load_state_dict; give for example the model"
            )
        divided_parts.check(name, part)


def check_states(parts: Mapping[str, Any]) -> None:
    """Raises ConfigError for what no save could contain, before any work is lost. Models and optimizers contain tensors and
    numbers."""
    for name, part in parts.items():
        if not isinstance(part, nn.Module | Optimizer):
            try:
                state = part.state_dict()
            except Exception:  # it may be ready after the first step only
                continue
            check_loadable(state, name)


# --- choosing one


class Chosen(NamedTuple):
    folder: Path
    manifest: Manifest
    is_copy: bool
    """Whether this rank has written it, as a copy for its node."""


def choose(catalog: Catalog, damaged: dict[Path, str], may_be_new: Collection[str] = ()) -> Chosen | None:
    """Collective. The newest intact checkpoint; None if no node has any. `damaged`: those that the first rank of each node
    knows to be corrupted, and why. `may_be_new`: the parts that may be missing in it.

    Raises CheckpointError on all ranks if there are checkpoints and none is intact, or if a node cannot store its copy.
    """
    group = comm.patient()
    is_first = any(ranks[0] == comm.rank() for ranks in comm.nodes())
    own, why = None, ""
    with agreed():
        try:
            if comm.is_main():
                catalog.bring()
            look = partial(catalog.check_to_load, may_be_new=may_be_new)
            own = catalog.find_newest(damaged, look) if is_first else None
        except CheckpointError as problem:
            why = str(problem)
    told = comm.all_gather_object((own[0].name if own is not None else "", why), group)
    newest = max((name for name, _ in told if name), key=lambda name: order(Path(name)), default=None)
    if newest is None:
        for why in filter(None, (why for _, why in told)):
            raise CheckpointError(why)
        return None
    source = next(rank for rank, (name, _) in enumerate(told) if name == newest)
    folder = catalog.folder / newest
    mine: Any = (own[1], digest_manifest(folder), platform.node()) if own is not None else None
    manifest, there, host = comm.broadcast_object(mine, source, group)
    lacks = comm.all_gather_object(is_first and (folder in damaged or digest_manifest(folder) != there), group)
    to = []
    if any(lacks):
        disks = group_by_folder(catalog.folder)
        to = [ranks[0] for ranks in disks if source not in ranks and any(lacks[rank] for rank in ranks)]
        damaged.pop(folder, None)  # the source reads its own checkpoint once more
    if to:
        size = f"{manifest.bytes / 1e6:.1f} MB"
        log.say(f"copying {newest} ({size}) from {host} to {count(len(to), 'node')} without it")
        copy_to_ranks(folder, source, to)
    return Chosen(folder, manifest, comm.rank() in to)


def is_damaged_here(mine: bool) -> bool:
    """Collective. On the first rank of a node: whether any rank of this node could not read intact bytes. False on other
    ranks."""
    told = comm.all_gather_object(mine)
    return any(ranks[0] == comm.rank() and any(told[rank] for rank in ranks) for ranks in comm.nodes())


# --- loading it, on each rank separately


def load(folder: Path, manifest: Manifest, parts: Mapping[str, Stateful], verify: bool = True) -> BaseException | None:
    """Load a checkpoint on this rank, and return the error, if any. The main rank also verifies the files of other parts."""
    own = own_states.names(manifest)
    asked = {name for part in (*parts, RNG, *own) for name in sharding.files_of(manifest, part)}
    try:
        for name in _order(parts):
            load_part(folder, manifest, name, parts[name], verify)
        own_states.load(manifest, parts, lambda name: _read(folder, manifest, name, None, verify))
        for part in parts.values():
            if isinstance(part, Optimizer):
                align_state(part)
        load_stream(folder, manifest, verify)
        if verify and comm.is_main():  # a checkpoint is intact or corrupted as a whole, even if not all of it is loaded
            for name in manifest.files.keys() - asked:
                for damage in manifests.damages(folder, manifest, only=name):
                    raise DamagedError(damage)
    except BaseException as problem:
        return problem
    return None


def _order(parts: Mapping[str, Stateful]) -> list[str]:
    """As given, but a strategy before models and optimizers: it adds the parameter groups that the run had added, for
    example."""
    names, strategies = list(parts), own_states.strategies(parts)
    first = next((place for place, name in enumerate(names) if isinstance(parts[name], nn.Module | Optimizer)), len(names))
    return sorted(names, key=lambda name: min(names.index(name), first - 0.5) if name in strategies else names.index(name))


def _read(folder: Path, manifest: Manifest, name: str, part: Stateful | None, verify: bool) -> Any:
    path = folder / f"{name}.pt"
    try:
        return sharding.read_part(folder, manifest, name, part, verify)
    except (DamagedError, UnreadableError) as error:
        raise type(error)(f"{error}{f', as read by rank {comm.rank()}' if comm.rank() else ''}") from None
    except FileNotFoundError as error:
        if comm.is_main():
            raise DamagedError(f"{error.filename} cannot be read (No such file or directory)") from None
        raise CheckpointError(
            f"{error.filename} is missing on rank {comm.rank()}: all ranks must see the same folder"
        ) from None
    except OSError as error:
        raise UnreadableError(f"{error.filename or path} cannot be read ({error.strerror}), on rank {comm.rank()}") from None
    except Exception as error:  # torch raises many types; the file is intact, but not one of ours
        raise CheckpointError(f"{path} cannot be loaded: {error}") from None


def load_part(folder: Path, manifest: Manifest, name: str, part: Stateful, verify: bool = True) -> None:
    path = folder / f"{name}.pt"
    if path.name not in manifest.files:
        raise ConfigError(
            f"the checkpoint {folder} has no part {name!r}: another script made it; start a new run with --fresh or --name NAME"
        )
    state = _read(folder, manifest, name, part, verify)
    try:
        divided_parts.load(part, state)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"{name} does not fit its checkpoint {short(path)}: {cut(text, 400)}; undo the change, or start a "
            "new run with --fresh or --name NAME"
        ) from None


def load_stream(folder: Path, manifest: Manifest, verify: bool) -> None:
    streams = _read(folder, manifest, RNG, None, verify)
    mine = streams.get(str(comm.rank()))
    if mine is not None:
        seed.set_rng_state(mine)
    if manifest.world_size != comm.world_size():
        then, now = count(manifest.world_size, "rank"), count(comm.world_size(), "rank")
        log.say(
            f"the checkpoint was made on {then}, and this run has {now}: same global batches in the same order; "
            "random layers and rounding differ"
        )
