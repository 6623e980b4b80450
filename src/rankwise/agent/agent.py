"""The agent's loop: start the ranks, watch them, stop them together, say what happened.

    status = Agent(plan, run).run()

One thread, one selector. Ranks are its own children (warm.py says how), so it alone knows their exit statuses.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from types import FrameType

from rankwise import processes
from rankwise.agent import verdict
from rankwise.agent.console import Console
from rankwise.agent.starter import Spec, Starter
from rankwise.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from rankwise.page import FINISHED, Page
from rankwise.plan import Plan
from rankwise.rundir import ENV_RUN_DIR, Failure, Life, RunDir
from rankwise.schedulers import Ranks, torchrun
from rankwise.terminal import Terminal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TICK_S = 0.05
EVIDENCE_S = 0.3  # from the first death: what the others say of it comes within this
TERM_TO_KILL_S = 3.0
JOIN_S = 5.0  # ranks that reach the gate a little later than the first


@dataclass
class Rank:
    """One rank's process."""

    rank: int
    pid: int = 0
    status: int | None = None
    """As waitpid gives it; None while it lives."""

    ended: float = 0.0
    sent: bool = False

    @property
    def failed(self) -> bool:
        return self.status is not None and self.status != 0


class Agent:
    """One node's agent; `run` returns the exit status of the run."""

    def __init__(self, plan: Plan, run: RunDir) -> None:
        self._plan = plan
        self._run = run
        self._ranks = [Rank(r) for r in range(plan.nproc)]
        self._asked: list[int] = []  # signals received, in order
        self._stop_signal = 0
        self._stop_began = 0.0
        self._dead_unknown: dict[int, int] = {}  # reaped before their pid was announced

    def run(self) -> int:
        """Start the ranks and return when none of them, nor anything below them, is left."""
        processes.become_subreaper()
        self._page = Page.create(self._plan.nproc)
        self._listen()
        self._starter = Starter(self._plan)  # first of all: it imports torch while the rest is made ready
        if self._starter.channel is not None:
            self._selector.register(self._starter.channel, selectors.EVENT_READ)
        self._run.write_failure(None)
        port = _hold_port()
        life = self._run.begin_life(self._plan.nproc, self._plan.argv, self._page.path)
        console = self._open_console()
        self._starter.start([self._spec(r, port.getsockname()[1]) for r in range(self._plan.nproc)])
        try:
            life = self._watch(life, console)
        finally:
            self._starter.close()
            clean = processes.end_tree()
            if console is not None:
                console.close()
            port.close()
        status = self._record_end(life)
        if not clean:
            self._say("a process of this run cannot be killed (state D: disk or driver); the host needs an operator")
        return status

    # --- set-up

    def _listen(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup, theirs = socket.socketpair()
        for end in (self._wakeup, theirs):
            end.setblocking(False)
        self._wakeup_writer = theirs
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
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
        if not self._plan.console:
            return None
        return Console(self._run.log(0), self._page.row(0), Terminal(sys.stdout))

    def _spec(self, rank: int, port: int) -> Spec:
        n = self._plan.nproc
        ranks = Ranks(rank, n, rank, n, 0, master_addr="127.0.0.1", master_port=port)
        environment = {
            "OMP_NUM_THREADS": str(self._plan.threads),
            **os.environ,
            **torchrun.variables(ranks, restart=0, max_restarts=0, run_id=self._plan.run_id),
            ENV_RUN_DIR: self._plan.run_dir,
        }
        self._run.exception(rank).unlink(missing_ok=True)
        return {
            "environment": environment,
            "log": str(self._run.log(rank)),
            "exception": str(self._run.exception(rank)),
            "stdin": rank == 0,
            "threads": self._plan.threads,
        }

    # --- the loop

    def _watch(self, life: Life, console: Console | None) -> Life:
        first_failure = 0.0
        killed = 0.0
        while True:
            self._wait()
            if self._launcher is not None and _ended(self._launcher):
                self._kill_all()
                return life
            if (message := self._starter.receive()) is not None:
                life = self._on_started(message, life)
            self._reap()
            if console is not None:
                console.show()
            if self._asked and not self._ranks[0].pid:
                self._stop_signal = self._asked[0]
                return life  # asked to stop before any rank was there
            self._stop_if_asked()
            alive = [r for r in self._ranks if r.status is None]
            if not alive:
                return life
            now = time.monotonic()
            if not first_failure and any(r.failed for r in self._ranks) and not self._stop_began:
                first_failure = now
            if first_failure and not killed and now > first_failure + EVIDENCE_S:
                self._signal_all(signal.SIGTERM)
                killed = now
            if killed and now > killed + TERM_TO_KILL_S:
                self._kill_all()
            if self._stop_began and now > self._stop_began + self._plan.grace_s:
                self._say(f"ranks {_listed(alive)} did not stop within {self._plan.grace_s:g} s: killed")
                self._kill_all()

    def _wait(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            if key.fileobj is self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(4096)

    def _on_started(self, message: dict[str, object], life: Life) -> Life:
        """What the starter says: the warm process is ready, the ranks are there, or there is no warm process."""
        if "failed" in message:
            if all(r.pid for r in self._ranks):
                return life  # the ranks are there and go on without it
            self._end_strays()
            self._say(f"no warm start ({message['failed']}); each rank is started by itself")
            if self._starter.channel is not None:
                self._selector.unregister(self._starter.channel)
            self._starter.fall_back()
        elif "pids" in message:
            pids = message["pids"]
            assert isinstance(pids, list)
            for rank, pid in zip(self._ranks, pids, strict=True):
                rank.pid = pid
                if pid in self._dead_unknown:
                    self._note_end(rank, self._dead_unknown.pop(pid))
            life = self._run.update_life(life, pids=tuple(pids))
        return life

    def _reap(self) -> None:
        """Take the statuses of all that ended; what a dead rank leaves behind ends with it."""
        ended = False
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if dead is None:
                break
            if dead.si_pid == self._starter.warm_pid:
                self._starter.close()
                if not all(r.pid for r in self._ranks):
                    self._on_started({"failed": "the warm process ended"}, self._run.lives()[-1])
                continue
            _, status = os.waitpid(dead.si_pid, 0)
            rank = next((r for r in self._ranks if r.pid == dead.si_pid), None)
            if rank is None:
                self._dead_unknown[dead.si_pid] = status
            else:
                self._note_end(rank, status)
                ended = True
        if ended:
            self._end_strays()

    def _note_end(self, rank: Rank, status: int) -> None:
        rank.status = status
        rank.ended = time.monotonic()

    def _end_strays(self) -> None:
        """Kill what fell to this agent and is neither a rank nor the warm process: a dead rank's loader workers keep its
        sockets open, and its peers would wait for them."""
        keep = {r.pid for r in self._ranks if r.status is None} | {self._starter.warm_pid}
        for child in processes.children(os.getpid()):
            if child not in keep:
                for pid in (child, *processes.descendants(child)):
                    processes.send(pid, signal.SIGKILL)

    # --- stopping

    def _stop_if_asked(self) -> None:
        """The first request stops all at the gate; a second Ctrl-C kills."""
        if not self._asked and (flag := self._page.flagged()):
            self._asked.append(flag)
        if not self._asked:
            return
        if not self._stop_signal:
            self._stop_signal = self._asked[0]
            self._stop_began = time.monotonic()
            self._seen = len(self._asked)
        if self._asked[self._seen :].count(signal.SIGINT):
            self._say("interrupted again: killing all ranks")
            self._kill_all()
            return
        if self._page.stopping:
            return
        joined = set(self._page.joined())
        alive = {r.rank for r in self._ranks if r.status is None}
        if joined and not alive <= joined and time.monotonic() < self._stop_began + JOIN_S:
            return  # some are still on their way to the first gate
        if joined:
            self._page.stop(self._stop_signal)
        for rank in self._ranks:
            if rank.status is None and rank.rank not in joined and not rank.sent:
                self._signal(rank, self._stop_signal)

    def _signal(self, rank: Rank, signum: int) -> None:
        rank.sent = True
        processes.send(rank.pid, signum)

    def _signal_all(self, signum: int) -> None:
        for rank in self._ranks:
            if rank.status is None and rank.pid:
                self._signal(rank, signum)

    def _kill_all(self) -> None:
        self._signal_all(signal.SIGKILL)

    # --- the end

    def _record_end(self, life: Life) -> int:
        status, outcome = self._outcome(life)
        with contextlib.suppress(OSError):
            self._run.update_life(life, ended=time.time(), status=status, outcome=outcome)
        return status

    def _outcome(self, life: Life) -> tuple[int, str]:
        if self._launcher is not None and _ended(self._launcher):
            return 1, "the launcher was killed"
        ends = [self._evidence(r) for r in self._ranks if r.status is not None]
        stopped = EXIT_INTERRUPTED if self._stop_signal == signal.SIGINT else EXIT_PREEMPTED
        if self._stop_signal:
            name = signal.Signals(self._stop_signal).name
            if not ends:
                return 128 + self._stop_signal, f"stopped by {name} before the ranks had started"
            if all(e.exit_code == stopped for e in ends):
                return stopped, f"stopped by {name} after step {max(e.step or 0 for e in ends)}"
            codes = [verdict.exit_status(e) for e in ends if e.exit_code != 0]
            if self._page.joined() == [] and codes:
                return stopped if self._stop_signal == signal.SIGINT else codes[0], f"ended by {name}"
        culprit = verdict.judge(ends)
        if culprit is None:
            return 0, "all ranks ended with status 0"
        log = str(self._run.log(culprit.rank))
        failure = Failure(
            rank=culprit.rank,
            host=life.host,
            summary=verdict.summary(culprit),
            exit_status=verdict.exit_status(culprit),
            exit_code=culprit.exit_code,
            signal=signal.Signals(culprit.signum).name if culprit.signum is not None else None,
            exception=culprit.exception,
            traceback=culprit.traceback,
            step=culprit.step,
            log=log,
            life=life.life,
        )
        self._run.write_failure(failure)
        return failure.exit_status, failure.summary

    def _evidence(self, rank: Rank) -> verdict.Evidence:
        assert rank.status is not None
        code = os.waitstatus_to_exitcode(rank.status)
        record: dict[str, object] = {}
        path = self._run.exception(rank.rank)
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(path.read_text())
            path.unlink()
        raised = record.get("time")
        return verdict.Evidence(
            rank=rank.rank,
            exit_code=code if code >= 0 else None,
            signum=-code if code < 0 else None,
            sent=rank.sent,
            ended=time.time() - (time.monotonic() - rank.ended),
            exception=f"{record['type']}: {record['message']}" if record else None,
            where=_text(record.get("where")),
            traceback=_text(record.get("traceback")),
            raised=raised if isinstance(raised, float) else None,
            step=self._step(rank.rank),
        )

    def _step(self, rank: int) -> int | None:
        """The step it was in, or after which it stopped; None if it never said."""
        claim = self._page.row(rank).claim
        if claim in (0, FINISHED):
            return None
        return claim - 1 if self._page.stopping else claim

    def _say(self, text: str) -> None:
        print(f"rankwise: {text}", file=sys.stderr, flush=True)


def _hold_port() -> socket.socket:
    """A port of this host that stays ours: bound, never listening, so that torch's TCPStore can listen on it with
    SO_REUSEADDR while every other `bind(0)` passes it by. A crash leaves none of it behind."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder


def _ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _listed(ranks: list[Rank]) -> str:
    return ", ".join(str(r.rank) for r in ranks)
