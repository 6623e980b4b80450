"""The process group, and collectives that give the same answer on one rank as on many.

    world = comm.init();  comm.all_reduce(tensor);  name = comm.broadcast_object(name)

`torch.distributed` appears here and in sync alone. On a single rank nothing here communicates.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rankwise import world as world_
from rankwise.errors import WorldError
from rankwise.world import World

T = TypeVar("T")


def init(backend: str | None = None, timeout_s: float = 1800.0) -> World:
    """Collective. Join the other ranks, if there are any, and return which rank this is. A second call changes nothing.

    `backend` is torch's; by default gloo for tensors on the CPU and NCCL for those on a GPU. `timeout_s` bounds each
    collective. Raises WorldError when the environment does not say which rank this process is, or where rank 0 listens.
    """
    world = world_.discover(os.environ)
    if world.world_size == 1 or dist.is_initialized():
        return world
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
    return world


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _joined() -> bool:
    """Whether there are others to talk to. Raises WorldError when a launcher says so and `init` was not called: each rank
    would go on alone."""
    if dist.is_initialized():
        return True
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise WorldError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} but this rank has not joined the others; call rankwise.init() first"
        )
    return False


def barrier() -> None:
    """Collective. Return when all ranks have called it."""
    if _joined():
        dist.barrier()


def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Collective. Reduce `tensor` in place over all ranks and return it. `op`: sum, min, max."""
    if _joined():
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()))
    return tensor


def broadcast(tensors: Sequence[torch.Tensor], src: int = 0) -> None:
    """Collective. Make every tensor what it is on rank `src`, in place; one message for each dtype and device."""
    if not _joined():
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


def broadcast_object(value: T, src: int = 0) -> T:
    """Collective. Rank `src`'s value on every rank, by pickle; the argument of the other ranks is passed over."""
    if not _joined():
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src)
    return box[0]  # type: ignore[no-any-return]


def all_gather_object(value: T) -> list[T]:
    """Collective. Every rank's value, in the order of ranks, by pickle."""
    if not _joined():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_agree(value: bool) -> bool:
    """Collective. True if it is true on every rank."""
    return bool(all_reduce(torch.tensor(int(value)), "min").item())
