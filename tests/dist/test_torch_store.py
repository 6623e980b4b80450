"""The store of ranks that our agent has started. The other rank is a thread here, which connects over another address."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rankwise.dist import store as stores
from rankwise.dist import world as world_
from rankwise.dist.world import World

TIMEOUT = timedelta(seconds=20)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("local_world_size", "elsewhere"), [(1, True), (2, False)])
def test_the_store_is_open_to_other_hosts_if_its_address_is_a_loopback_address_on_this_host_only(
    local_world_size: int, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world_, "store_address", lambda _: "127.0.1.1")  # what /etc/hosts has for this host's own name
    port = free_port()
    world = World(0, 2, 0, local_world_size, 0, "torchrun", master_addr="host1", master_port=port)
    other = threading.Thread(target=dist.TCPStore, args=("127.0.1.1", port, 2, False, TIMEOUT), daemon=True)  # type: ignore[attr-defined]
    other.start()
    store = stores.of_agent(world, TIMEOUT)
    other.join()
    store.set("key", "value")
    assert connects("127.0.0.1", port) is elsewhere


@pytest.mark.parametrize("create", [stores.of_agent, stores.of_torch])
def test_another_rank_connects_once_rank_0_listens(
    create: Callable[[World, timedelta], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's store would wait for half a second each time it is refused."""
    port, sleep = free_port(), time.sleep
    rank_0: list[Any] = []

    def listen(seconds: float) -> None:
        if not rank_0:
            rank_0.append(dist.TCPStore("127.0.0.1", port, 2, True, TIMEOUT, wait_for_workers=False))  # type: ignore[attr-defined]
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", listen)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    create(World(1, 2, 1, 2, 0, "torchrun", master_addr="127.0.0.1", master_port=port), TIMEOUT).set("key", "value")
    assert rank_0, "it has waited in torch"
