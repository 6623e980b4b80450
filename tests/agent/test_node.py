"""What an agent waits for before an attempt, during and after it. In a separate process, because it ends all its children."""

from __future__ import annotations

import select
import sys
from pathlib import Path

from plans import plan
from ranks import on_ranks

from rankwise.agent.event_loop import EventLoop
from rankwise.agent.head import Screen
from rankwise.agent.node import Node, Orders
from rankwise.run.directory import RunDir

ORDERS = Orders(
    restart=0, node_rank=0, nodes=1, first=0, world_size=1, local_first=0, local_world_size=1, per_node="1",
    master_addr="127.0.0.1", master_port=1, store="",
)  # fmt: skip

WARM = """
import socket, sys
channel = socket.socket(fileno=int(sys.argv[3]))
channel.sendall(b'{"ready": true}\\n')
channel.recv(1)
"""


def waits_for_the_warm_process() -> list[bool]:
    """Whether it does before an attempt, during and after it; each time there is something to read."""
    folder = str(Path.cwd())
    run, events = RunDir(Path(folder, "runs/train")), EventLoop(0)
    run.prepare(fresh=False)
    planned = plan(folder, interpreter=(sys.executable, "-c", WARM), nodes=1, min_nodes=1)
    node = Node(planned, run, 0, events, Screen(plain=True), ranks=1)
    channel = node._starter.channel
    assert channel is not None

    def waits() -> bool:
        select.select([channel], [], [])
        events.wait(0)
        return channel.fileno() in events.ready

    try:
        found = [waits()]
        node.start(ORDERS, None)
        found.append(waits())
        node.look()
        node.finish()
        return [*found, waits()]
    finally:
        node.close()


def test_an_agent_waits_for_its_warm_process_only_during_an_attempt_because_otherwise_nothing_reads_what_it_sends() -> None:
    assert on_ranks(1, waits_for_the_warm_process) == [[False, True, False]]
