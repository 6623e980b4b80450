"""The nodes of a run: the head's own, those that connect to it, and those that it starts itself (ssh, qrsh).

nodes = Nodes(plan, run, events, screen, own, door, hosts, by, greeting, command)
parts = nodes.gather(...)      # the nodes of the next attempt, in the order of their ranks
nodes.look()                   # every tick
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rankwise.agent.event_loop import EventLoop
from rankwise.agent.node import Introduction, Node, NodeView, Orders, Sink
from rankwise.agent.remote import Remote
from rankwise.errors import RankwiseError
from rankwise.host import processes
from rankwise.host.patience import Patience
from rankwise.host.text import listed, numbered
from rankwise.ipc.channel import Door, Link, Message
from rankwise.run.directory import RunDir
from rankwise.run.plan import Host, Plan
from rankwise.schedulers import Hosts
from rankwise.schedulers.ranks import short_list

_SAY_EVERY_S = 10.0
_START_AGAIN_S = 5.0
_ROUTE_S = 60.0
_LEAVE_S = 5.0
_MOST_NAMES = 4
_LOOK_EVERY_S = 0.2
_PAUSE_S = 0.0002  # per link: with a thousand links the head reads their messages twenty times a second
_LONGEST_PAUSE_S = 0.05
_LAST_WORDS_S = 0.3


class NodeError(RankwiseError):
    """A node did not join, or cannot be reached."""


@dataclass
class _Called:
    """An agent that the head has started on another host, through a process on this host (ssh or qrsh)."""

    host: Host
    command: list[str]
    process: subprocess.Popen[bytes]
    link: Link
    words: Path
    """The file with the stderr of the agent and of ssh or qrsh."""

    ended: float = 0.0
    """When that process was first seen to have ended (monotonic)."""

    part: Remote | None = None


class Nodes:
    """`own`: None if the head's host has no rank. `hosts`: by index, the hosts where the head starts the agent itself, over
    `by`."""

    def __init__(
        self,
        plan: Plan,
        run: RunDir,
        events: EventLoop,
        sink: Sink,
        own: Node | None,
        door: Door | None,
        hosts: Mapping[int, Host],
        by: Hosts | None,
        greeting: Callable[[int, Host], Message],
        command: list[str],
    ) -> None:
        self._plan = plan
        self._run = run
        self._events = events
        self._sink = sink
        self.own = own
        self._door = door
        self._hosts = hosts
        self._by = by
        self._greeting = greeting
        self._command = command
        self._called: dict[int, _Called] = {}
        self._parts: dict[int, NodeView] = {own.index: own} if own is not None else {}
        self._again: dict[int, float] = {}
        self._looked = 0.0
        self._routes_to: int | None = None
        """The node that the known routes lead to."""
        self.asked: dict[int, list[int]] = {}
        """Stop signals that other agents got, by their index, and those of commands (`rankwise cancel`), under -1; each in
        order."""

        if door is not None:
            events.register(door)
        for index in hosts:
            self._call(index)

    @property
    def remotes(self) -> list[Remote]:
        return [part for part in self._parts.values() if isinstance(part, Remote)]

    # --- how they come

    def look(self) -> None:
        """Accept new members; handle messages of all."""
        if self._door is not None:
            self._open()
        for index, called in list(self._called.items()):
            if called.part is None:
                self._hear(index, called)
            self._notice_end(called)
        now = time.monotonic()
        all_of_them = now > self._looked + _LOOK_EVERY_S  # finding silent nodes, and sending, need not happen on each tick
        if all_of_them:
            self._looked = now
        for part in self.remotes:
            if all_of_them or part.link.fileno() in self._events.ready:
                self._look_at(part)

    def _look_at(self, part: Remote) -> None:
        part.look()
        if part.lost is not None:
            self._events.unregister(part.link)
        self.asked.setdefault(part.introduction.index, []).extend(part.asked)
        part.asked.clear()

    def _open(self) -> None:
        """Accept callers that prove that they belong to this run."""
        assert self._door is not None
        before = self._door.coming
        for link, hello in self._door.callers():
            self._events.unregister(link)
            self._welcome(link, hello)
        for link in before:
            if link.closed is not None:
                self._events.unregister(link)
        for link in self._door.coming:
            if link not in before:
                self._events.register(link)

    def _welcome(self, link: Link, hello: Message) -> None:
        if "stop" in hello:  # from a command, such as `rankwise cancel`
            self.asked.setdefault(-1, []).append(int(hello["stop"]))
            link.drain(1.0)
            link.close("it has said all")
            return
        if "finds" in hello:
            link.drain(0.1)
            link.close("it was only looked for")
            return
        introduction = _introduced(hello["hello"])
        before = self._parts.get(introduction.index)
        if before is not None and before.lost is None:
            self._sink.say(
                f"{introduction.host} is refused: it joined as node {introduction.index}, which is "
                f"{before.introduction.host} already"
            )
            link.send({"refused": f"node {introduction.index} is {before.introduction.host} already"})
            link.drain(1.0)
            link.close("it came twice")
            return
        link.send({"welcome": self._plan.run_id, "run_dir": self._plan.run_dir})
        part = Remote(link, introduction, self._sink)
        part.route = str(hello["route"])
        self._add(part)

    def _add(self, part: Remote) -> None:
        self._events.register(part.link)
        self._parts[part.introduction.index] = part
        self._events.pause_s = min(_PAUSE_S * len(self._parts), _LONGEST_PAUSE_S)

    def _call(self, index: int) -> None:
        """Start the agent of this host; its stdin and stdout are the link."""
        assert self._by is not None
        host = self._hosts[index]
        words = self._run.logs / f"node-{index}.txt"
        command = self._by.reach(host.name, self._command)
        with open(words, "wb") as said:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said)
        assert process.stdin is not None
        assert process.stdout is not None
        link = Link(process.stdout.fileno(), process.stdin.fileno(), after=b'{"hello":')
        if self.own is not None:
            self.own.kept.add(process.pid)
        link.send(self._greeting(index, host))
        self._events.register(link)
        self._called[index] = _Called(host, command, process, link, words)

    def _hear(self, index: int, called: _Called) -> None:
        called.link.flush()
        called.link.heard = time.monotonic()  # until it has joined, join_timeout_s applies, which is longer
        for message in called.link.receive():
            if "hello" in message and called.part is None:
                called.part = Remote(called.link, _introduced(message["hello"]), self._sink)
                self._parts[index] = called.part
                self._again.pop(index, None)
            elif called.part is not None:  # this message came together with its hello
                called.part.take(message)
        if called.link.closed is not None and called.part is None:
            self._drop_call(index)
            why = self._last_words(called)
            if self._plan.min_nodes == self._plan.nodes:
                raise NodeError(f"node {index} ({called.host.name}) did not start: {why}")
            if index not in self._again:
                self._sink.say(f"node {index} ({called.host.name}) did not start: {why}; trying again")
            self._again[index] = time.monotonic() + _START_AGAIN_S

    def _notice_end(self, called: _Called) -> None:
        """Close the link if ssh or qrsh has exited: nothing more comes, though another process may still hold the pipe open."""
        if called.link.closed is None and called.process.poll() is not None:
            now = time.monotonic()
            called.ended = called.ended or now
            if now > called.ended + _LAST_WORDS_S:
                called.link.close(f"{Path(called.command[0]).name} to it exited")

    def _last_words(self, called: _Called) -> str:
        assert self._by is not None
        words = called.words.read_text(errors="replace").strip()
        status = called.process.poll() or 0
        end = f"was killed by {signal.Signals(-status).name}" if status < 0 else "exited without a message"
        own = words.splitlines()[-1].removeprefix("rankwise: ") if words else f"{called.command[0]} {end}"
        if self._command[0] in own:
            own += "; every host needs this Python with rankwise, at the same path"
        return self._by.refusal(called.host.name, words) or own

    def _drop_call(self, index: int) -> None:
        """Remove everything that a call that has ended left on this host."""
        called = self._called.pop(index)
        self._events.unregister(called.link)
        called.link.close("it has ended")
        for pipe in (called.process.stdin, called.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        processes.send(called.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired, ChildProcessError):
            called.process.wait(timeout=_LEAVE_S)
        if self.own is not None:
            self.own.kept.discard(called.process.pid)

    # --- who takes part

    def gather(self, stopped: Callable[[], bool]) -> list[NodeView]:
        """Wait for the nodes; empty if `stopped()` first. Raises NodeError if too few join in time."""
        patience = Patience(self._plan.join_timeout_s, say_after_s=_SAY_EVERY_S, say_every_s=_SAY_EVERY_S)
        self._forget_lost()
        while True:
            here = [self._parts[index] for index in sorted(self._parts) if self._parts[index].lost is None]
            enough = len(here) >= self._plan.min_nodes and patience.waited_s > self._plan.node_wait_s
            if len(here) >= self._plan.nodes or enough:
                here = here[: self._plan.nodes]
                _refuse_devices_counted_twice(here)
                return here if self._routes_are_known(here, stopped) else []
            if stopped():
                return []
            if patience.is_over:
                raise NodeError(f"{self.missing()} did not join within {self._plan.join_timeout_s:g} s{self._where()}")
            if patience.due():
                self._sink.say(f"waiting for {self.missing()} to join{self._where()}")
            self._events.wait(0.05)
            self.look()
            self._refuse_lost()
            self._call_again(time.monotonic())

    def _refuse_lost(self) -> None:
        """Raise NodeError if a node was lost before the ranks were started, unless others may replace it."""
        for index, part in self._parts.items():
            if part.lost is not None and self._plan.min_nodes == self._plan.nodes:
                words = f"{part.lost}; {self._last_words(self._called[index])}" if index in self._called else part.lost
                raise NodeError(f"node {index} ({part.introduction.host}) was lost before the ranks started: {words}")
        self._forget_lost()

    def _forget_lost(self) -> None:
        for index, part in list(self._parts.items()):
            if part.lost is not None:
                del self._parts[index]
                if isinstance(part, Remote):
                    self._events.unregister(part.link)
                if index in self._called:
                    self._drop_call(index)
                    self._again[index] = 0.0

    def _call_again(self, now: float) -> None:
        for index, when in self._again.items():
            if index not in self._called and now > when:
                self._again[index] = now + _START_AGAIN_S
                self._call(index)

    def missing(self) -> str:
        """The nodes that have not joined, in words."""
        came = {index for index, part in self._parts.items() if part.lost is None}
        missing = [index for index in range(self._plan.nodes) if index not in came]
        names = [self._hosts[index].name for index in missing if index in self._hosts]
        named = f" ({listed(names, _MOST_NAMES, rest=', ...')})" if names else ""
        return f"{numbered('node', missing, ranges=True)} of {self._plan.nodes}{named}"

    def _where(self) -> str:
        if self._door is None:
            return ""
        return f"; the first node listens on {', '.join(self._door.addresses)}, port {self._door.port}"

    # --- how they reach each other

    def _routes_are_known(self, parts: Sequence[NodeView], stopped: Callable[[], bool]) -> bool:
        """Wait until every node knows the address at which it reaches the first node. False if `stopped()` first."""
        first = parts[0].introduction
        others = [part for part in parts[1:] if part.introduction.home != first.home]
        if self._routes_to not in (None, first.index):  # the node that was first before is lost
            for part in others:
                part.route = None
        self._routes_to = first.index
        for part in others:
            if part.route is None and first.door is not None:
                part.find(*first.door)
        deadline = time.monotonic() + _ROUTE_S
        while any(part.route is None and part.lost is None for part in others):
            if stopped():
                return False
            if time.monotonic() > deadline:
                break
            self._events.wait(0.05)
            self.look()
        for part in others:
            if not part.route:
                raise NodeError(
                    f"{part.introduction.host} cannot connect to {first.host}, the host of rank 0, at any of its addresses "
                    f"({', '.join(first.door[0]) if first.door else 'none'}): a firewall, or separate networks; "
                    f"to check, type on {part.introduction.host}: ping "
                    f"{first.door[0][0] if first.door and first.door[0] else first.host}"
                )
        return True

    def orders(self, parts: Sequence[NodeView], restart: int) -> list[Orders]:
        """The orders of each node, with its ranks; nodes in the order of their ranks."""
        first = parts[0].introduction
        homes = list(dict.fromkeys(part.introduction.home for part in parts))
        routes = {p.introduction.home: p.route for p in parts if p.introduction.home != first.home}
        address = next((route for route in routes.values() if route), "127.0.0.1")
        world_size = sum(part.introduction.ranks for part in parts)
        done, local, sizes = 0, dict.fromkeys(homes, 0), dict.fromkeys(homes, 0)
        for part in parts:
            sizes[part.introduction.home] += part.introduction.ranks
        per_node = short_list(sizes.values())
        found = []
        for part in parts:
            me = part.introduction
            found.append(
                Orders(
                    restart=restart,
                    node_rank=homes.index(me.home),
                    nodes=len(homes),
                    first=done,
                    world_size=world_size,
                    local_first=local[me.home],
                    local_world_size=sizes[me.home],
                    per_node=per_node,
                    master_addr=routes.get(me.home) or address,
                    master_port=first.port,
                    store=address if len({route for route in routes.values() if route}) < 2 else "",
                )
            )
            done += me.ranks
            local[me.home] += me.ranks
        return found

    # --- the end

    def leave(self, status: int) -> None:
        """End the run: every other agent exits with this status, and their ssh or qrsh processes here are ended."""
        for part in self.remotes:
            part.leave(status)
        deadline = time.monotonic() + _LEAVE_S
        for index, called in list(self._called.items()):
            while called.link.closed is None and time.monotonic() < deadline and called.part is not None:
                called.link.receive()
                time.sleep(0.002)
            self._drop_call(index)
        if self._door is not None:
            self._door.close()


def _refuse_devices_counted_twice(parts: Sequence[NodeView]) -> None:
    """Raise NodeError for several agents on one host if one uses all its devices (MPICH does not tell how many it started)."""
    for home in dict.fromkeys(part.introduction.home for part in parts if part.introduction.counted):
        here = [part.introduction for part in parts if part.introduction.home == home]
        if len(here) > 1:
            raise NodeError(
                f"{here[0].host} has {len(here)} of the {len(parts)} agents of this run, and each would use all devices of "
                "the host; "
                "use --nproc 1 for one rank per agent, or start one agent per host (mpirun -ppn 1; -H with each host once)"
            )


def _introduced(record: dict[str, Any]) -> Introduction:
    door = record["door"]
    return replace(Introduction(**record), door=(tuple(door[0]), int(door[1])) if door else None)


def introduced(introduction: Introduction) -> Message:
    """The first message of a member."""
    return {"hello": asdict(introduction)}
