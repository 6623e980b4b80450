"""Connect to the other ranks, wherever the launcher says that rank 0 is.

world = join(world, rdzv=None, backend=None, timeout_s=1800.0, join_timeout_s=300.0)
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankwise import schedulers
from rankwise.dist import accelerator
from rankwise.dist import store as stores
from rankwise.dist.world import World
from rankwise.errors import ConfigError, DeviceError, WorldError
from rankwise.host import network

sent = 0
"""How many collectives rankwise has sent to connect the ranks. The agent reads it (agent/collective_notes.py)."""


def _asked(world: World, rdzv: str | None) -> World:
    """`world` with the address of rank 0 that the script has given. Raises ConfigError unless it is HOST:PORT."""
    if rdzv is None:
        return world
    host, _, port = rdzv.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"rdzv={rdzv!r}: give HOST:PORT, rank 0's host and a free port there, for example node1:29500")
    origin = {**world.origin, "master_addr": "rdzv", "master_port": "rdzv"}
    return replace(world, master_addr=host.strip("[]"), master_port=int(port), origin=origin)


def join(world: World, rdzv: str | None, backend: str | None, timeout_s: float, join_timeout_s: float) -> World:
    """Collective. Create the default process group. Returns the world with the address of rank 0. The arguments are those of
    `comm.init`."""
    world = _asked(world, rdzv)
    lacks = [n for n, v in (("MASTER_ADDR", world.master_addr), ("MASTER_PORT", world.master_port)) if v is None]
    if len(lacks) == 1:
        raise WorldError(
            f"rank {world.rank} of {world.world_size} ({world.source}) has no {lacks[0]}; set both MASTER_ADDR (rank 0's host) "
            "and MASTER_PORT (a free port there) before the launcher, or neither: then rank 0 announces its address"
        )
    timeout = timedelta(seconds=timeout_s)
    if not lacks and world.local_world_size < world.world_size:
        # gloo sends the other ranks the address that this host's name resolves to, which may be 127.0.1.1 in /etc/hosts.
        interface = network.interface_towards(world.master_addr or "")
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if world.origin.get("master_addr") == "MASTER_ADDR" and schedulers.launcher(world.source).has_store:
        ours = world.run_dir is not None and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
        # Whoever set these may have created the store already, as torchrun's agent does: torch knows.
        if backend is not None and (not ours or backend == "mpi"):  # MPI may need no store
            dist.init_process_group(
                backend, init_method="env://", rank=world.rank, world_size=world.world_size, timeout=timeout
            )  # fmt: skip
            _wait_until_connected()
            return world
        store = stores.of_agent(world, timeout) if ours else stores.of_torch(world, timeout)
    elif lacks:
        world, store = stores.announced(world, timeout, join_timeout_s)
    else:
        store = stores.at_address(world, timeout, join_timeout_s)
    if backend is None:
        backend = agreed_backend(world, store)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout)
    _wait_until_connected()
    return world


def _wait_until_connected() -> None:
    """Collective. gloo returns as soon as this rank is connected. If it exited then, a rank that is still connecting would
    fail: one start in 25 of a script that does nothing else, with 6 ranks on a busy machine of 2 cores."""
    if backends().get("cpu") != "gloo":
        return
    global sent
    sent += 1
    group: Any = dist.group.WORLD
    try:
        group.allreduce([torch.zeros(1, device="cpu")]).wait()  # not dist.all_reduce: the user's first collective is number 1
    except BaseException:
        dist.destroy_process_group()  # if the script catches this, it must not continue as if it were connected
        raise


def agreed_backend(world: World, store: Any) -> str:
    """Collective. The backend for the device of all ranks. Without this, a rank without a GPU would wait in gloo, and the other
    ranks in NCCL."""
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


def backends() -> dict[str, str]:
    """The backend of the default group for each type of device."""
    parts = (part.partition(":") for part in dist.get_backend_config().split(","))
    return {kind: backend for kind, _, backend in parts}
