"""The store of ranks that our agent has started. The other rank is a thread here, which connects over another address."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

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
