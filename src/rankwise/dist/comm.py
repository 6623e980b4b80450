"""The process group, and collectives that give the same answer on one rank as on many.

    world = comm.init();  comm.all_reduce(tensor);  name = comm.broadcast_object(name)

`torch.distributed` is used only here, in joining.py, in the store and in sync. On a single rank nothing here communicates. A
rank that is `alone` for a while (inside a guarded function) behaves like a single rank.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rankwise import errors, schedulers
from rankwise.dist import joining, private_names, rendezvous, shared_memory
from rankwise.dist import world as world_
from rankwise.dist.shared_memory import SharedMemory
from rankwise.dist.world import Given, World
from rankwise.errors import ConfigError, WorldError
from rankwise.host.arguments import ANYTHING, FROM_ONE, FROM_ZERO, SECONDS, TEXT, instance, one_of, takes

private_names.postpone_compiler()  # if `import rankwise` came before torch: scripts create optimizers before they call rankwise

T = TypeVar("T")

_LAST_TENSORS_S = 0.1
_PATIENCE = timedelta(days=3650)
_PATIENT = object()  # for `group`: in memory that ranks share

_world: World | None = None  # what init found, also for the loader workers that this process forks
_pid = 0  # the process that called init
_alone = False
_patient: tuple[Any, Any] = (None, None)  # (the default process group that it belongs to, the group)
_shared: tuple[Any, SharedMemory | None] = (None, None)  # (the default process group that it belongs to, the memory)
_timeout_s, _shares = 1800.0, True  # set by init
_for_cpu: tuple[Any, Any] = (None, None)  # (the default process group, a group for CPU tensors if it has no backend for them)
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
    """Collective. Connect to the other ranks, if there are any, and return which rank this is. A second call changes nothing.

    `backend` is torch's. By default, tensors on the CPU use gloo and tensors on a GPU use NCCL (XCCL on Intel GPUs); all ranks
    must then have the same kind of device. If all ranks are on one host, rankwise itself does not send CPU tensors: it uses
    memory that the ranks share (shared_memory.py), unless a backend is given. `timeout_s` limits each collective; if the script
    has made the process group, the `timeout` given there does. If the launcher gives no address (mpirun, srun,
    `torch.multiprocessing.spawn`), rank 0 announces its address in a file, or listens at `rdzv`, "HOST:PORT"; `join_timeout_s`
    limits the wait for the other ranks. After this call, an uncaught error of rankwise ends the process with its message and
    the line of the script, without a traceback.

    Pass the numbers only if no launcher sets them as variables. `rank` and `world_size` are enough in processes that
    `torch.multiprocessing.spawn` started on one machine. Raises WorldError if this process does not know its rank, or if ranks
    are missing (the message names them). If the ranks have different devices, or a rank has a GPU that torch cannot use, all
    ranks raise WorldError (the rank with that GPU: DeviceError, with torch's reason).
    """
    global _world, _pid, _timeout_s, _shares
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
        world = joining.join(world, rdzv, backend, timeout_s, join_timeout_s)
        if world.run_dir is None:
            # If a thread of gloo drops its last tensor while Python is shutting down, the process aborts (seen at the end of
            # one training in three under mpirun). Ranks of our agent leave by _exit.
            atexit.register(time.sleep, _LAST_TENSORS_S)
        _timeout_s, _shares = timeout_s, backend is None and world.local_world_size == world.world_size
        _memory()  # here, so that the first collective of a rank is what the script calls
    _world, _pid = world, os.getpid()
    return world


def _refuse_spawn_under_a_launcher() -> None:
    """With spawn inside a launcher's job, each rank of the launcher would start all ranks once more."""
    above = world_.explain(os.environ).world
    if above is not None and above.world_size > 1:
        raise WorldError(
            f"rank {above.rank} of {above.world_size} ({above.source}) called torch.multiprocessing.spawn: each of these ranks "
            "would start its own ranks; start the script once with python, or call the spawned function "
            "directly, with rankwise.init() in it without numbers"
        )


def _say_if_bound_to_one_core(source: str) -> None:
    """Some launchers bind each process to one core by default; the user decides whether to change that."""
    said = schedulers.launcher(source).when_bound if source != world_.ARGUMENTS else ""
    with contextlib.suppress(OSError):
        if said and len(os.sched_getaffinity(0)) == 1 < (cores := len(os.sched_getaffinity(os.getppid()))):
            rendezvous.say(said.format(cores=cores))


def world() -> World:
    """The World of `init`, or that of a single process if there are no other ranks. Other modules call this at their first use.

    Raises WorldError if the environment describes several ranks and `init` was not called: each would train alone.
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
    """The rank of this process, from 0. Before `init`: from the environment; in a loader worker: the rank that it works for."""
    return dist.get_rank() if dist.is_initialized() else _here().rank


def world_size() -> int:
    """The number of ranks on all nodes."""
    return dist.get_world_size() if dist.is_initialized() else _here().world_size


def local_rank() -> int:
    """The number of this process among the ranks of its node, from 0."""
    return _here().local_rank


def local_world_size() -> int:
    """The number of ranks on this node."""
    return _here().local_world_size


def is_main() -> bool:
    """Whether this is rank 0."""
    return rank() == 0


def is_local_main() -> bool:
    """Whether this is the first rank of its node."""
    return local_rank() == 0


def _here() -> World:
    """The World of this process. Raises WorldError if the environment is incomplete, or contradicts a process group that the
    script created."""
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
    """Inside, collectives return at once, as on one rank, because the other ranks do not take part."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def is_alone() -> bool:
    """Whether this is a single rank, or inside `alone`.

    Raises WorldError if there are other ranks and this process cannot communicate with them: `init` was not called, or this is
    a loader worker, which has inherited its rank's connections and must not use them.
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
    return dist.get_world_size() == 1


def check_together(what: str) -> None:
    """Raises ConfigError inside a guard (run_on_main, for example) if there are other ranks. `what`: why all must be there."""
    if _alone and world_size() > 1:
        raise ConfigError(
            f"{what}, and inside a guard such as run_on_main only some ranks are there; call this on all ranks, outside "
            "of the guard, and only print or write the result inside it"
        )


def patient() -> Any:
    """Collective at the first call. What to give as `group`, so that a collective waits for a rank as long as it is alive: for
    work that only some ranks do, and that may take hours. None (the default group) if torch has no gloo, or if this rank is
    alone."""
    global _patient
    if is_alone() or not dist.is_gloo_available():
        return None
    if _memory() is not None:
        return _PATIENT
    if _patient[0] is not dist.group.WORLD:
        group = dist.new_group(backend="gloo")  # without this, the group would have torch's time limit of 30 minutes
        dist.barrier(group)  # no rank starts its work before all have the group: they notice if a rank dies there
        group.set_timeout(_PATIENCE)
        _patient = dist.group.WORLD, group
    return _patient[1]


def group_for(device: torch.device) -> Any:
    """Collective at the first call. The process group for tensors on `device`: None (the default group), or a gloo group for
    the CPU if the script created a default group without a backend for it (`init_process_group("nccl")`)."""
    global _for_cpu
    if device.type != "cpu":
        return None
    if _for_cpu[0] is not dist.group.WORLD:
        made = None if "cpu" in joining.backends() or not dist.is_gloo_available() else dist.new_group(backend="gloo")
        _for_cpu = dist.group.WORLD, made
    return _for_cpu[1]


def _memory() -> SharedMemory | None:
    """Collective at the first call. Memory that all ranks share. None if there is none, or if `init` was given a backend: then
    that is used for everything."""
    global _shared
    if _shared[0] is not dist.group.WORLD:
        takes_cpu = group_for(_CPU) is not None or "cpu" in joining.backends()
        made = None
        if _shares and takes_cpu:
            made = shared_memory.connect(dist.get_rank(), dist.get_world_size(), _limit_s(), _told)
        _shared = dist.group.WORLD, made
    return _shared[1]


def _limit_s() -> float:
    """The time limit of the default group, which the script may have made."""
    if _pid:
        return _timeout_s
    device = torch.device(next(iter(joining.backends())))
    found = private_names.timeout(dist.group.WORLD, device)
    return found.total_seconds() if found is not None else _timeout_s


def _told(data: bytes) -> list[bytes]:
    """Collective. The `data` of all ranks, as long on each. It is not one of the collectives that the agent notes."""
    joining.sent += 1
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    told = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    group: Any = group_for(_CPU) or dist.group.WORLD
    group.allgather([told], [mine]).wait()
    return [bytes(each.tolist()) for each in told]


_CPU = torch.device("cpu")


def nodes() -> list[list[int]]:
    """Collective at the first call. The ranks of each node; the node of rank 0 comes first.

    A node is what the launcher calls a node (World.node_rank), and never more than one host: ranks are on one node if they
    have the same node rank (or none), the same host name and boot, and different local ranks.
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
    """`told`: (host, local rank) of each rank. If a node already has this local rank, the rank is on another node: two hosts
    may have the same name, and the node rank may not be set."""
    members: list[tuple[Any, dict[int, int]]] = []
    for number, (host, local) in enumerate(told):
        node = next((ranks for name, ranks in members if name == host and local not in ranks), None)
        if node is None:
            members.append((host, node := {}))
        node[local] = number
    return [[node[local] for local in sorted(node)] for _, node in members]


def barrier() -> None:
    """Collective. Return when all ranks have called this."""
    if not is_alone():
        if (memory := _memory()) is not None:
            memory.barrier()
        else:
            dist.barrier(group_for(_CPU))


_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_CARRIER = {torch.bool: torch.uint8, torch.int16: torch.int32}
"""The dtype to send instead, because gloo cannot reduce this one."""


def add(tensor: torch.Tensor) -> None:
    """Collective. Sum a contiguous tensor in place over all ranks: `all_reduce` without its checks, for each step."""
    _reduce(tensor, "sum")


def _reduce(tensor: torch.Tensor, op: str) -> None:
    if tensor.is_cpu and (memory := _memory()) is not None:
        memory.all_reduce(tensor, op)
    else:
        dist.all_reduce(tensor, _OPS[op], group_for(tensor.device))


@takes(tensor=instance(torch.Tensor, "a tensor: torch.tensor([loss])"), op=one_of(*_OPS))
def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Collective. Reduce `tensor` in place over all ranks and return it. It may have any shape, the same on all ranks.

    `op`: sum, mean, min or max; for bool tensors only min (all) and max (any). Raises ConfigError for any other `op`, and for
    the mean of an integer tensor.
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
    sent_as = torch.float32 if op == "mean" and values.dtype is torch.float16 else _CARRIER.get(values.dtype, values.dtype)
    carrier = values.to(sent_as).contiguous()  # a sum of float16 may overflow although the mean does not
    _reduce(carrier, "sum" if op == "mean" else op)
    if op == "mean":
        carrier.div_(dist.get_world_size())
    if carrier is not values:
        values.copy_(carrier)
    return tensor


def broadcast(tensors: Sequence[torch.Tensor], src: int = 0) -> None:
    """Collective. Set every tensor in place to its value on rank `src`; one message per dtype and device."""
    if is_alone():
        return
    _check_rank("src", src)
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for group in kinds.values():
        flat = torch.cat([t.reshape(-1) for t in group])
        data = flat.view(torch.uint8)  # gloo has no int16, no unsigned integers of more bits, no float8
        if flat.is_cpu and (memory := _memory()) is not None:
            memory.broadcast(data, src)
        else:
            dist.broadcast(data, src, group_for(flat.device))
        parts = torch.split(flat, [t.numel() for t in group])
        for tensor, part in zip(group, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


@takes(value=ANYTHING, src=FROM_ZERO, group=ANYTHING)
def broadcast_object(value: T, src: int = 0, group: Any = None) -> T:
    """Collective. Return the value of rank `src` on every rank, by pickle; the values of other ranks are ignored."""
    if is_alone():
        return value
    _check_rank("src", src)
    if group in (None, _PATIENT) and (memory := _memory()) is not None:
        is_mine = dist.get_rank() == src
        data = memory.broadcast_object(pickle.dumps(value) if is_mine else b"", src, patient=group is _PATIENT)
        return value if is_mine else pickle.loads(data)
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src, group if group is not None else group_for(_CPU))
    return box[0]  # type: ignore[no-any-return]


def all_gather_object(value: T, group: Any = None) -> list[T]:
    """Collective. Return the values of all ranks, in the order of ranks, by pickle."""
    if is_alone():
        return [value]
    if group in (None, _PATIENT) and (memory := _memory()) is not None:
        return list(map(pickle.loads, memory.all_gather_object(pickle.dumps(value), patient=group is _PATIENT)))
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group if group is not None else group_for(_CPU))
    return values


def gather_object(value: T, dst: int = 0) -> list[T]:
    """Collective. Return the values of all ranks on rank `dst`, in the order of ranks; an empty list on the others."""
    if is_alone():
        return [value]
    _check_rank("dst", dst)
    if (memory := _memory()) is not None:
        return list(map(pickle.loads, memory.gather_object(pickle.dumps(value), dst)))
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == dst else None
    dist.gather_object(value, values, dst, group_for(_CPU))
    return values or []


def _check_rank(name: str, rank: int) -> None:
    ranks = dist.get_world_size()
    if not 0 <= rank < ranks:
        raise ConfigError(f"{name}={rank}, but this run has ranks 0 to {ranks - 1}; give one of them")


def all_agree(value: bool) -> bool:
    """Collective. Return whether `value` is true on every rank."""
    return bool(all_reduce(torch.tensor(int(value), device="cpu"), "min").item())
