"""The process group, and collectives that give the same answer on one rank as on many.

    world = comm.init();  comm.all_reduce(tensor);  name = comm.broadcast_object(name)

`torch.distributed` appears here, in the store and in sync alone. On a single rank nothing here communicates, and a rank that
is `alone` for a while (inside a guarded function) is a single rank.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rankwise import errors, schedulers
from rankwise.dist import accelerator, rendezvous
from rankwise.dist import store as stores
from rankwise.dist import world as world_
from rankwise.dist.world import Given, World
from rankwise.errors import ConfigError, DeviceError, WorldError
from rankwise.host import network
from rankwise.host.arguments import ANYTHING, FROM_ONE, FROM_ZERO, SECONDS, TEXT, instance, one_of, takes

T = TypeVar("T")

_LAST_TENSORS_S = 0.1
_PATIENCE = timedelta(days=3650)

_world: World | None = None  # what init found: the identity of this process and of the loader workers that it forks
_pid = 0  # the process that called init
_alone = False
_patient: tuple[Any, Any] = (None, None)  # (the process group it belongs to, the group)
_for_cpu: tuple[Any, Any] = (None, None)  # (the process group, one for tensors on the CPU if that has no backend for them)
_nodes: tuple[Any, list[list[int]]] = (None, [])


@takes(
    backend=TEXT.or_none, timeout_s=SECONDS, rdzv=TEXT.or_none, join_timeout_s=SECONDS, rank=FROM_ZERO.or_none,
    world_size=FROM_ONE.or_none, local_rank=FROM_ZERO.or_none, local_world_size=FROM_ONE.or_none,
)  # fmt: skip
def init(
    backend: str | None = None,
    timeout_s: float = 1800.0,
    *,
    rdzv: str | None = None,
    join_timeout_s: float = 300.0,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
) -> World:
    """Collective. Join the other ranks, if there are any, and return which rank this is. A second call changes nothing.

    `backend` is torch's; by default gloo for tensors on the CPU and NCCL for those on a GPU (XCCL on Intel's): then all ranks
    must have the same kind of device. `timeout_s` bounds each collective. Where the launcher gives no address (mpirun, srun,
    `torch.multiprocessing.spawn`) rank 0 announces its own in a file, or listens at `rdzv`, "HOST:PORT"; `join_timeout_s`
    bounds the wait for the others then. From now on an uncaught error of ours ends this process with its message and the
    script's line, without a traceback.

    The numbers are for who is given them, and not by variables: `rank` and `world_size` are enough in what
    `torch.multiprocessing.spawn` started on one machine. Raises WorldError when it cannot be told which rank this process is,
    or ranks do not come, and names those; and on all ranks if their devices differ, or a rank has a GPU that torch cannot use
    (that rank: DeviceError, with torch's own reason).
    """
    global _world, _pid
    errors.without_traceback()
    if dist.is_initialized():
        return _here()
    if rank is not None and local_rank is None and local_world_size is None and multiprocessing.parent_process() is not None:
        _refuse_spawn_under_a_launcher()
        local_rank, local_world_size = rank, world_size  # the children of one process: all on this host
    given = Given(rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size)
    world = world_.discover(os.environ, **given)
    if world.rank == 0:
        _say_if_bound_to_one_core(world.source)
    if world.world_size > 1:
        world = _join(_asked(world, rdzv), backend, timeout_s, join_timeout_s)
        if world.run_dir is None:
            # A thread of gloo that drops its last tensor when Python has begun to end is unwound there and aborts the process
            # (seen at the end of one training in three under mpirun). Ranks of our agent leave by _exit.
            atexit.register(time.sleep, _LAST_TENSORS_S)
    _world, _pid = world, os.getpid()
    return world


def _refuse_spawn_under_a_launcher() -> None:
    """Each of its ranks would start as many processes as it has itself been told of."""
    above = world_.explain(os.environ).world
    if above is not None and above.world_size > 1:
        raise WorldError(
            f"rank {above.rank} of {above.world_size} ({above.source}) called torch.multiprocessing.spawn: each of these ranks "
            "starts ranks of its own, which do not join; start the script once with python, or call the spawned function "
            "directly, with rankwise.init() in it without numbers"
        )


def _asked(world: World, rdzv: str | None) -> World:
    """`world` with the address of rank 0 that the script gave. Raises ConfigError unless it is HOST:PORT."""
    if rdzv is None:
        return world
    host, _, port = rdzv.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"rdzv={rdzv!r}: give HOST:PORT, rank 0's host and a free port there, for example node1:29500")
    origin = {**world.origin, "master_addr": "rdzv", "master_port": "rdzv"}
    return replace(world, master_addr=host.strip("[]"), master_port=int(port), origin=origin)


def _join(world: World, backend: str | None, timeout_s: float, join_timeout_s: float) -> World:
    lacks = [n for n, v in (("MASTER_ADDR", world.master_addr), ("MASTER_PORT", world.master_port)) if v is None]
    if len(lacks) == 1:
        raise WorldError(
            f"rank {world.rank} of {world.world_size} ({world.source}) has no {lacks[0]}; set both MASTER_ADDR (rank 0's host) "
            "and MASTER_PORT (a free port there) before the launcher, or neither: then rank 0 announces its address"
        )
    timeout = timedelta(seconds=timeout_s)
    if not lacks and world.local_world_size < world.world_size:
        # gloo tells the others the address of this host's own name, which /etc/hosts may have at 127.0.1.1.
        interface = network.interface_towards(world.master_addr or "")
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if world.origin.get("master_addr") == "MASTER_ADDR" and schedulers.launcher(world.source).has_store:
        ours = world.run_dir is not None and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
        # Who set these may have made the store itself, as torchrun's agent does: torch knows.
        if backend is not None and (not ours or backend == "mpi"):  # it may need no store
            dist.init_process_group(
                backend, init_method="env://", rank=world.rank, world_size=world.world_size, timeout=timeout
            )  # fmt: skip
            return world
        store = stores.of_agent(world, timeout) if ours else stores.of_torch(world, timeout)
    elif lacks:
        world, store = stores.announced(world, timeout, join_timeout_s)
    else:
        store = stores.at_address(world, timeout, join_timeout_s)
    if backend is None:
        backend = _agreed_backend(world, store)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout)
    return world


def _agreed_backend(world: World, store: Any) -> str:
    """Collective. That of the device that all ranks have. One without a GPU would wait in gloo for the others in NCCL."""
    kind, problem = "cpu", None
    try:
        found = accelerator.current(os.environ)
        kind = found.type if found is not None else "cpu"
    except DeviceError as error:
        problem = error
    accelerator.compare(store, world, kind, problem)
    if kind == "cpu":
        return "gloo"
    theirs = dist.Backend.default_device_backend_map.get(kind)
    if theirs is None or not dist.is_backend_available(theirs):
        if kind in dist.Backend.backend_capability["gloo"]:
            return "gloo"
        raise ConfigError(
            f"torch {torch.__version__} has no backend for collectives on {kind}; give one: "
            'rankwise.init(backend="..."), or train on one device: --nproc 1'
        )
    return f"cpu:gloo,{kind}:{theirs}" if theirs != "gloo" else "gloo"


def _say_if_bound_to_one_core(source: str) -> None:
    """By a launcher that does so by itself; the choice stays the user's."""
    said = schedulers.launcher(source).when_bound if source != world_.ARGUMENTS else ""
    with contextlib.suppress(OSError):
        if said and len(os.sched_getaffinity(0)) == 1 < (cores := len(os.sched_getaffinity(os.getppid()))):
            rendezvous.say(said.format(cores=cores))


def world() -> World:
    """That of `init`; or of a process for itself, where nothing tells of other ranks. What a part takes at its first use.

    Raises WorldError where the environment describes several ranks and `init` was not called: each would go on alone.
    """
    here = _here()
    if here.world_size > 1 and not dist.is_initialized():
        raise WorldError(_not_joined(here))
    return here


def _not_joined(world: World) -> str:
    return (
        f"rank {world.rank} of {world.world_size} has not joined the others; call rankwise.init() first "
        "(a loader worker cannot join: call collectives and guards in the training process)"
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
            f"{world.world_size}, so the local rank is not known; set RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT and call rankwise.init() instead of init_process_group"
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
            raise WorldError(_not_joined(world))
        return True
    if _pid not in (0, os.getpid()):
        raise WorldError(
            f"a collective or guard was called in process {os.getpid()}, which rank {dist.get_rank()} forked (for example a "
            "loader worker); call it in the training process, before the workers start"
        )
    return False


def patient() -> Any:
    """Collective, the first time. A process group whose collectives wait for a rank as long as it lives: for work that only
    some ranks do, and that may take hours. None, the default group, where torch has no gloo, and for a rank that is alone.
    """
    global _patient
    if is_alone() or not dist.is_gloo_available():
        return None
    if _patient[0] is not dist.group.WORLD:
        group = dist.new_group(backend="gloo")  # to make it is bounded by torch's own 30 minutes
        dist.barrier(group)  # all have it before any rank begins its work: one that dies there is noticed by the others
        group.set_timeout(_PATIENCE)
        _patient = dist.group.WORLD, group
    return _patient[1]


def group_for(device: torch.device) -> Any:
    """Collective, the first time. The process group for tensors there: None, the default one, or one of gloo for the CPU, where
    the script has made a default group that has no backend for it (`init_process_group("nccl")`)."""
    global _for_cpu
    if device.type != "cpu":
        return None
    if _for_cpu[0] is not dist.group.WORLD:
        has_cpu = any(part.split(":")[0] == "cpu" for part in dist.get_backend_config().split(","))
        made = None if has_cpu or not dist.is_gloo_available() else dist.new_group(backend="gloo")
        _for_cpu = dist.group.WORLD, made
    return _for_cpu[1]


_CPU = torch.device("cpu")


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
        dist.barrier(group_for(_CPU))


_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_CARRIER = {torch.bool: torch.uint8, torch.int16: torch.int32}
"""What a dtype travels as where gloo has no sum, minimum or maximum of it."""


@takes(tensor=instance(torch.Tensor, "a tensor: torch.tensor([loss])"), op=one_of(*_OPS))
def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Collective. Reduce `tensor` in place over all ranks and return it; of any shape and stride, the same on all ranks.

    `op`: sum, mean, min, max; on truth values min (all) and max (any) alone. Raises ConfigError for another, and for the mean
    of whole numbers, which they cannot hold.
    """
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(f"op='mean' needs a floating-point tensor, got {tensor.dtype}; reduce tensor.float()")
    if op == "sum" and tensor.dtype is torch.bool:
        raise ConfigError(
            "op='sum' of a bool tensor is not possible; use op='max' (any), op='min' (all), or reduce tensor.int()"
        )
    if is_alone() or tensor.numel() == 0:
        return tensor
    values = tensor.detach()
    carrier = values.to(_CARRIER.get(values.dtype, values.dtype)).contiguous()
    dist.all_reduce(carrier, _OPS[op], group_for(carrier.device))
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
        dist.broadcast(flat, src, group_for(flat.device))
        parts = torch.split(flat, [t.numel() for t in group])
        for tensor, part in zip(group, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


@takes(value=ANYTHING, src=FROM_ZERO, group=ANYTHING)
def broadcast_object(value: T, src: int = 0, group: Any = None) -> T:
    """Collective. Rank `src`'s value on every rank, by pickle; the argument of the other ranks is passed over."""
    if is_alone():
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src, group if group is not None else group_for(_CPU))
    return box[0]  # type: ignore[no-any-return]


def all_gather_object(value: T, group: Any = None) -> list[T]:
    """Collective. Every rank's value, in the order of ranks, by pickle."""
    if is_alone():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group if group is not None else group_for(_CPU))
    return values


def gather_object(value: T, dst: int = 0) -> list[T]:
    """Collective. Every rank's value on rank `dst`, in the order of ranks, by pickle; nothing on the others."""
    if is_alone():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == dst else None
    dist.gather_object(value, values, dst, group_for(_CPU))
    return values or []


def all_agree(value: bool) -> bool:
    """Collective. True if it is true on every rank."""
    return bool(all_reduce(torch.tensor(int(value)), "min").item())
