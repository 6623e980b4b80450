"""The two ends of the link to another node's agent: `Remote` at the head, `RemoteNode` at that agent.

    part = Remote(link, introduction, sink)                     # at the head
    status = RemoteNode(node, link, events, secret).run()        # there

head -> member   {"welcome": run id, "run_dir": path} or {"refused": why}
                 {"start": orders, "life": record} {"signal": n, "ranks": [...]} {"cut": n, "ranks": [...]} {"finish": true}
                 {"hold": n} {"release": step} {"ring": number} {"rung": [number, step, which]}
                 {"find": {addresses, port}} {"bye": status}
member -> head   {"facts": ...} {"claim": step} {"end": ...} {"say": text} {"write": text} {"progress": text} {"notes": [...]}
                 {"stalled": ...} {"asked": signal} {"route": address} {"alarm": [number, step, which]}
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rankwise.agent.event_loop import EventLoop
from rankwise.agent.node import Facts, Introduction, Node, NodeEnd, Orders, Sink
from rankwise.agent.root_cause import Evidence
from rankwise.agent.slow_ranks import NodeTimes
from rankwise.agent.stall import Frame, Observation
from rankwise.errors import RunDirError
from rankwise.ipc.channel import Door, Link, Message
from rankwise.ipc.shared_page import Alarm
from rankwise.run.directory import Attempt, RunDir, write_json
from rankwise.run.plan import Plan

TICK_S = 0.05
_BYE_S = 5.0


class Remote:
    """The ranks of another agent, as the head sees them."""

    def __init__(self, link: Link, introduction: Introduction, sink: Sink) -> None:
        self.link = link
        self.introduction = introduction
        self._sink = sink
        self._first = 0
        self.facts = Facts()
        self.claim: int | None = None
        self.alarm = Alarm()
        self.end: NodeEnd | None = None
        self.lost: str | None = None
        self.asked: list[int] = []
        """Stop signals that its agent got."""

        self.route: str | None = None

    def look(self) -> None:
        for message in self.link.receive():
            self.take(message)
        self.link.beat()
        if self.link.closed is not None and self.lost is None:
            self.lost = self.link.closed
            self._end_as_lost()

    def _end_as_lost(self) -> None:
        self.facts = Facts(pids=self.facts.pids, awaited=False, failed=True, begun=self.facts.begun)
        self.claim = self.claim or 0
        if self.end is not None:
            return
        ranks = range(self._first, self._first + self.introduction.ranks)
        ends = (Evidence(rank, None, None, sent=False, ended=time.time(), lost=self.lost) for rank in ranks)
        self.end = NodeEnd(tuple(ends), groups=True, stuck=False, port=0)

    def take(self, message: Message) -> None:
        """Handle a message of its agent."""
        for kind, value in message.items():
            match kind:
                case "facts":
                    self.facts = _facts(value)
                case "claim":
                    self.claim = int(value)
                case "alarm":
                    self.alarm = Alarm(*map(int, value))
                case "end":
                    evidence = tuple(Evidence(**record) for record in value["evidence"])
                    self.end = NodeEnd(evidence, bool(value["groups"]), bool(value["stuck"]), int(value["port"]))
                    self.introduction = replace(self.introduction, port=self.end.port)
                case "say":
                    self._sink.say(f"{self.introduction.host}: {value}")
                case "write":
                    self._sink.write(str(value).encode(errors="surrogateescape"))
                case "progress":
                    self._sink.progress(str(value))
                case "notes":
                    self._sink.notes([(int(rank), str(line)) for rank, line in value])
                case "stalled":
                    observed = [_observation(record) for record in value["observed"]]
                    self._sink.stalled(self.introduction.index, float(value["since_s"]), observed, str(value["stacks"]))
                case "asked":
                    self.asked.append(int(value))
                case "route":
                    self.route = str(value)

    def start(self, orders: Orders, attempt: Attempt | None) -> None:
        assert attempt is not None
        self._first = orders.first
        ranks = range(orders.first, orders.first + self.introduction.ranks)
        self.facts, self.claim, self.end, self.alarm = Facts(alive=tuple(ranks)), None, None, Alarm()
        if self.lost is not None:
            self._end_as_lost()
        self.link.send({"start": asdict(orders), "life": attempt.record()})

    def signal(self, signum: int, ranks: Sequence[int]) -> None:
        self.link.send({"signal": signum, "ranks": list(ranks)})

    def cut(self, signum: int, ranks: Sequence[int]) -> None:
        self.link.send({"cut": signum, "ranks": list(ranks)})

    def hold(self, signum: int) -> None:
        self.link.send({"hold": signum})

    def release(self, last: int) -> None:
        self.link.send({"release": last})

    def ring(self, number: int) -> None:
        self.link.send({"ring": number})

    def rung(self, number: int, last: int, which: int) -> None:
        self.link.send({"rung": [number, last, which]})

    def finish(self) -> None:
        if self.end is None:
            self.link.send({"finish": True})

    def find(self, addresses: Sequence[str], port: int) -> None:
        self.link.send({"find": {"addresses": list(addresses), "port": port}})

    def leave(self, status: int) -> None:
        """The run is over: make its agent exit with this status."""
        self.link.send({"bye": status})
        self.link.drain(_BYE_S)


def _facts(record: dict[str, Any]) -> Facts:
    times = NodeTimes.of(record["times"]) if record.get("times") is not None else None
    return Facts(**{**record, **{key: tuple(record[key]) for key in ("pids", "alive", "joined")}, "times": times})


def _observation(record: dict[str, Any]) -> Observation:
    stacks = tuple(tuple(Frame(**frame) for frame in stack) for stack in record["stacks"])
    return Observation(**{**record, "stacks": stacks, "children": tuple(record["children"])})


class Wire:
    """The sink of a member: everything goes to the head."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def say(self, text: str) -> None:
        self._link.send({"say": text})

    def write(self, data: bytes) -> None:
        if data:
            self._link.send({"write": data.decode(errors="surrogateescape")})

    def progress(self, text: str) -> None:
        self._link.send({"progress": text})

    def end_line(self) -> None:
        """Nothing to do: the head ends its own lines."""

    def notes(self, notes: Sequence[tuple[int, str]]) -> None:
        self._link.send({"notes": list(notes)})

    def stalled(self, index: int, since_s: float, observed: Sequence[Observation], stacks: str) -> None:
        self._link.send({"stalled": {"since_s": since_s, "observed": [asdict(o) for o in observed], "stacks": stacks}})

    @property
    def busy(self) -> bool:
        return self._link.full


class RemoteNode:
    """An agent that follows the head's orders. If the head is lost, the agent ends its ranks and exits."""

    def __init__(self, node: Node, link: Link, events: EventLoop, secret: str, door: Door | None = None) -> None:
        """`door`: where other nodes try whether they can reach this one."""
        self._door = door
        self._node = node
        self._link = link
        self._events = events
        node.secret = secret
        self._told = Facts()
        self._told_end: NodeEnd | None = None
        self._told_alarm = Alarm()
        self._asked = 0
        self._status: int | None = None
        self.dismissed = False
        """Whether the head has reported that the run is over."""

        self._shared = False

    def run(self) -> int:
        """Run until the head sends "bye". Returns the exit status of the run; 1 if the head was lost."""
        self._events.register(self._link)
        try:
            while self._status is None:
                self._events.wait(TICK_S)
                for message in self._link.receive():
                    self._do(message)
                if self._link.closed is not None:
                    if self._status is None:
                        print(f"rankwise: the first node was lost: {self._link.closed}", file=sys.stderr, flush=True)
                    return 1 if self._status is None else self._status
                for link, _ in self._door.callers() if self._door is not None else ():
                    link.drain(0.1)
                    link.close("it was only looked for")
                self._node.look()
                self._tell()
            return self._status
        finally:
            self._node.finish()
            self._node.close()

    def _tell(self) -> None:
        if self._node.facts != self._told:
            self._told = self._node.facts
            self._link.send({"facts": asdict(self._told)})
        if self._node.end is not None and self._node.end is not self._told_end:
            self._told_end = self._node.end
            self._link.send({"end": asdict(self._told_end)})
        if self._node.alarm != self._told_alarm:
            self._told_alarm = self._node.alarm
            self._link.send({"alarm": list(self._told_alarm)})
        for signum in self._events.asked[self._asked :]:
            self._link.send({"asked": signum})
        self._asked = len(self._events.asked)
        self._link.beat()

    def _do(self, message: Message) -> None:
        for kind, value in message.items():
            match kind:
                case "start":
                    self._start(Orders(**value), Attempt.of(message["life"]))
                case "signal":
                    self._node.signal(signal.Signals(value), message["ranks"])
                case "cut":
                    self._node.cut(signal.Signals(value), message["ranks"])
                case "ring":
                    self._node.ring(int(value))
                case "rung":
                    self._node.rung(*map(int, value))
                case "hold":
                    self._node.hold(int(value))
                    self._link.send({"claim": self._node.claim})
                case "release":
                    self._node.release(int(value))
                case "finish":
                    self._node.finish()
                case "find":
                    self._find(value["addresses"], int(value["port"]))
                case "bye":
                    self._status, self.dismissed = int(value), True
                case "welcome":
                    self.settle(str(value), Path(message["run_dir"]))
                case "refused":
                    print(f"rankwise: {value}", file=sys.stderr, flush=True)
                    self._status = 1

    def settle(self, run_id: str, path: Path) -> None:
        """Write into the head's run directory if this host sees it; otherwise into a local copy, where the ranks find their
        record."""
        run = RunDir(path)
        try:
            self._shared = Plan.load(run.plan).run_id == run_id
        except RunDirError:
            self._shared = False
        if self._shared:
            self._node.run = run
        else:
            self._node.run.begin_copy(run_id, self._node.fresh)
            self._link.send({"say": f"this host does not see {path}: the logs of its ranks are here, in {self._node.run.path}"})

    def _start(self, orders: Orders, attempt: Attempt) -> None:
        self._told, self._told_end, self._told_alarm = Facts(), None, Alarm()
        if not self._shared:  # the ranks find their page in this file
            write_json(self._node.run.world, {"lives": [attempt.record()]})
        self._node.start(orders, attempt)

    def _find(self, addresses: Sequence[str], port: int) -> None:
        """Find at which of the first node's addresses this host reaches it, and report it to the head."""
        self._node.find(addresses, port)
        self._link.send({"route": self._node.route})
