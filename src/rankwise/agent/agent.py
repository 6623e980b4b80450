"""The agent's loop: start the ranks, watch them, stop them together, say what happened.

    status = Agent(plan, run).run()

One thread, one selector. Ranks are its own children (warm.py says how), so it alone knows their exit statuses.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

from rankwise import processes
from rankwise.agent import verdict
from rankwise.agent.collectives import Ledger, Mismatch
from rankwise.agent.console import Console, LogFollower
from rankwise.agent.crew import Crew, Rank
from rankwise.agent.stall import StallWatch
from rankwise.agent.starter import Spec, Starter
from rankwise.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, ConfigError
from rankwise.page import JOIN_S, Page
from rankwise.plan import Plan
from rankwise.rundir import ENV_RUN_DIR, Failure, Life, RunDir
from rankwise.schedulers import Ranks, torchrun
from rankwise.terminal import Terminal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TICK_S = 0.05
EVIDENCE_S = 0.3  # from the first death: what the others say of it comes within this
TERM_TO_KILL_S = 3.0


class Agent:
    """One node's agent; `run` returns the exit status of the run."""

    def __init__(self, plan: Plan, run: RunDir) -> None:
        self._plan = plan
        self._run = run
        self._terminal = Terminal(sys.stdout)
        self._asked: list[int] = []  # stop signals received, in order
        self._stop_signal = 0
        self._stop_began = 0.0
        self._killed_as_asked = False
        self._grace_is_over = False
        self._ledger: Ledger | None = None
        self._mismatch: Mismatch | None = None
        self._stuck: set[int] = set()  # processes that nothing can end: nobody waits for them any more

    def run(self) -> int:
        """Start the ranks, again after a failure if that was asked for; return when nothing below this process is left."""
        processes.become_subreaper()
        self._page = Page.create(self._plan.nproc)
        self._listen()
        explicit = _hold_port(self._plan.master_port) if self._plan.master_port else None
        self._starter = Starter(self._plan)  # first of all: it imports torch while the rest is made ready
        if self._starter.channel is not None:
            self._selector.register(self._starter.channel, selectors.EVENT_READ)
        restart = 0
        try:
            while True:
                # A new port each time, unless one was asked for: a dead rank's children may hold the old.
                with _hold_port(0) if explicit is None else contextlib.nullcontext(explicit) as port:
                    status, failure = self._live(restart, port.getsockname()[1])
                if failure is None or restart == self._plan.max_restarts or self._stuck or self._launcher_ended():
                    return status
                restart += 1
                self._say(f"{failure.summary}; starting all ranks again, {restart} of {self._plan.max_restarts}")
        finally:
            self._starter.close()
            if not processes.end_tree(exclude=self._stuck):
                self._say("a process of this run cannot be killed (state D: disk or driver); the host needs an operator")

    # --- set-up

    def _listen(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_writer = socket.socketpair()
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._launcher: int | None = None
        if self._plan.launcher_pid:
            try:
                self._launcher = os.pidfd_open(self._plan.launcher_pid)
                self._selector.register(self._launcher, selectors.EVENT_READ)
            except ProcessLookupError:
                sys.exit(1)  # it is gone already: nobody wants this run

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        self._asked.append(signum)

    def _open_console(self) -> Console | None:
        if self._plan.tee == "none":
            return None
        shown = range(self._plan.nproc) if self._plan.tee == "all" else range(1)
        followers = [
            LogFollower(self._run.log(r), self._run.exception(r), f"[rank {r}] " if self._plan.tee == "all" else "")
            for r in shown
        ]
        return Console(followers, self._page.row(0), self._terminal)

    def _spec(self, rank: int, port: int, restart: int) -> Spec:
        n = self._plan.nproc
        ranks = Ranks(rank, n, rank, n, 0, master_addr="127.0.0.1", master_port=port)
        environment = {
            "OMP_NUM_THREADS": str(self._plan.threads),
            **os.environ,
            **self._plan.environment,
            **torchrun.variables(ranks, restart, self._plan.max_restarts, self._plan.run_id),
            ENV_RUN_DIR: self._plan.run_dir,
        }
        return {
            "environment": environment,
            "log": str(self._run.log(rank)),
            "exception": str(self._run.exception(rank)),
            "stacks": str(self._run.stacks(rank)),
            "stdin": rank == 0,
            "threads": self._plan.threads,
            "go_mark": [self._page.path, self._page.go_offset],
            "group_mark": [self._page.path, self._page.row(rank).groups_offset],
            "notes": self._ledger.place(rank) if self._ledger is not None else None,
        }

    # --- one life

    def _live(self, restart: int, port: int) -> tuple[int, Failure | None]:
        """From the start of the ranks to the end of the last: (exit status, the failure if there was one)."""
        self._page.reset()
        self._run.write_failure(None)
        crew = Crew(self._plan, self._run, self._page)
        console = self._open_console()
        if self._plan.check_collectives:
            self._ledger = Ledger(self._plan.nproc)
        self._starter.start([self._spec(r, port, restart) for r in range(self._plan.nproc)])
        life = self._run.begin_life(self._plan.nproc, self._plan.argv, self._page.path)  # while they are forked: disks are slow
        try:
            life = self._watch(crew, life, console)
        finally:
            crew.signal_all(signal.SIGKILL)
            self._stuck |= crew.stuck_pids
            self._end_all_but_the_warm_process()
            if console is not None:
                console.close()
            if self._ledger is not None:
                self._mismatch = self._ledger.look(at_end=True)
                self._ledger.close()
        status, outcome, failure = self._outcome(crew, life)
        self._run.write_failure(failure)
        with contextlib.suppress(OSError):
            self._run.update_life(life, ended=time.time(), status=status, outcome=outcome)
        return status, failure

    def _end_all_but_the_warm_process(self) -> None:
        processes.end_tree(exclude={self._starter.warm_pid or 0, *self._stuck})

    def _watch(self, crew: Crew, life: Life, console: Console | None) -> Life:
        """The loop. Returns when no rank is left that can end, or when nobody wants them any more."""
        first_failure = ended = 0.0
        stalls = StallWatch(self._run, crew, crew.progress, self._tells_steps, self._plan.stall_warn_s, self._say)
        while True:
            self._wait()
            if self._launcher_ended():
                return life
            if (message := self._starter.receive()) is not None:
                life = self._on_started(crew, message, life)
            if not crew.reap(self._starter.warm_pid):
                self._without_warm_process(crew)
            stalls.look()
            if console is not None:
                console.show()
            if self._asked and not crew.started:
                self._stop_signal = self._asked[0]
                return life  # asked to stop before any rank was there
            self._stop_if_asked(crew)
            crew.notice_stuck()
            if not crew.awaited:
                return life
            now = time.monotonic()
            if crew.any_failed and not first_failure and not self._stop_began:
                first_failure = now
            if not ended and (self._finds_mismatch() or (first_failure and now > first_failure + EVIDENCE_S)):
                crew.signal_all(signal.SIGTERM)
                ended = now
            if ended and now > ended + TERM_TO_KILL_S:
                crew.signal_all(signal.SIGKILL)
            if self._stop_began and not self._grace_is_over and now > self._stop_began + self._plan.grace_s:
                self._grace_is_over = True
                self._say(f"{_listed(crew.alive)} did not stop within {self._plan.grace_s:g} s: killed")
                crew.signal_all(signal.SIGKILL)

    def _finds_mismatch(self) -> bool:
        return self._ledger is not None and self._ledger.look() is not None

    def _tells_steps(self) -> bool:
        return bool(self._page.joined())

    def _wait(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            if key.fileobj is self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(4096)

    def _launcher_ended(self) -> bool:
        return self._launcher is not None and bool(select.select([self._launcher], [], [], 0)[0])

    def _on_started(self, crew: Crew, message: dict[str, Any], life: Life) -> Life:
        """What the starter says: the warm process is ready, the ranks are there, or there is no warm process."""
        if "pids" in message:
            crew.announce(message["pids"])
            self._page.go()
            return self._run.update_life(life, pids=tuple(message["pids"]))
        if "failed" in message and not crew.started:
            self._say(f"no warm start ({message['failed']}); each rank is started by itself")
            self._forget_channel()
            self._start_cold()
        return life

    def _without_warm_process(self, crew: Crew) -> None:
        """It was killed. Ranks that are there go on without it; ranks that are not are started by themselves."""
        self._forget_channel()
        self._starter.close()
        if not crew.started:
            self._say("the warm process was killed; each rank is started by itself")
            self._start_cold()

    def _start_cold(self) -> None:
        """No rank is known yet: what a warm process has forked ends, and is reaped, before others take its place."""
        self._starter.close()
        processes.end_tree(exclude=self._stuck)
        self._starter.fall_back()

    def _forget_channel(self) -> None:
        if self._starter.channel is not None:
            self._selector.unregister(self._starter.channel)

    # --- stopping

    def _stop_if_asked(self, crew: Crew) -> None:
        """The first request stops all at the gate; a second Ctrl-C kills."""
        if not self._asked and (flag := self._page.flagged()):
            self._asked.append(flag)
        if not self._asked:
            return
        if not self._stop_signal:
            self._stop_signal = self._asked[0]
            self._stop_began = time.monotonic()
        if self._asked[1:].count(signal.SIGINT):
            self._say("interrupted again: killing all ranks")
            del self._asked[1:]
            self._killed_as_asked = True
            crew.signal_all(signal.SIGKILL)
            return
        if self._page.stopping:
            return
        joined = set(self._page.joined())
        alive = {rank.rank for rank in crew.alive}
        if joined and not alive <= joined and time.monotonic() < self._stop_began + JOIN_S:
            return  # some are still on their way to the first gate
        if joined:
            self._page.stop(self._stop_signal)
            name = signal.Signals(self._stop_signal).name
            self._say(f"{name}: all ranks stop after the step they are in, and save; Ctrl-C again kills them")
        for rank in crew.alive:
            if rank.rank not in joined and not rank.sent:
                crew.signal(rank, self._stop_signal)

    # --- the end

    def _outcome(self, crew: Crew, life: Life) -> tuple[int, str, Failure | None]:
        """(exit status, how it ended in one line, the failure if it was one)."""
        if self._launcher_ended():
            return 1, "the launcher was killed", None
        ends = crew.evidence()
        if self._mismatch is not None:
            return self._failed_to_match(self._mismatch, life)
        if self._stop_signal and (stopped := self._stopped(ends)) is not None:
            return stopped[0], stopped[1] + verdict.unkillable(ends), None
        culprit = verdict.judge(ends)
        if culprit is None:
            return 0, "all ranks ended with status 0" + self._strangers(), None
        failure = Failure(
            rank=culprit.rank,
            host=life.host,
            summary=verdict.summary(culprit, ends),
            exit_status=verdict.exit_status(culprit),
            exit_code=culprit.exit_code,
            signal=verdict.signal_name(culprit.signum) if culprit.signum is not None else None,
            exception=culprit.exception,
            traceback=culprit.traceback,
            step=culprit.step,
            log=str(self._run.log(culprit.rank)),
            life=life.life,
        )
        return failure.exit_status, failure.summary, failure

    def _failed_to_match(self, mismatch: Mismatch, life: Life) -> tuple[int, str, Failure]:
        """It comes before all that the ranks say themselves: what they say follows from it."""
        failure = Failure(
            rank=mismatch.rank, host=life.host, summary=mismatch.summary, exit_status=1,
            log=str(self._run.log(mismatch.rank)), life=life.life,
        )  # fmt: skip
        return failure.exit_status, failure.summary, failure

    def _stopped(self, ends: list[verdict.Evidence]) -> tuple[int, str] | None:
        """(exit status, in one line) of a run that was asked to stop and did; None if it failed instead."""
        interrupted = self._stop_signal == signal.SIGINT
        agreed = EXIT_INTERRUPTED if interrupted else EXIT_PREEMPTED
        name = signal.Signals(self._stop_signal).name
        if self._killed_as_asked:
            return EXIT_INTERRUPTED, "ended by a second Ctrl-C, without a last checkpoint"
        if self._grace_is_over:
            return 128 + signal.SIGKILL, f"ended by {name}, but not within the grace of {self._plan.grace_s:g} s: killed"
        if len(ends) < self._plan.nproc:
            return 128 + self._stop_signal, f"stopped by {name} before all ranks had started"
        if all(end.exit_code == agreed for end in ends):
            return agreed, f"stopped by {name} after step {max(end.step or 0 for end in ends)}"
        codes = [verdict.exit_status(end) for end in ends if end.exit_code != 0]
        if not self._page.joined() and codes:  # a script without our parts: its own way to end
            return (EXIT_INTERRUPTED if interrupted else codes[0]), f"ended by {name}"
        return None

    def _strangers(self) -> str:
        """Ranks that never met were as many separate runs: hardly ever what was meant."""
        n = self._plan.nproc
        if n == 1 or not self._plan.interpreter or any(self._page.row(r).groups for r in range(n)):
            return ""
        return f"; none of the {n} ever made a process group: they were {n} separate runs of the same script"

    def _say(self, text: str) -> None:
        self._terminal.status("")  # the progress line comes again with the next figures
        with contextlib.suppress(OSError):
            print(f"rankwise: {text}", file=sys.stderr, flush=True)


def _hold_port(port: int) -> socket.socket:
    """A port of this host that stays ours (0: any): bound, never listening, so that torch's TCPStore can listen on it with
    SO_REUSEADDR while every other `bind(0)` passes it by. A crash leaves none of it behind.

    Bound before the option is set: two holders that both had it would both succeed. ConfigError when the port is taken.
    """
    holder = socket.socket()
    try:
        holder.bind(("", port))
    except OSError as error:
        holder.close()
        raise ConfigError(
            f"--master-port {port}: {str(error.strerror).lower()} ({_user_of(port)}); choose another, or leave it out: "
            "then one is taken that is free"
        ) from None
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def _user_of(port: int) -> str:
    """Who listens there, if this user may know."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f"by pid {connection.pid}, {' '.join(psutil.Process(connection.pid).cmdline()[:4])}"
    return "by another program, or until a minute ago by one that has ended"


def _listed(ranks: list[Rank]) -> str:
    numbers = ", ".join(str(rank.rank) for rank in ranks)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
