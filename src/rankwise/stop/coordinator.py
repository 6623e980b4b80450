"""The gate (shared_page.py) if no agent has started the ranks: a thread in the first rank of each node replaces the agent.

    row, keeper = open_gate(world)      # collective; the keeper is None on all but the first rank of a node
    keeper.start();  keeper.stop()

The main rank's keeper is the head of the others. They report the signal that has come, all hold their gates, they report the
highest step of their ranks, and all stop after the highest of these. Alarms work in the same way. This needs no collective, and
nothing is sent until a signal comes or an alarm is due.

    {"asked": signal} {"due": [number, which]} {"claim": step} {"alarm": step}     to the head
    {"hold": signal} {"release": step} {"ring": number} {"rung": [step, which]}    from it
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from rankwise.dist import comm, log
from rankwise.dist.world import World
from rankwise.host import network
from rankwise.ipc.address_file import ways
from rankwise.ipc.channel import Door, Link, Message, NobodyThere, knock
from rankwise.ipc.shared_page import JOIN_S, Alarm, Page, Row, agreed

_BEAT_S = 0.05
_MEET_S = 30.0


def open_gate(world: World) -> tuple[Row | None, Coordinator | None]:
    """Collective. (this rank's row in its node's page, that page's keeper if this is the node's first rank). (None, None) on
    all ranks if a rank does not see its node's page (it is in another container), or a node does not reach the first.
    """
    nodes = comm.nodes()
    mine = next(ranks for ranks in nodes if world.rank in ranks)
    page = Page.create(len(mine)) if world.rank == mine[0] else None
    path = comm.all_gather_object(page.path if page is not None else "")[mine[0]]
    row: Row | None = None
    with contextlib.suppress(OSError):
        row = Page.open(path).row(mine.index(world.rank))
    if not comm.all_agree(row is not None):
        return None, None
    if len(nodes) == 1:
        return row, Coordinator(page) if page is not None else None
    links, reason = _meet(world, len(nodes) - 1, page is not None)
    if not comm.all_agree(not reason):
        for link in links:
            link.close("not all nodes connected")
        for text in filter(None, comm.all_gather_object(reason)):
            log.warn(f"the nodes cannot agree on a last step, so a signal kills the rank that gets it: {text}")
        return None, None
    return row, Coordinator(page, links, world.is_main) if page is not None else None


def _meet(world: World, others: int, takes_part: bool) -> tuple[list[Link], str]:
    """Collective. Connect all keepers to the main rank's: (the links of this one, why some are missing)."""
    door = Door(secrets.token_hex(16)) if world.is_main else None
    where: Message | None = None
    if door is not None:
        where = {"addresses": door.addresses, "port": door.port, "secret": door.secret, "home": network.home()}
    where = comm.broadcast_object(where)
    assert where is not None
    if door is not None:
        links: list[Link] = []
        deadline = time.monotonic() + _MEET_S
        while len(links) < others and time.monotonic() < deadline:
            links += [link for link, _ in door.callers()]
            time.sleep(0.002)
        door.close()
        return links, "" if len(links) == others else f"{others - len(links)} of {others} nodes did not connect to the first"
    if not takes_part:
        return [], ""
    try:
        link, _, _ = knock(ways(where), where["port"], where["secret"], {"keeper": world.rank})
    except NobodyThere as problem:
        return [], f"{network.home().split()[0]} cannot connect to the first node: {problem}"
    return [link], ""


class Coordinator:
    """The keeper of one node. `links`: from the head to all others, or from another keeper to the head."""

    def __init__(self, page: Page, links: Sequence[Link] = (), is_head: bool = True) -> None:
        self._page = page
        self._links = links
        self._is_head = is_head
        self._over = threading.Event()
        self._asked = 0
        self._due = 0  # the number of the last alarm that another node has asked for

    def start(self) -> None:
        threading.Thread(target=self._run, name="rankwise-gate", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        try:
            if self._is_head:
                self._lead()
            else:
                self._follow()
        finally:
            self._page.abandon()  # this rank or the head has finished: no rank must wait for them
            for link in self._links:
                link.drain(1.0)
                link.close("the loop is over")

    def _hold(self, signum: int) -> int:
        """Hold the gate once all ranks of this node have joined it, or after `JOIN_S`: ranks that never come must not prevent
        the stop."""
        deadline = time.monotonic() + JOIN_S
        while len(self._page.joined()) < self._page.ranks and time.monotonic() < deadline and not self._over.is_set():
            time.sleep(_BEAT_S)
        return self._page.hold(signum)

    def _lead(self) -> None:
        while not (signum := self._page.flagged() or self._asked):
            if self._over.wait(_BEAT_S) or not self._ring():
                return
        for link in self._links:
            link.send({"hold": signum})
        claims = [self._hold(signum)]
        for link in self._links:
            while (claim := self._answer(link, "claim", 0)) is None:
                if self._over.wait(_BEAT_S):
                    return
            claims.append(int(claim))
        last = max(claims)
        for link in self._links:
            link.send({"release": last})
        self._page.release(last)

    def _ring(self) -> bool:
        """Lead an alarm, if one is due on any node. False: the loop is over."""
        number = self._page.alarms + 1
        for link in self._links:
            self._take(link)
        due_there = self._due == number  # another number is of an alarm that is already over
        if not (due_there or self._page.due(time.monotonic_ns())) or (alarm := self._page.ring(time.monotonic_ns())) is None:
            return True
        alarms = [alarm]
        for link in self._links:
            link.send({"ring": number})
        for link in self._links:
            while (answer := self._answer(link, "alarm", [number, 0, 0])) is None:
                if self._over.wait(_BEAT_S):
                    return False
            alarms.append(Alarm(*map(int, answer)))
        last, which = agreed(alarms)
        for link in self._links:
            link.send({"rung": [last, which]})
        self._page.rung(last, which)
        return True

    def _answer(self, link: Link, kind: str, if_gone: Any) -> Any:
        """The answer of the node at the other end; None until it comes; `if_gone` if that node is gone."""
        answer = self._take(link, kind)
        return if_gone if answer is None and link.closed is not None else answer

    def _take(self, link: Link, kind: str = "") -> Any:
        """Note the requests of another node; returns its answer of this kind, None if it has not come."""
        answer = None
        for message in self._heard(link):
            self._asked = self._asked or int(message.get("asked", 0))
            self._due = max(self._due, int(message.get("due", 0)))
            answer = message.get(kind, answer)
        return answer

    def _follow(self) -> None:
        [link] = self._links
        told = to_ring = 0
        while not self._over.wait(_BEAT_S):
            signum = self._page.flagged()
            if signum and not self._asked:
                self._asked = signum
                link.send({"asked": signum})
            if self._page.due(time.monotonic_ns()) and told <= self._page.alarms:
                told = self._page.alarms + 1
                link.send({"due": told})
            for message in self._heard(link):
                if "hold" in message:
                    self._asked = int(message["hold"])
                    link.send({"claim": self._hold(self._asked)})
                elif "ring" in message:
                    to_ring = int(message["ring"])
                elif "rung" in message:
                    self._page.rung(*map(int, message["rung"]))
                elif "release" in message:
                    self._page.release(int(message["release"]))
                    return
            if to_ring > self._page.alarms and (alarm := self._page.ring(time.monotonic_ns())) is not None:
                link.send({"alarm": list(alarm)})
            if link.closed is not None:
                if signum:  # the head is gone: this node stops by itself
                    self._page.stop(signum)
                return

    def _heard(self, link: Link) -> list[Message]:
        """The messages that have come. There is no heartbeat here: a node is lost only when its connection closes."""
        link.heard = time.monotonic()
        link.flush()
        return link.receive()
