"""One node's part of a run: it starts, watches and stops its ranks as the head orders.

    node = Node(plan, run, index, events, sink)
    node.start(orders);  node.look()          # every tick;  node.facts describes its ranks
    node.hold(SIGTERM);  node.release(last)   # the gate of the agreed stop
    node.ring(1);  node.rung(1, last, which)  # an alarm, which uses the same gate
    node.finish();  node.end                  # no process of this attempt is left; how each rank ended

The head has a `Node` for its own ranks, and a `Remote`, with the same methods, for every other node.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rankwise import __version__, schedulers
from rankwise.agent.collective_check import Rings
from rankwise.agent.console import Console, LogFollower, Shown
from rankwise.agent.event_loop import EventLoop
from rankwise.agent.held_port import hold_port
from rankwise.agent.rank_processes import KILL_LARGE_S, RankProcesses
from rankwise.agent.rank_starter import Spec, Starter
from rankwise.agent.root_cause import Evidence
from rankwise.agent.slow_ranks import NodeTimes, RankTimes
from rankwise.agent.stall import Observation, StallWatch
from rankwise.host import machine, network, processes
from rankwise.ipc.channel import NobodyThere, knock
from rankwise.ipc.shared_page import FINISHED, Alarm, Page
from rankwise.run.directory import ENV_RUN_DIR, Attempt, RunDir
from rankwise.run.plan import Plan
from rankwise.schedulers.ranks import Ranks, variables_of

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Orders:
    """What one node must know of one attempt."""

    restart: int
    node_rank: int
    """The index of the host; hosts are numbered in the order of their lowest rank."""

    nodes: int
    """Hosts in the run."""

    first: int
    """The lowest rank here."""

    world_size: int
    local_first: int
    """The local rank of `first`: agents that share a host share its local ranks."""

    local_world_size: int
    per_node: str
    """The number of ranks of each host, in order, as `short_list` writes them."""

    master_addr: str
    master_port: int
    store: str
    """The one address at which all nodes reach rank 0; empty if they use several."""


@dataclass(frozen=True)
class Facts:
    """What is known of the ranks of one node; a member reports each change to the head."""

    pids: tuple[int, ...] = ()
    """Of all its ranks, once they are started."""

    alive: tuple[int, ...] = ()
    """Ranks that have not ended, including those that have not started."""

    awaited: bool = True
    """Whether one of those can still end: SIGKILL does not end a process that waits for a disk."""

    failed: bool = False
    joined: tuple[int, ...] = ()
    """Ranks that stop at the gate."""

    flag: int = 0
    """A signal that one of its ranks got directly; 0 if none."""

    begun: bool = False
    """Whether one of its ranks has begun a step."""

    answers: bool = False
    """Whether one of its ranks would remember a request to stop that comes before its first step."""

    due: int = 0
    """The number of the alarm that its ranks ask for; 0 while they ask for none."""

    times: NodeTimes | None = None
    """Where the time of its ranks went; None until it is known."""


@dataclass(frozen=True)
class NodeEnd:
    """How one attempt ended on one node."""

    evidence: tuple[Evidence, ...]
    """Of every rank that has ended, or that cannot be killed."""

    groups: bool
    """Whether any rank called a collective."""

    stuck: bool
    """Whether a process of this attempt cannot be killed."""

    port: int
    """Reserved there for the next attempt."""


@dataclass(frozen=True)
class Introduction:
    """What a node tells the head about itself."""

    index: int
    host: str
    home: str
    """Its host and network namespace: nodes with the same one reach each other over loopback."""

    ranks: int
    why: str
    """Why it has this number of ranks."""

    page: str
    port: int
    """Reserved there for rank 0's store."""

    versions: Mapping[str, str]
    """Versions that should be the same on all nodes: rankwise, Python, the script."""

    door: tuple[tuple[str, ...], int] | None = None
    """Addresses and port at which the other nodes try to reach this one, if it is the first."""

    counted: bool = False
    """Whether the number of its ranks was not given: it then has one per device of its host."""


class Sink(Shown, Protocol):
    """Takes what a node has to show to a person, and what the head judges together with the reports of other nodes."""

    def say(self, text: str) -> None: ...
    def notes(self, notes: Sequence[tuple[int, str]]) -> None: ...
    def stalled(self, index: int, since_s: float, observed: Sequence[Observation], stacks: str) -> None: ...


class NodeView(Protocol):
    """A node as the head sees it: its own `Node`, or another agent's `Remote`."""

    facts: Facts
    claim: int | None
    """The highest step that its ranks have begun, once it holds its gate."""

    alarm: Alarm
    """The last alarm for which it held its gate."""

    end: NodeEnd | None
    lost: str | None
    """Why its agent can no longer be reached; None while it can."""

    route: str | None
    """The address at which it reaches the first node; None until it is known, empty if none works."""

    @property
    def introduction(self) -> Introduction: ...
    def find(self, addresses: Sequence[str], port: int) -> None:
        """Look for the route to the first node's door."""

    def start(self, orders: Orders, attempt: Attempt | None) -> None: ...
    def look(self) -> None: ...
    def signal(self, signum: int, ranks: Sequence[int]) -> None:
        """Pass a request to stop on to ranks without a gate; later also to their descendants, if the ranks do not exit."""

    def cut(self, signum: int, ranks: Sequence[int]) -> None:
        """End the ranks of an attempt that has failed, or whose time is over: this is not a request to stop."""

    def hold(self, signum: int) -> None: ...
    def release(self, last: int) -> None: ...
    def ring(self, number: int) -> None: ...
    def rung(self, number: int, last: int, which: int) -> None: ...
    def finish(self) -> None: ...


class Node:
    """The ranks of this host."""

    lost: str | None = None

    def __init__(self, plan: Plan, run: RunDir, index: int, events: EventLoop, sink: Sink, ranks: int = 0) -> None:
        """`ranks` 0: the plan's number, or one per device. Raises ConfigError if the plan's port is taken."""
        self._plan = plan
        self._events = events
        self.run = run
        self.sink = sink
        environment = {**os.environ, **plan.environment}
        wanted = ranks or plan.nproc
        self.ranks, why = machine.ranks_for(str(wanted) if wanted else "auto", environment)
        self._counted = not wanted
        self._page = Page.create(self.ranks)
        self._explicit = plan.master_port if index == 0 and not plan.master_addr else 0
        self._port = hold_port(self._explicit)
        self._starter = Starter(plan)  # as early as possible: it imports torch while the rest is prepared
        self.index, self._why = index, why
        self.interface: str | None = None
        """The network interface that leads to the other nodes."""

        self.door: tuple[tuple[str, ...], int] | None = None
        self.route: str | None = None
        self.secret = ""
        """Proves to the first node that this one belongs to the same run."""

        self.kept: set[int] = set()
        """Children of this process that are not ranks, and keep running between attempts."""
        self._processes: RankProcesses | None = None
        self._console: Console | None = None
        self._rings: Rings | None = None
        self._stuck: set[int] = set()  # processes that cannot be killed: nobody waits for them any more
        self.facts = Facts()
        self.claim: int | None = None
        self.alarm = Alarm()
        self._to_ring = 0
        self.end: NodeEnd | None = None

    @property
    def introduction(self) -> Introduction:
        port = self._port.getsockname()[1]
        return Introduction(
            self.index, platform.node(), network.home(), self.ranks, self._why, self._page.path, port,
            _versions(self._plan), self.door, self._counted,
        )  # fmt: skip

    def find(self, addresses: Sequence[str], port: int) -> None:
        """Waits for an answer. Reports if no address leads there."""
        try:
            link, self.route, own = knock(addresses, port, self.secret, {"finds": self.index})
        except NobodyThere as reason:
            self.route = ""
            self.sink.say(f"the first node cannot be reached: {reason}")
            return
        link.close("it was only looked for")
        with contextlib.suppress(OSError):
            self.interface = network.interface_of(own)

    # --- one attempt

    def start(self, orders: Orders, _attempt: Attempt | None) -> None:
        """Ask for the ranks; they have started when `facts.pids` is not empty."""
        self._page.reset()
        self._orders = orders
        self._threads = self._plan.threads or self._threads_of_each(orders)
        if orders.nodes > 1 and self.interface is None and not network.is_loopback(orders.master_addr):
            self.interface = network.interface_of(orders.master_addr)  # rank 0 is here
        self.claim = self.end = None
        self.alarm, self._to_ring = Alarm(), 0
        numbers = range(orders.first, orders.first + self.ranks)
        self._processes = RankProcesses(numbers, self._plan.argv[0], self.run, self._page, self._plan.check_collectives)
        self._console = self._open_console(numbers)
        self._rings = Rings(self.ranks) if self._plan.check_collectives else None
        self._stalls = StallWatch(
            self.run, self._processes, self._plan.stall_warn_s, self._plan.grace_s, self.sink.say, self._stalled
        )
        self._times = RankTimes(self._processes, self._page)
        self._starter.start([self._spec(rank) for rank in numbers])
        if self._starter.channel is not None:  # only during an attempt: otherwise nobody reads from it
            self._events.register(self._starter.channel)
        self.facts = Facts(alive=tuple(numbers))

    def _threads_of_each(self, orders: Orders) -> int:
        """If the launcher has bound this agent to some cores, its ranks share these; otherwise all ranks of the host share all
        cores."""
        cores = machine.cores()
        return max(1, cores // (self.ranks if cores < (os.cpu_count() or 1) else orders.local_world_size))

    def _open_console(self, numbers: range) -> Console:
        shown = {"all": numbers, "main": [rank for rank in numbers if rank == 0], "none": ()}[self._plan.tee]
        followers = [
            LogFollower(self.run.log(r), self.run.exception(r), f"[rank {r}] " if self._plan.tee == "all" else "")
            for r in shown
        ]
        row = self._page.row(0) if 0 in numbers and self._plan.tee != "none" else None
        return Console(followers, row, self.sink)

    @property
    def fresh(self) -> bool:
        """Whether to move an older run's part aside on this host."""
        return self._plan.fresh

    def _spec(self, rank: int) -> Spec:
        orders, row = self._orders, rank - self._orders.first
        local_rank = orders.local_first + row
        ranks = Ranks(
            rank, orders.world_size, local_rank, orders.local_world_size, orders.node_rank,
            master_addr=orders.master_addr, master_port=orders.master_port,
        )  # fmt: skip
        environment = {
            "OMP_NUM_THREADS": str(self._threads),
            **(dict.fromkeys(_INTERFACE_VARIABLES, self.interface) if self.interface and orders.nodes > 1 else {}),
            **_inherited(ranks, orders.per_node, self.ranks == 1),
            **self._plan.environment,
            **variables_of(ranks, orders.restart, self._plan.max_restarts, self._plan.run_id, orders.nodes),
            ENV_RUN_DIR: str(self.run.path),
        }
        return {
            "environment": environment,
            "log": str(self.run.log(rank)),
            "exception": str(self.run.exception(rank)),
            "stacks": str(self.run.stacks(rank)),
            "stdin": rank == 0,
            "threads": self._threads,
            "go_mark": [self._page.path, self._page.go_offset],
            "group_mark": [self._page.path, self._page.row(row).groups_offset],
            "answers_mark": [self._page.path, self._page.row(row).answers_offset],
            "last_words": [self._page.path, *self._page.last_words_place(row)],
            "count_mark": [self._page.path, self._page.row(row).collectives_offset],
            "data_mark": [self._page.path, self._page.row(row).data_wait_offset],
            "notes": self._rings.place(row) if self._rings is not None else None,
        }

    def _stalled(self, since_s: float, observed: Sequence[Observation], stacks: str) -> None:
        self.sink.stalled(self.index, since_s, observed, stacks)

    def look(self) -> None:
        """Handle what happened since the last call. Never waits."""
        if self._processes is None or self.end is not None:
            return
        if (message := self._starter.receive()) is not None:
            self._on_started(message)
        self._processes.reap(self._starter.warm_pid, self.kept)
        self._stalls.look()
        if self._console is not None and not self.sink.busy:
            self._console.show()
        if self._rings is not None and (notes := self._rings.read()):
            self.sink.notes([(self._orders.first + row, line) for row, line in notes])
        self._processes.notice_stuck()
        self._processes.notice_maps()
        self._processes.pass_on_below()
        self._ring()
        self.facts = Facts(
            pids=tuple(rank.pid for rank in self._processes.ranks) if self._processes.started else (),
            alive=tuple(rank.rank for rank in self._processes.alive),
            awaited=bool(self._processes.awaited),
            failed=self._processes.any_failed(self._plan.grace_s),
            joined=tuple(self._orders.first + row for row in self._page.joined()),
            flag=self._page.flagged(),
            begun=self._page.begun,
            answers=self._page.answers,
            due=self._page.alarms + 1 if self._page.due(time.monotonic_ns()) else 0,
            times=self._times.look(),
        )

    def _on_started(self, message: dict[str, Any]) -> None:
        """Handle a message of the starter: the warm process is ready, the ranks are started, or the warm process has failed."""
        assert self._processes is not None
        if "pids" in message:
            self._processes.announce(message["pids"])
            self._page.go()
        elif "failed" in message and self._processes.started:
            self.sink.say(f"{message['failed']}; the ranks that are running do not need it")
            self._forget_channel()
            self._starter.close()
        elif "failed" in message:
            self.sink.say(
                f"torch cannot be imported once for all ranks ({message['failed']}): each rank imports torch separately"
            )
            self._start_cold()

    def _start_cold(self) -> None:
        """Start ranks without the warm process. No rank is announced yet: what the warm process has forked is killed and reaped
        first."""
        self._forget_channel()
        self._starter.close()
        processes.end_tree(exclude=self._stuck | self.kept)
        self._starter.fall_back()

    def _forget_channel(self) -> None:
        if self._starter.channel is not None:
            self._events.unregister(self._starter.channel)

    def signal(self, signum: int, ranks: Sequence[int]) -> None:
        if self._processes is not None:
            self._stalls.hurry()
            for rank in self._processes.alive:
                if rank.rank in ranks:
                    self._processes.ask(rank, signum)

    def cut(self, signum: int, ranks: Sequence[int]) -> None:
        self._page.end(signum)
        if self._processes is not None:
            for rank in self._processes.alive:
                if rank.rank in ranks:
                    self._processes.signal(rank, signum)

    def hold(self, signum: int) -> None:
        self._stalls.hurry()
        if self._to_ring > self._page.alarms:  # an alarm that has not begun on this node will never happen, on any node
            self.alarm, self._to_ring = Alarm(self._to_ring, FINISHED), 0
        self.claim = self._page.hold(signum)

    def release(self, last: int) -> None:
        self._page.release(last)

    def ring(self, number: int) -> None:
        self._to_ring = number
        self._ring()

    def _ring(self) -> None:
        if self._to_ring > self._page.alarms and (alarm := self._page.ring(time.monotonic_ns())) is not None:
            self.alarm = alarm

    def rung(self, number: int, last: int, which: int) -> None:
        if number == self._page.alarms:
            self._page.rung(last, which)

    def finish(self) -> None:
        """End what is left of this attempt; afterwards `end` shows how each rank ended."""
        if self._processes is None or self.end is not None:
            return
        self._processes.signal_all(signal.SIGKILL)
        self._forget_channel()
        self._stuck |= self._processes.stuck_pids
        processes.end_tree(exclude={self._starter.warm_pid or 0, *self._stuck, *self.kept})
        if self._console is not None:
            self._console.close()
        if self._rings is not None:
            self.sink.notes([(self._orders.first + row, line) for row, line in self._rings.read()])
            self._rings.close()
        groups = any(self._page.row(row).groups for row in range(self.ranks))
        if not self._explicit:  # a new port each time: children of a dead rank may still hold the old one
            self._port.close()
            self._port = hold_port(0)
        self.end = NodeEnd(tuple(self._processes.evidence()), groups, bool(self._stuck), self._port.getsockname()[1])

    def close(self) -> None:
        """End all descendants of this process, except those that cannot be killed."""
        self._starter.close()
        self._port.close()
        if not processes.end_tree(exclude=self._stuck | self.kept, others_s=KILL_LARGE_S):
            self.sink.say(
                "a process of this run cannot be killed: it waits for a disk or a driver (state D); ask the administrator of "
                "the host"
            )


def _inherited(ranks: Ranks, per_node: str, is_only: bool) -> Mapping[str, str]:
    """This agent's environment, with the rank variables of each detected scheduler changed to agree with RANK. `is_only`:
    whether this agent has no other rank.
    """
    environment: Mapping[str, str] = os.environ
    for launcher in schedulers.launchers(os.environ).values():
        if launcher.detect(os.environ):
            tasks = launcher.tasks(os.environ) if is_only else None
            if tasks is None or (tasks.index, tasks.count) != (ranks.rank, ranks.world_size):
                environment = launcher.rank_env(environment, ranks, per_node)
    return environment


def _versions(plan: Plan) -> dict[str, str]:
    found = {"rankwise": __version__, "Python": platform.python_version()}
    script = Path(plan.cwd, plan.argv[0])
    with contextlib.suppress(OSError):
        found[script.name] = hashlib.sha256(script.read_bytes()).hexdigest()[:12]
    return found
