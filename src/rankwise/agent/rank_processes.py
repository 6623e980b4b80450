"""The ranks of one attempt: their processes, how they end, and the evidence of the cause.

processes = RankProcesses(range(4, 8), script, run, page);  processes.announce(pids)
processes.reap();  processes.signal_all(SIGTERM);  evidence = processes.evidence()
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankwise.agent import exception_text, out_of_memory
from rankwise.agent.mapped_files import MappedFiles
from rankwise.agent.root_cause import Evidence
from rankwise.host import processes
from rankwise.host.text import cut
from rankwise.ipc.shared_page import FINISHED, Page, Row
from rankwise.run.directory import RunDir

_LOG_TAIL_BYTES = 65536  # large: the list of modules that a crash prints comes after what we look for
_MOST_COMPARED = 4
_LINE = 160  # characters of an exception
_KILL_S = 3.0  # a process in state D that SIGKILL has not ended by then waits for a disk or a driver
_BELOW_S = 3.0  # how long after a request the processes that a rank has started are asked too, if the rank has not exited
KILL_LARGE_S = 60.0  # freeing hundreds of GB may take long, without state D: do not give up early


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _stuck(pid: int, since_s: float) -> str | None:
    """Why a process that got SIGKILL `since_s` ago will not end; None while it still may."""
    if since_s < _KILL_S:
        return None
    blocked = processes.blocked_in(pid)
    if blocked is not None:
        return f"state D in {blocked}"
    return f"state {processes.state(pid)}" if since_s > KILL_LARGE_S else None


@dataclass
class Rank:
    """One rank's process."""

    rank: int
    pid: int = 0
    status: int | None = None
    """As waitpid returns it; None while the process runs."""

    ended: float = 0.0
    sent: bool = False
    """Whether the agent sent it a signal while it ran."""

    asked: tuple[int, float] | None = None
    """The request that was passed on to it, and when (monotonic); None if there was none, or its descendants have it too."""

    raised: float | None = None
    """When its exception was first seen (monotonic); None if it has raised none, as far as is known."""

    exception: str = ""
    """`ValueError: loss is nan (train.py:61)`, once `raised` is set."""

    killed: float | None = None
    """When it first got SIGKILL (monotonic); None if never."""

    stuck: str | None = None
    """Why SIGKILL does not end it; None if it does, as far as is known."""

    peak_bytes: int = 0
    """Its peak memory use; known when it has ended."""

    @property
    def failed(self) -> bool:
        return self.status is not None and self.status != 0


class RankProcesses:
    """All ranks of this node; each has one row of the page, in the same order."""

    def __init__(self, numbers: range, script: str, run: RunDir, page: Page, checked: bool = False) -> None:
        """`checked`: whether --check-collectives is on."""
        self.ranks = [Rank(number) for number in numbers]
        self._first = numbers.start
        self._run = run
        self._page = page
        self._script = script
        self._checked = checked
        self._dead_unknown: dict[int, tuple[int, int]] = {}  # reaped before their pid was announced
        self._oom_kills = out_of_memory.oom_kills()
        self._maps = MappedFiles()
        for rank in self.ranks:
            run.exception(rank.rank).unlink(missing_ok=True)
            run.begin_log(rank.rank)

    @property
    def started(self) -> bool:
        return all(rank.pid for rank in self.ranks)

    @property
    def alive(self) -> list[Rank]:
        """Ranks that have not ended, including those that have not started."""
        return [rank for rank in self.ranks if rank.status is None]

    @property
    def awaited(self) -> list[Rank]:
        """Ranks that run and can end: all except those that SIGKILL does not end."""
        return [rank for rank in self.alive if rank.stuck is None]

    @property
    def stuck_pids(self) -> set[int]:
        return {rank.pid for rank in self.ranks if rank.stuck is not None}

    def any_failed(self, grace_s: float) -> bool:
        """Whether a rank has exited with another status than 0, or raised more than `grace_s` ago and has not exited."""
        latest = time.monotonic() - grace_s
        return any(rank.failed for rank in self.ranks) or any(
            rank.raised is not None and rank.raised < latest for rank in self.alive
        )

    def announce(self, pids: list[int]) -> None:
        for rank, pid in zip(self.ranks, pids, strict=True):
            rank.pid = pid
            if pid in self._dead_unknown:
                self._note_end(rank, *self._dead_unknown.pop(pid))

    def reap(self, warm_pid: int | None, kept: Collection[int] = ()) -> None:
        """Reap all children that ended, except the warm process; kill what dead ranks left behind, except the processes in
        `kept`.
        """
        ended = False
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if dead is None:
                break
            if dead.si_pid == warm_pid:
                break  # the starter reaps it when it sees the channel close
            _, status, usage = os.wait4(dead.si_pid, 0)
            peak_bytes = usage.ru_maxrss * 1024
            rank = next((r for r in self.ranks if r.pid == dead.si_pid), None)
            if rank is None:
                self._dead_unknown[dead.si_pid] = (status, peak_bytes)
            else:
                self._note_end(rank, status, peak_bytes)
                ended = True
        if ended:
            self.end_strays(keep=[warm_pid or 0, *kept])

    def _note_end(self, rank: Rank, status: int, peak_bytes: int) -> None:
        rank.status = status
        rank.peak_bytes = peak_bytes
        rank.ended = time.time()

    def notice_maps(self) -> None:
        """Record which files the running ranks have mapped."""
        if self.started:
            self._maps.look([rank.pid for rank in self.alive])

    def notice_raised(self) -> None:
        """Find the ranks that have raised and still run. It reads a file of each rank: call it once a second."""
        for rank in self.alive:
            if rank.raised is None and (told := self._reworded(rank, self._record(rank))) is not None:
                rank.raised = time.monotonic()
                line = cut(next(iter(told.exception.splitlines()), ""), _LINE)
                rank.exception = f"{line} ({told.where})" if told.where else line

    def notice_stuck(self) -> None:
        """Find the ranks that SIGKILL should have ended by now: from then on nobody waits for them."""
        for rank in self.awaited:
            if rank.killed is not None:
                rank.stuck = _stuck(rank.pid, time.monotonic() - rank.killed)

    def end_strays(self, keep: Collection[int]) -> None:
        """Kill the orphans that this agent adopted, except running ranks: the loader workers of a dead rank keep its sockets
        open, and its peers would wait for them."""
        living = {rank.pid for rank in self.alive}
        for child in processes.children(os.getpid()):
            if child not in living and child not in keep:
                for pid in (child, *processes.descendants(child)):
                    processes.send(pid, signal.SIGKILL)

    def signal(self, rank: Rank, signum: int) -> None:
        if rank.pid and rank.status is None:
            rank.sent = True
            if signum == signal.SIGKILL and rank.killed is None:
                rank.killed = time.monotonic()
            processes.send(rank.pid, signum)

    def ask(self, rank: Rank, signum: int) -> None:
        """Pass a request to stop on to a rank without a gate."""
        if rank.pid and rank.status is None:
            rank.asked = signum, time.monotonic()
        self.signal(rank, signum)

    def pass_on_below(self) -> None:
        """Pass a request on to the descendants of ranks that have not exited: they may wait for processes of their own
        (mp.spawn), which a terminal's Ctrl-C would have reached too.

        A rank that will stop at its first gate ends its own children itself.
        """
        for rank in self.alive:
            row = self._row(rank.rank)
            if rank.asked is None or row.answers or row.joined or time.monotonic() < rank.asked[1] + _BELOW_S:
                continue
            signum, _ = rank.asked
            rank.asked = None
            for pid in processes.descendants(rank.pid):
                processes.send(pid, signum)

    def signal_all(self, signum: int) -> None:
        for rank in self.alive:
            self.signal(rank, signum)

    def progress(self) -> Hashable:
        """A value that changes if any rank has begun a step or a collective, recorded metrics, or printed something."""
        rows = [self._row(rank.rank) for rank in self.ranks]
        return tuple(
            (row.claim, row.collectives, row.said, _bytes(self._run.log(rank.rank)))
            for row, rank in zip(rows, self.ranks, strict=True)
        )

    @property
    def tells_steps(self) -> bool:
        return bool(self._page.joined())

    def _row(self, rank: int) -> Row:
        return self._page.row(rank - self._first)

    # --- what their ends say

    def evidence(self) -> list[Evidence]:
        """Of every rank that has ended, or that cannot be killed."""
        return [self._evidence(rank) for rank in self.ranks if rank.status is not None or rank.stuck is not None]

    def _evidence(self, rank: Rank) -> Evidence:
        code = os.waitstatus_to_exitcode(rank.status) if rank.status is not None else None
        record = self._record(rank)
        with contextlib.suppress(OSError):
            self._run.exception(rank.rank).unlink(missing_ok=True)
        log = self._run.log_tail(rank.rank, _LOG_TAIL_BYTES) if code is not None and code < 0 else b""
        printed = log.decode(errors="replace")
        told = self._reworded(rank, record)
        return Evidence(
            rank=rank.rank,
            exit_code=code if code is not None and code >= 0 else None,
            signum=-code if code is not None and code < 0 else None,
            sent=rank.sent,
            ended=rank.ended,
            exception=told.exception if told is not None else None,
            where=told.where if told is not None else exception_text.line_of_crash(printed),
            traceback=record.get("traceback"),
            raised=record.get("time"),
            step=self._step(rank.rank),
            remark=self._remark_on_exception(rank, told) if told is not None else self._remark_on_signal(rank, code, printed),
            stuck=rank.stuck if code is None else None,
        )

    def _record(self, rank: Rank) -> dict[str, Any]:
        """What the rank has recorded of the exception that stopped it (exception_record.py); empty if there is none."""
        with contextlib.suppress(OSError, ValueError):
            text = self._page.last_words(rank.rank - self._first) or self._run.exception(rank.rank).read_text()
            return dict(json.loads(text))
        return {}

    def _reworded(self, rank: Rank, record: dict[str, Any]) -> exception_text.ExceptionText | None:
        if not record:
            return None
        return exception_text.reword(record, rank.rank, self._script, len(self.ranks), self._checked)

    def _remark_on_signal(self, rank: Rank, code: int | None, printed: str) -> str | None:
        if code == -signal.SIGKILL:
            return self._killed_for_memory(rank)
        if code == -signal.SIGBUS:
            return self._maps.cut(rank.pid)
        if code == -signal.SIGABRT:
            return exception_text.of_abort(printed, self._checked)
        return None

    def _remark_on_exception(self, rank: Rank, told: exception_text.ExceptionText) -> str | None:
        if exception_text.is_short_of_memory(told.exception):
            return "; ".join(filter(None, (told.remark, self._held(rank))))
        if "DataLoader worker" in told.exception and "is killed by signal: Killed" in told.exception:
            return self._killed_for_memory(rank)
        return told.remark

    def _killed_for_memory(self, rank: Rank) -> str | None:
        """None if the kernel has killed no process for lack of memory in this attempt."""
        if out_of_memory.oom_kills() <= self._oom_kills:
            return None
        limit = out_of_memory.limit_bytes()
        return f"the kernel killed it because memory was full: {f'limit {_gb(limit)}, ' if limit else ''}{self._held(rank)}"

    def _held(self, rank: Rank) -> str:
        """The peak memory of a rank, and of the others to compare with."""
        others = [r for r in self.ranks if r is not rank]
        listed = ", ".join(f"rank {r.rank}: {_gb(r.peak_bytes)}" for r in others)
        if len(others) > _MOST_COMPARED:
            listed = f"the others up to {_gb(max(r.peak_bytes for r in others))}"
        return f"rank {rank.rank} used up to {_gb(rank.peak_bytes)}" + (f" ({listed})" if others else "")

    def _step(self, rank: int) -> int | None:
        """The step it was in, or after which it stopped; None if it never reported one."""
        claim = self._row(rank).claim
        if claim in (0, FINISHED):
            return None
        return claim - 1 if self._page.stopping else claim
