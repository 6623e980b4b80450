"""What an agent waits for before an attempt, during and after it. In a separate process, because it ends all its children."""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

from launched import wait_for
from plans import plan
from ranks import on_ranks

from rankwise.agent.event_loop import EventLoop
from rankwise.agent.node import Node, Orders
from rankwise.agent.rank_starter import Starter
from rankwise.agent.screen import Screen
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


READS_LATE = """
import socket, sys
open("read").close()  # a FIFO: waits for the test, which opens it too
channel = socket.socket(fileno=int(sys.argv[3]))
size, piece = 0, b""
while not piece.endswith(b"\\n"):
    piece = channel.recv(1 << 20)
    size += len(piece)
channel.sendall(b'{"pids": [%d]}\\n' % size)
"""


def test_a_large_environment_of_many_ranks_is_sent_without_waiting_for_a_warm_process_that_imports(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "read")
    starter = Starter(plan(str(tmp_path), interpreter=(sys.executable, "-c", READS_LATE)))
    specs: Any = [{"environment": {"LARGE": "x" * 100_000}}] * 20
    try:
        starter.start(specs)  # returns, though nobody reads
        assert starter.receive() is None
        open(tmp_path / "read", "w").close()
        [size] = wait_for(starter.receive, "its answer")["pids"]
        assert size == len(json.dumps({"ranks": specs})) + 1
    finally:
        starter.close()
