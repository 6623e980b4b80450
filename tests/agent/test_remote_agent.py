"""Another node as the head sees it: when its ranks have ended."""

from __future__ import annotations

import socket
from typing import Any, cast

import pytest

from rankwise.agent.node import Introduction, Orders, Sink
from rankwise.agent.remote import Remote
from rankwise.ipc.channel import Link
from rankwise.run.directory import Attempt

ORDERS = Orders(
    restart=0, node_rank=1, nodes=2, first=2, world_size=4, local_first=0, local_world_size=2, per_node="2(x2)",
    master_addr="127.0.0.1", master_port=1, store="",
)  # fmt: skip
ATTEMPT = Attempt(1, 0.0, "host1", 4, ("train.py",))


@pytest.mark.parametrize("lost_first", [True, False])
def test_the_head_does_not_wait_for_a_node_that_was_lost_before_or_after_the_order_to_start(lost_first: bool) -> None:
    ours, theirs = socket.socketpair()
    introduction = Introduction(1, "host2", "host2", 2, "", "", 0, {})
    part = Remote(Link(ours.fileno(), ours.fileno(), [ours]), introduction, cast(Sink, None))
    steps: list[Any] = [theirs.close, part.look, lambda: part.start(ORDERS, ATTEMPT)]
    for step in steps if lost_first else reversed(steps):
        step()
    part.look()
    assert part.lost is not None
    assert (part.facts.awaited, part.facts.failed, part.claim) == (False, True, 0)
    assert part.end is not None
    assert [evidence.rank for evidence in part.end.evidence] == [2, 3]
