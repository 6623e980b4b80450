"""The process group, and collectives that give the same answer on one rank as on many.

    world = comm.init();  comm.all_reduce(tensor);  name = comm.broadcast_object(name)

`torch.distributed` appears here and in sync alone. On a single rank nothing here communicates, and a rank that is `alone`
for a while (inside a guarded function) is a single rank.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rankwise import world as world_
from rankwise.errors import ConfigError, WorldError
from rankwise.world import World

T = TypeVar("T")

_PATIENCE = timedelta(days=3650)

_world: World | None = None  # what init found: the identity of this process and of the loader workers that it forks
_pid = 0  # the process that called init
_alone = False
_patient: tuple[Any, Any] = (None, None)  # (the process group it belongs to, the group)
_nodes: tuple[Any, list[list[int]]] = (None, [])


def init(backend: str | None = None, timeout_s: float = 1800.0) -> World:
    """Collective. Join the other ranks, if there are any, and return which rank this is. A second call changes nothing.

    `backend` is torch's; by default gloo for tensors on the CPU and NCCL for those on a GPU. `timeout_s` bounds each
    collective. Raises WorldError when the environment does not say which rank this process is, or where rank 0 listens.
    """
    global _world, _pid
    if dist.is_initialized():
        return _here()
    world = world_.discover(os.environ)
    if world.world_size > 1:
        _join(world, backend, timeout_s)
    _world, _pid = world, os.getpid()
    return world


def _join(world: World, backend: str | None, timeout_s: float) -> None:
    if world.master_addr is None or world.master_port is None:
        lacks = [n for n, v in (("MASTER_ADDR", world.master_addr), ("MASTER_PORT", world.master_port)) if v is None]
        raise WorldError(
            f"rank {world.rank} of {world.world_size} ({world.source}) but no {' and no '.join(lacks)}: "
            "the ranks cannot find each other; set MASTER_ADDR (rank 0's host) and MASTER_PORT (a free port there) "
            "before the launcher, or start it with: rankwise run script.py"
        )
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    dist.init_process_group(
        backend,
        init_method="env://",
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def rank() -> int:
    """This process among all ranks, from 0: before `init` as the environment has it, and in a loader worker its rank's."""
    return dist.get_rank() if dist.is_initialized() else _here().rank


def world_size() -> int:
    """How many ranks there are, on all nodes."""
    return dist.get_world_size() if dist.is_initialized() else _here().world_size


def local_rank() -> int:
    """This process among the ranks of its node, from 0."""
    return _here().local_rank


def local_world_size() -> int:
    """How many ranks there are on this node."""
    return _here().local_world_size


def is_main() -> bool:
    """Whether this is rank 0."""
    return rank() == 0


def is_local_main() -> bool:
    """Whether this is the first rank of its node."""
    return local_rank() == 0


def _here() -> World:
    """Raises WorldError where the environment speaks half, or contradicts a process group that the script made itself."""
    if _world is not None:
        return _world
    world = world_.discover(os.environ)
    if dist.is_initialized() and (world.rank, world.world_size) != (dist.get_rank(), dist.get_world_size()):
        raise WorldError(
            f"the process group has rank {dist.get_rank()} of {dist.get_world_size()}, the environment rank {world.rank} of "
            f"{world.world_size}: which rank of its node this is cannot be told; set RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT and call rankwise.init() in place of init_process_group"
        )
    return world


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside it collectives answer at once, as on one rank: the other ranks are not there to take part."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def is_alone() -> bool:
    """Whether nobody answers: a single rank, or one inside `alone`.

    Raises WorldError when there are others and this process cannot reach them: `init` was not called, and each rank would
    go on alone, or it is a loader worker, which shares its rank's connections but not its turn.
    """
    if _alone:
        return True
    if not dist.is_initialized():
        world = _here()
        if world.world_size > 1:
            raise WorldError(
                f"rank {world.rank} of {world.world_size} has not joined the others; call rankwise.init() first "
                "(a loader worker cannot join: collectives and guards belong into the training process)"
            )
        return True
    if _pid not in (0, os.getpid()):
        raise WorldError(
            f"a collective or guard in process {os.getpid()}, which rank {dist.get_rank()} forked (a loader worker, say): "
            "call it in the training process, before the workers start"
        )
    return False


def patient() -> Any:
    """Collective, the first time. A process group whose collectives wait for a rank as long as it lives: for work that only
    some ranks do, and that may take hours. None, the default group, where torch has no gloo.
    """
    global _patient
    if not dist.is_gloo_available():
        return None
    if _patient[0] is not dist.group.WORLD:
        _patient = dist.group.WORLD, dist.new_group(backend="gloo", timeout=_PATIENCE)
    return _patient[1]


def nodes() -> list[list[int]]:
    """Collective, the first time. The ranks of each node, the first one first.

    A node is what the launcher calls one (World.node_rank) and never more than one host: ranks are of one node if they have
    the same node rank, or none, the same host name and boot, and different local ranks.
    """
    global _nodes
    if is_alone():
        return [[rank()]]
    if _nodes[0] is not dist.group.WORLD:
        here = _here()
        boot = Path("/proc/sys/kernel/random/boot_id")
        host = (here.node_rank, platform.node(), boot.read_text() if boot.exists() else "")
        _nodes = dist.group.WORLD, _grouped(all_gather_object((host, here.local_rank)))
    return _nodes[1]


def _grouped(told: Sequence[tuple[Any, int]]) -> list[list[int]]:
    """`told`: (host, local rank) of each rank. A local rank that a host's node has already opens another node: hosts that
    are called alike, or a node rank that nobody set."""
    members: list[tuple[Any, dict[int, int]]] = []
    for number, (host, local) in enumerate(told):
        node = next((ranks for name, ranks in members if name == host and local not in ranks), None)
        if node is None:
            members.append((host, node := {}))
        node[local] = number
    return [[node[local] for local in sorted(node)] for _, node in members]


def barrier() -> None:
    """Collective. Return when all ranks have called it."""
    if not is_alone():
        dist.barrier()


_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_CARRIER = {torch.bool: torch.uint8, torch.int16: torch.int32}
"""What a dtype travels as where gloo has no sum, minimum or maximum of it."""


def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Collective. Reduce `tensor` in place over all ranks and return it; of any shape and stride, the same on all ranks.

    `op`: sum, mean, min, max; on truth values min (all) and max (any) alone. Raises ConfigError for another, and for the mean
    of whole numbers, which they cannot hold.
    """
    if op not in _OPS:
        raise ConfigError(f"all_reduce(op={op!r}): there are {', '.join(_OPS)}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(f"the mean of {tensor.dtype} cannot be put back into it; reduce tensor.float()")
    if op == "sum" and tensor.dtype is torch.bool:
        raise ConfigError("the sum of truth values is none; use op='max' (any), op='min' (all), or reduce tensor.int()")
    if is_alone() or tensor.numel() == 0:
        return tensor
    values = tensor.detach()
    carrier = values.to(_CARRIER.get(values.dtype, values.dtype)).contiguous()
    dist.all_reduce(carrier, _OPS[op])
    if op == "mean":
        carrier.div_(dist.get_world_size())
    if carrier is not values:
        values.copy_(carrier)
    return tensor


def broadcast(tensors: Sequence[torch.Tensor], src: int = 0) -> None:
    """Collective. Make every tensor what it is on rank `src`, in place; one message for each dtype and device."""
    if is_alone():
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for group in kinds.values():
        flat = torch.cat([t.reshape(-1) for t in group])
        dist.broadcast(flat, src)
        parts = torch.split(flat, [t.numel() for t in group])
        for tensor, part in zip(group, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def broadcast_object(value: T, src: int = 0, group: Any = None) -> T:
    """Collective. Rank `src`'s value on every rank, by pickle; the argument of the other ranks is passed over."""
    if is_alone():
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src, group)
    return box[0]  # type: ignore[no-any-return]


def all_gather_object(value: T, group: Any = None) -> list[T]:
    """Collective. Every rank's value, in the order of ranks, by pickle."""
    if is_alone():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def all_agree(value: bool) -> bool:
    """Collective. True if it is true on every rank."""
    return bool(all_reduce(torch.tensor(int(value)), "min").item())
