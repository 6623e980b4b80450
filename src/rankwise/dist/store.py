"""torch's store, in which ranks find each other's addresses. Rank 0 creates it, and it listens only where the ranks connect.

store = at_address(world, timeout, join_timeout_s)             # MASTER_ADDR and MASTER_PORT are given
world, store = announced(world, timeout, join_timeout_s)       # they are not given: rank 0 announces its address
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rankwise import schedulers
from rankwise.dist import rendezvous, start_file
from rankwise.dist import world as world_
from rankwise.dist.world import World
from rankwise.errors import WorldError
from rankwise.host import listener, network, processes
from rankwise.host.text import numbered

_TELL_S = 0.5  # ten times the interval at which the other ranks look

_groups = 0  # how many process groups the ranks of our agent have created


def announced(world: World, timeout: timedelta, join_timeout_s: float) -> tuple[World, Any]:
    """Without a given address: rank 0's store, on a port that the kernel chose, and the World with this address."""
    start = _start(world)
    if start is None:
        raise WorldError(
            f"rank {world.rank} of {world.world_size} ({world.source}): the launcher sets no id for this start of the script, "
            f"so the ranks cannot find each other; {rendezvous.CURE}"
        )
    home = Path(os.environ["HOME"]) if os.environ.get("HOME") else None
    folders = rendezvous.folders(world, Path.cwd(), home)
    name = start_file.file_name(start)
    if world.rank == 0:
        with rendezvous.Gathering(world, name, folders) as gathering:
            gathering.wait(join_timeout_s)
            address = gathering.reached_at()
            listener = network.listen_at(address) if address is not None else network.listen(loopback=False)
            store = _own(world, listener, address or "127.0.0.1", timeout)
            meeting = gathering.release(store.port, address)
    else:
        meeting = rendezvous.join(world, name, folders, join_timeout_s)
        store = _theirs(world, meeting.master_addr, meeting.master_port, timeout)
    if meeting.interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
    origin = {**world.origin, "master_addr": "rank 0 announced it", "master_port": "rank 0 announced it"}
    if world.node_rank is None:
        origin["node_rank"] = "hosts in the order of their lowest rank"
    node_rank = meeting.node_rank if world.node_rank is None else world.node_rank
    world = replace(world, node_rank=node_rank, master_addr=meeting.master_addr, master_port=meeting.master_port, origin=origin)
    return world, store


def _start(world: World) -> str | None:
    """A name for this start of the script that is the same on all its ranks; None if there is none."""
    if world.source == world_.ARGUMENTS:
        parent = multiprocessing.parent_process()
        return f"spawn-{platform.node()}-{parent.pid}-{processes.start_time(parent.pid or 0)}" if parent is not None else None
    return schedulers.launcher(world.source).start_id(os.environ, processes.ancestors(os.getpid()))


def at_address(world: World, timeout: timedelta, join_timeout_s: float) -> Any:
    """Rank 0's store at the given address. Returns when all ranks have connected to it."""
    address, port = world.master_addr or "", world.master_port or 0
    deadline = time.monotonic() + join_timeout_s
    if world.rank == 0:
        own = network.own_address(address, one_host=world.local_world_size == world.world_size)
        try:
            listener = _listener(own, port)
        except OSError as error:
            raise WorldError(
                f"rank 0 cannot listen on port {port} of {platform.node()} ({world.origin['master_port']}): "
                f"{error.strerror}; choose another port, or give none: then rank 0 takes a free one"
            ) from None
        store = _own(world, listener, own or "127.0.0.1", timeout)
    else:
        rendezvous.reach(world, address, port, join_timeout_s)
        store = _theirs(world, address, port, timeout)
    if store.add(f"rankwise/{world.rank}", 1) > 1:
        store.set("rankwise/twice", str(world.rank))
    missing = list(range(world.world_size))
    wait = rendezvous.Wait()
    while missing := [rank for rank in missing if not store.check([f"rankwise/{rank}"])]:
        if store.check(["rankwise/twice"]):
            twice = store.get("rankwise/twice").decode()
            if world.rank == 0:
                time.sleep(_TELL_S)  # the store stops when rank 0 exits
            raise WorldError(
                f"two processes are rank {twice} of {world.world_size} ({world.source}): on several nodes, rank = "
                f"node_rank * ranks per node + local_rank; or two runs use port {port} of {address}"
            )
        waits = f"{numbered('rank', missing, ranges=True)} of {world.world_size} ({world.source})"
        if (now := time.monotonic()) > deadline:
            raise WorldError(
                f"rank {world.rank} has waited {join_timeout_s:g} s for {waits} to connect to {address}, port {port}; start "
                "all ranks, or give a larger join_timeout_s"
            )
        if (due := wait.due(now)) and world.rank == 0:
            where = f"they must connect to {address}, port {port}"
            rendezvous.say(f"rank 0 {wait.told(now, waits)}; {where if due == 'whole' else wait.SHORT}")
        time.sleep(0.05)
    return store


def of_torch(world: World, timeout: timedelta) -> Any:
    """The store that torch creates or finds for "env://"."""
    _wait_for_rank_0(world)
    with network.short_lookups(world.master_addr or ""):
        found, _, _ = next(dist.rendezvous("env://", world.rank, world.world_size, timeout=timeout))  # type: ignore[attr-defined]
    found.set_timeout(timeout)
    return dist.PrefixStore("default_pg", found)  # type: ignore[attr-defined]


def of_agent(world: World, timeout: timedelta) -> Any:
    """The store of ranks that our agent has started, at the address that the agent has chosen. It is what torch creates for
    "env://", but it listens only where the ranks connect. Each process group of a script has its own keys, because a destroyed
    group may have left old addresses in the store."""
    global _groups
    _groups += 1
    place = (world.master_addr or "", world.master_port or 0)
    if world.rank == 0 and (address := world_.store_address(world)):
        place = (address, place[1])
        own = network.own_address(address, one_host=world.local_world_size == world.world_size)
        # OSError: this process has already created a store there, and torch shares it.
        with contextlib.suppress(OSError):
            return _keys(_own(world, _listener(own, place[1]), own or "127.0.0.1", timeout, like_torch=True))
    _wait_for_rank_0(world)
    return _keys(_connected(world, *place, timeout, is_master=world.rank == 0, multi_tenant=True))


def _wait_for_rank_0(world: World) -> None:
    """If rank 0 is much later, torch waits for it."""
    if world.rank != 0:
        listener.wait_for(world.master_addr or "", world.master_port or 0)


def _listener(own: str | None, port: int) -> socket.socket:
    return network.listen_at(own, port) if own is not None else network.listen(loopback=False, port=port)


def _keys(store: Any) -> Any:
    return dist.PrefixStore(f"rankwise/{_groups}", store)  # type: ignore[attr-defined]


def _own(world: World, listener: socket.socket, host: str, timeout: timedelta, like_torch: bool = False) -> Any:
    """torch's store, created by rank 0. It uses `listener`, because torch itself would listen on all interfaces. `host` is its
    address on this host. With `like_torch`, as for "env://", it waits until all ranks have connected, and a later store shares
    it."""
    port, fd = listener.getsockname()[1], listener.detach()
    return _connected(
        world, host, port, timeout, is_master=True, wait_for_workers=like_torch, multi_tenant=like_torch, master_listen_fd=fd
    )


def _theirs(world: World, host: str, port: int, timeout: timedelta) -> Any:
    """A connection of another rank to rank 0's store."""
    return _connected(world, host, port, timeout, is_master=False, wait_for_workers=False)


def _connected(world: World, host: str, port: int, timeout: timedelta, **settings: Any) -> Any:
    """torch's store with these settings, connected to rank 0's."""
    with network.short_lookups(host):
        return dist.TCPStore(host, port, world.world_size, timeout=timeout, **settings)  # type: ignore[attr-defined]
