"""Which checkpoint all ranks go on from, where each node may see another folder: the newest that any of them has.

found = chosen(catalog, damaged)        # collective; brought to the nodes that lack it
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any, NamedTuple

from rankwise.checkpoint.catalog import Catalog
from rankwise.checkpoint.folders import order
from rankwise.checkpoint.manifest import Manifest
from rankwise.checkpoint.replicate import digest, sharing, spread
from rankwise.dist import comm, log
from rankwise.dist.guards import agreed
from rankwise.errors import CheckpointError
from rankwise.host.terminal import count


class Chosen(NamedTuple):
    folder: Path
    manifest: Manifest
    is_copy: bool
    """This rank has written it, for its node, which had none."""


def chosen(catalog: Catalog, damaged: dict[Path, str]) -> Chosen | None:
    """Collective. None where no node has one. `damaged`: what the first rank of each node knows to be so, and why.

    Raises CheckpointError on all ranks where there are some and none is whole, or where a node cannot keep its copy.
    """
    group = comm.patient()
    is_first = any(ranks[0] == comm.rank() for ranks in comm.nodes())
    own, why = None, ""
    with agreed():
        try:
            if comm.is_main():
                catalog.bring()
            own = catalog.newest(damaged, catalog.glanced_at) if is_first else None
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
    mine: Any = (own[1], digest(folder), platform.node()) if own is not None else None
    manifest, there, host = comm.broadcast_object(mine, source, group)
    lacks = comm.all_gather_object(is_first and (folder in damaged or digest(folder) != there), group)
    to = []
    if any(lacks):
        disks = sharing(catalog.folder)
        to = [ranks[0] for ranks in disks if source not in ranks and any(lacks[rank] for rank in ranks)]
        damaged.pop(folder, None)  # on the source's own disk it is read once more
    if to:
        size = f"{manifest.bytes / 1e6:.1f} MB"
        log.say(f"{newest} is on {host} and not on {count(len(to), 'other node')}: copied there, {size}")
        spread(folder, source, to)
    return Chosen(folder, manifest, comm.rank() in to)


def is_damaged_here(mine: bool) -> bool:
    """Collective. Whether one of this node's ranks has read another byte than was written; told to the node's first rank."""
    told = comm.all_gather_object(mine)
    return any(ranks[0] == comm.rank() and any(told[rank] for rank in ranks) for ranks in comm.nodes())
