"""The head of a run. It decides which ranks there are, when all stop, which rank is the cause, and whether all restart.

    status = Head(plan, run, events, screen, nodes).run()

One thread, one selector; only what is printed has its own thread (outlet.py). The head deals with nodes only (node.py,
remote.py): ranks of its own host and of another look the same here.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from rankwise.agent import root_cause, stall
from rankwise.agent.collective_check import Ledger, Mismatch
from rankwise.agent.event_loop import EventLoop
from rankwise.agent.node import NodeView
from rankwise.agent.nodes import NodeError, Nodes
from rankwise.agent.root_cause import Evidence
from rankwise.agent.screen import Screen
from rankwise.agent.slow_ranks import SlowRanks
from rankwise.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, RunDirError
from rankwise.host.text import clock, listed, numbered, short
from rankwise.ipc.shared_page import JOIN_S, agreed
from rankwise.run.directory import Attempt, Failure, NodeRecord, RunDir, write_text
from rankwise.run.plan import Plan, asks_for_help

TICK_S = 0.05
EVIDENCE_S = 0.3  # after the first failure: the reports of the other ranks come within this time
TERM_TO_KILL_S = 3.0
NEWS_S = 0.5  # the state of other nodes' ranks arrives within this time
FINISH_S = 30.0  # how long a node may take to end what is left of an attempt
STALLED_S = 5.0  # nodes without progress report it within this time of each other


class Head:
    """`run` returns the exit status of the run."""

    def __init__(self, plan: Plan, run: RunDir, events: EventLoop, screen: Screen, nodes: Nodes) -> None:
        self._plan = plan
        self._run = run
        self._events = events
        self._screen = screen
        self._nodes = nodes
        self._began = time.monotonic()
        self._stop_signal = 0
        self._stop_began = 0.0
        self._killed_as_asked = False
        self._grace_is_over = False
        self._mismatch: Mismatch | None = None

    def run(self) -> int:
        """Start the ranks; after a failure restart them, if the plan allows it."""
        restart = status = 0
        while True:
            try:
                parts = self._nodes.gather(lambda: bool(self._asked) or self._events.parent_ended)
            except NodeError as error:
                self._say(str(error))
                return 1
            if not parts:
                self._stop_signal = self._asked[0] if self._asked else 0
                return self._ended_before_it_began()
            self._compare(parts)
            try:
                status, failure = self._live(restart, parts)
            except RunDirError as error:
                if restart == 0:
                    raise
                self._say(f"the ranks are not restarted: {error}")
                return status
            stuck = any(part.end is not None and part.end.stuck for part in parts)
            if failure is None or restart == self._plan.max_restarts or stuck or self._asked or self._events.parent_ended:
                return status
            restart += 1
            self._say(f"{failure.summary}; restarting all ranks, {restart} of {self._plan.max_restarts}")

    def _compare(self, parts: Sequence[NodeView]) -> None:
        """Warn of versions that differ between nodes."""
        first = parts[0].introduction
        for what, value in first.versions.items():
            others: dict[str, list[str]] = {}
            for part in parts[1:]:
                if (theirs := part.introduction.versions.get(what, "missing")) != value:
                    others.setdefault(theirs, []).append(part.introduction.host)
            for theirs, hosts in others.items():
                self._say(f"warning: {what} on {listed(hosts, 3)} is {theirs}, on {first.host} {value}")

    def _ended_before_it_began(self) -> int:
        if self._events.parent_ended or not self._stop_signal:
            return 1
        self._say(f"stopped by {signal.Signals(self._stop_signal).name} before {self._nodes.missing()} joined")
        return self._agreed_status

    # --- one attempt

    def _live(self, restart: int, parts: Sequence[NodeView]) -> tuple[int, Failure | None]:
        """Run one attempt, until its last rank has ended. Returns (exit status, the failure if there was one)."""
        orders = self._nodes.orders(parts, restart)
        world_size = orders[0].world_size
        self._screen.ledger = Ledger(world_size) if self._plan.check_collectives else None
        self._screen.standing.clear()
        self._slow = SlowRanks()
        self._held = self._released = False
        self._alarm, self._ringing = 0, False
        self._signalled: set[int] = set()
        records = tuple(
            NodeRecord(part.introduction.host, order.first, part.introduction.ranks, part.introduction.page, order.store)
            for part, order in zip(parts, orders, strict=True)
        )
        todo = list(zip(parts, orders, strict=True))
        try:
            for part, order in todo:
                if self._is_here(part):
                    part.start(order, None)
            plan = self._plan  # the record is written while the ranks are forked: disks are slow
            settings = {"checkpoint_scope": plan.checkpoint_scope, "sync": plan.sync}
            attempt = self._run.begin_attempt(world_size, plan.argv, records, plan.fresh, **settings)
            self._run.write_failure(None)
            for (part, order), record in zip(todo, records, strict=True):
                if not self._is_here(part):
                    part.start(order, replace(attempt, parts=(record,)))
            attempt = self._watch(parts, attempt)
        finally:
            self._finish(parts)
        if self._screen.ledger is not None:
            self._mismatch = self._screen.ledger.look(at_end=True)
        status, outcome, failure = self._outcome(parts, attempt)
        self._record(attempt, status, outcome, failure)
        return status, failure

    def _record(self, attempt: Attempt, status: int, outcome: str, failure: Failure | None) -> None:
        """Record the end for the launcher, which prints it. If the disk is full or gone, print it here."""
        try:
            self._run.write_failure(failure)
            self._run.update_attempt(attempt, ended=time.time(), status=status, outcome=outcome)
        except (RunDirError, OSError) as error:
            if failure is not None and failure.traceback is not None:
                self._screen.show(failure.traceback)
            self._say(f"{outcome}, on {failure.host}; its output is in {failure.log}" if failure is not None else outcome)
            self._say(f"cannot record the outcome of this attempt: {error}; exit status {status}")

    def _is_here(self, part: NodeView) -> bool:
        return part is self._nodes.own

    def _finish(self, parts: Sequence[NodeView]) -> None:
        for part in sorted(parts, key=self._is_here):  # the own node last: it shows the rest of its logs
            part.finish()
        deadline = time.monotonic() + FINISH_S
        while any(part.end is None and part.lost is None for part in parts) and time.monotonic() < deadline:
            self._events.wait(TICK_S)
            self._nodes.look()

    def _watch(self, parts: Sequence[NodeView], attempt: Attempt) -> Attempt:
        """Watch the ranks. Returns when all have ended, or when the run is given up."""
        first_failure = ended = 0.0
        lost: set[int] = set()
        while True:
            self._events.wait(TICK_S)
            if self._events.parent_ended:
                return attempt
            self._nodes.look()
            asked = self._asked  # read before the ranks' state: the code below never combines a request with older facts
            for part in parts:
                if self._is_here(part):
                    part.look()
            started = all(part.facts.pids for part in parts)
            if started and not attempt.pids:
                pids = tuple(chain.from_iterable(part.facts.pids for part in parts))
                attempt = self._run.update_attempt(attempt, pids=pids)
            if len(self._asked) > len(asked):
                continue
            self._report_lost(parts, lost)
            self._look_at_stall(parts)
            self._look_at_slowness(parts)
            self._look_at_the_clock()
            if asked and not started:
                self._stop_signal = asked[0]
                return attempt  # asked to stop before the ranks were started
            self._stop_if_asked(parts, asked)
            self._ring(parts)
            if not any(part.facts.awaited for part in parts):
                return attempt
            now = time.monotonic()
            if any(part.facts.failed for part in parts) and not first_failure and not self._stop_began:
                first_failure = now
            if not ended and (self._finds_mismatch() or (first_failure and now > first_failure + EVIDENCE_S)):
                self._cut_all(parts, signal.SIGTERM)
                ended = now
            if ended and now > ended + TERM_TO_KILL_S:
                self._cut_all(parts, signal.SIGKILL)
            if self._stop_began and not self._grace_is_over and now > self._stop_began + self._plan.grace_s:
                self._grace_is_over = True
                self._say(
                    f"{numbered('rank', _alive(parts), ranges=True)} did not stop within {self._plan.grace_s:g} s: killed"
                )
                self._cut_all(parts, signal.SIGKILL)
            elif self._stop_began and _loses_nothing(parts) and any(part.facts.failed for part in parts):
                self._cut_all(parts, signal.SIGKILL)  # the others would wait for the failed rank, and have done no step

    def _cut_all(self, parts: Sequence[NodeView], signum: int) -> None:
        for part in parts:
            part.cut(signum, part.facts.alive)

    def _finds_mismatch(self) -> bool:
        return self._screen.ledger is not None and self._screen.ledger.look() is not None

    def _report_lost(self, parts: Sequence[NodeView], told: set[int]) -> None:
        for part in parts:
            me = part.introduction
            if part.lost is not None and me.index not in told:
                told.add(me.index)
                self._say(f"node {me.index}, {me.host}, was lost: {part.lost}")

    def _look_at_stall(self, parts: Sequence[NodeView]) -> None:
        """If no node makes progress: report which rank blocks the others."""
        standing = self._screen.standing
        if not standing:
            return
        first = min(when for when, *_ in standing.values())
        expected = [part.introduction.index for part in parts if part.facts.alive and part.lost is None]
        if all(index in standing for index in expected):
            observed = [o for index in sorted(standing) for o in standing[index][2]]
            line = stall.judge(observed, any(o.sure for o in observed), self._plan.check_collectives)
            if line is not None:
                stacks = f"Stacks: {short(self._run.logs / 'stall.txt')}"
                try:
                    write_text(self._run.logs / "stall.txt", "\n".join(standing[index][3] for index in sorted(standing)))
                except RunDirError as error:
                    stacks = f"Their stacks are lost: {error}"
                since_s = max(since for _, since, *_ in standing.values())
                cannot = ", so no rank can stop yet" if self._stop_began else ""
                self._say(f"no progress for {since_s:.0f} s{cannot}: {line}. {stacks}")
            standing.clear()
        elif time.monotonic() > first + STALLED_S:
            standing.clear()  # some node still makes progress

    def _look_at_slowness(self, parts: Sequence[NodeView]) -> None:
        """If all ranks run: report why they are slow, if it is known."""
        if all(len(part.facts.alive) == part.introduction.ranks for part in parts):
            hosts = [part.introduction.host for part in parts]
            line = self._slow.look([part.facts.times for part in parts], hosts, time.monotonic())
            if line is not None:
                self._say(line)

    # --- stopping

    @property
    def _requests(self) -> list[list[int]]:
        """The stop signals that each agent got, this one first. One list per agent: a Ctrl-C that mpirun passes on to all
        agents is one request."""
        return [self._events.asked, *self._nodes.asked.values()]

    @property
    def _asked(self) -> list[int]:
        """The first stop signal of each agent that got one."""
        return [signals[0] for signals in self._requests if signals]

    def _look_at_the_clock(self) -> None:
        after_s = self._plan.stop_after_s
        if after_s and not self._asked and time.monotonic() > self._began + after_s:
            self._say(f"the time limit of this run, {clock(after_s)}, is over")
            self._events.asked.append(signal.SIGTERM)

    def _stop_if_asked(self, parts: Sequence[NodeView], asked: Sequence[int]) -> None:
        """After the first request all ranks stop at the gate; a second Ctrl-C kills them."""
        if not asked and (flag := next((part.facts.flag for part in parts if part.facts.flag), 0)):
            self._events.asked.append(flag)
            asked = [flag]
        if not asked:
            return
        if not self._stop_signal:
            self._stop_signal = asked[0]
            self._stop_began = time.monotonic()
        if not self._killed_as_asked and any(signal.SIGINT in signals[1:] for signals in self._requests):
            self._say("interrupted again: killing all ranks now, without saving")
            self._killed_as_asked = True
            self._cut_all(parts, signal.SIGKILL)
            return
        joined = set(chain.from_iterable(part.facts.joined for part in parts))
        if not self._held:
            alive = set(_alive(parts))
            asked_s = time.monotonic() - self._stop_began
            if joined and not alive <= joined and asked_s < JOIN_S:
                return  # some ranks have not reached their first gate yet
            if not joined and self._nodes.remotes and asked_s < NEWS_S:
                return  # news of the other nodes may be on its way
            self._hold(parts, joined)
        if self._held and not self._released and all(part.claim is not None for part in parts):
            self._released = True
            last = max(part.claim or 0 for part in parts)
            for part in parts:
                part.release(last)

    def _ring(self, parts: Sequence[NodeView]) -> None:
        """Alarms: make what is due by the main rank's clock, or requested by a script, due on all ranks after the same step."""
        if not self._ringing and not self._held:
            self._ringing = any(part.facts.due == self._alarm + 1 for part in parts)  # another number is of one that is over
            if self._ringing:
                self._alarm += 1
                for part in parts:
                    part.ring(self._alarm)
        if self._ringing and all(part.alarm.number == self._alarm or part.lost is not None for part in parts):
            last, which = agreed(part.alarm for part in parts if part.lost is None)
            for part in parts:
                part.rung(self._alarm, last, which)
            self._ringing = False

    def _hold(self, parts: Sequence[NodeView], joined: set[int]) -> None:
        """Make every node hold its gate; send the signal itself to ranks without a gate."""
        name = signal.Signals(self._stop_signal).name
        again = " again" if self._stop_signal == signal.SIGINT else ""
        within = f"within {self._plan.grace_s:g} s" + (
            f"; Ctrl-C{again} kills them without saving" if self._plan.attended else ""
        )
        self._held = bool(joined)
        if joined:
            for part in parts:
                part.hold(self._stop_signal)
            self._say(f"{name}: all ranks stop after the current step, and save, {within}")
        found: list[int] = []
        for part in parts:
            outside = [rank for rank in part.facts.alive if rank not in joined and rank not in self._signalled]
            if outside:
                part.signal(self._stop_signal, outside)
                found += outside
        if found and not self._signalled and not joined:
            ranks = numbered("rank", found, ranges=True)
            if _loses_nothing(parts):
                self._say(f"{name}: {ranks} will stop at the first step {within}")
            else:
                self._say(f"{name} is passed on to {ranks}, which must exit {within}")
        self._signalled.update(found)

    # --- the end

    def _outcome(self, parts: Sequence[NodeView], attempt: Attempt) -> tuple[int, str, Failure | None]:
        """(exit status, how it ended in one line, the failure if it was one)."""
        if self._events.parent_ended:
            return 1, "the launcher was killed", None
        ends = [evidence for part in parts if part.end is not None for evidence in part.end.evidence]
        if self._mismatch is not None:
            return self._failed_to_match(self._mismatch, attempt)
        if self._stop_signal and (stopped := self._stopped(parts, ends, attempt.ranks)) is not None:
            return stopped[0], stopped[1] + root_cause.unkillable(ends), None
        culprit = root_cause.judge(ends)
        if culprit is None:
            return 0, "all ranks exited with status 0" + self._strangers(parts, attempt.ranks), None
        failure = Failure(
            rank=culprit.rank,
            host=self._host(attempt, culprit.rank),
            summary=root_cause.summary(culprit, ends),
            exit_status=root_cause.exit_status(culprit),
            exit_code=culprit.exit_code,
            signal=root_cause.signal_name(culprit.killed_by) if culprit.killed_by is not None else None,
            exception=culprit.exception,
            traceback=culprit.traceback,
            step=culprit.step,
            log=str(self._run.log(culprit.rank)),
            life=attempt.life,
        )
        return failure.exit_status, failure.summary, failure

    def _host(self, attempt: Attempt, rank: int) -> str:
        part = attempt.part_of(rank)
        return part.host if part is not None else attempt.host

    def _failed_to_match(self, mismatch: Mismatch, attempt: Attempt) -> tuple[int, str, Failure]:
        """A mismatch is the cause even if ranks report errors: those are its consequences."""
        failure = Failure(
            rank=mismatch.rank, host=self._host(attempt, mismatch.rank), summary=mismatch.summary, exit_status=1,
            log=str(self._run.log(mismatch.rank)), life=attempt.life,
        )  # fmt: skip
        return failure.exit_status, failure.summary, failure

    def _stopped(self, parts: Sequence[NodeView], ends: Sequence[Evidence], ranks: int) -> tuple[int, str] | None:
        """(exit status, in one line) of a run that was asked to stop and did; None if it failed instead."""
        interrupted = self._stop_signal == signal.SIGINT
        agreed = self._agreed_status
        name = signal.Signals(self._stop_signal).name
        if self._killed_as_asked:
            by = "a second Ctrl-C" if interrupted else f"Ctrl-C after {name}"
            return EXIT_INTERRUPTED, f"killed by {by}, without saving"
        if len(ends) == ranks and all(end.exit_code == agreed for end in ends):
            return agreed, f"stopped by {name} after step {max(end.step or 0 for end in ends)}"
        if _loses_nothing(parts) and all(end.sent and end.signum for end in ends if end.failed):
            return agreed, f"stopped by {name} before the first step: nothing is lost"
        if self._grace_is_over:
            return 128 + signal.SIGKILL, f"killed: it did not stop within {self._plan.grace_s:g} s of {name} (--grace)"
        if len(ends) < ranks:
            return agreed, f"stopped by {name} before all ranks had started"
        codes = [root_cause.exit_status(end) for end in ends if end.exit_code != 0]
        ours = any(part.facts.joined or part.facts.answers for part in parts)
        if not ours and codes:  # a script that uses no rankwise function: it handles signals in its own way
            return (EXIT_INTERRUPTED if interrupted else codes[0]), f"ended by {name}"
        return None

    @property
    def _agreed_status(self) -> int:
        """The status of a run that stopped as requested, and lost nothing."""
        return EXIT_INTERRUPTED if self._stop_signal == signal.SIGINT else EXIT_PREEMPTED

    def _strangers(self, parts: Sequence[NodeView], ranks: int) -> str:
        """A remark if no rank called a collective: N separate runs are hardly ever what the user wants."""
        may_train = ranks > 1 and self._plan.interpreter and not asks_for_help(self._plan.argv)
        if not may_train or any(part.end is not None and part.end.groups for part in parts):
            return ""
        return (
            f"; no rank called a collective: the script ran {ranks} times, each time on its own (to train one model together, "
            "it needs rankwise.Trainer, rankwise.AllReduce or DDP)"
        )

    def _say(self, text: str) -> None:
        self._screen.say(text)


def _alive(parts: Sequence[NodeView]) -> list[int]:
    return [rank for part in parts for rank in part.facts.alive]


def _loses_nothing(parts: Sequence[NodeView]) -> bool:
    """Whether the ranks train with rankwise, so that they would stop at their first step, and none has begun it."""
    return any(part.facts.answers for part in parts) and not any(part.facts.begun for part in parts)
