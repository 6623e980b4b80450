"""The ranks of one life: their processes, their ends, and the evidence that these leave.

crew = Crew(plan, run, page);  crew.announce(pids)
crew.reap();  crew.signal_all(SIGTERM);  evidence = crew.evidence()
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankwise import processes
from rankwise.agent import memory
from rankwise.agent.verdict import Evidence
from rankwise.page import FINISHED, Page
from rankwise.plan import Plan
from rankwise.rundir import RunDir

_LOG_TAIL_BYTES = 8192
_MEMORY_EVERY_S = 1.0


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@dataclass
class Rank:
    """One rank's process."""

    rank: int
    pid: int = 0
    status: int | None = None
    """As waitpid gives it; None while it lives."""

    ended: float = 0.0
    sent: bool = False
    """Whether the agent sent it a signal while it lived."""

    resident_bytes: int = 0
    """What it last held in memory."""

    @property
    def failed(self) -> bool:
        return self.status is not None and self.status != 0


class Crew:
    """All ranks of this node."""

    def __init__(self, plan: Plan, run: RunDir, page: Page) -> None:
        self.ranks = [Rank(r) for r in range(plan.nproc)]
        self._run = run
        self._page = page
        self._dead_unknown: dict[int, int] = {}  # reaped before their pid was announced
        self._oom_kills = memory.oom_kills()
        self._next_look = 0.0
        for rank in self.ranks:
            run.exception(rank.rank).unlink(missing_ok=True)

    @property
    def started(self) -> bool:
        return all(rank.pid for rank in self.ranks)

    @property
    def alive(self) -> list[Rank]:
        """Those that have not ended; those that have not begun are among them."""
        return [rank for rank in self.ranks if rank.status is None]

    @property
    def any_failed(self) -> bool:
        return any(rank.failed for rank in self.ranks)

    def announce(self, pids: list[int]) -> None:
        for rank, pid in zip(self.ranks, pids, strict=True):
            rank.pid = pid
            if pid in self._dead_unknown:
                self._note_end(rank, self._dead_unknown.pop(pid))

    def reap(self, warm_pid: int | None) -> bool:
        """Take the statuses of all that ended; what a dead rank leaves behind ends with it. False: the warm process ended."""
        warm_lives, ended = True, False
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if dead is None:
                break
            if dead.si_pid == warm_pid:
                warm_lives = False
                break  # its status is the starter's to take
            _, status = os.waitpid(dead.si_pid, 0)
            rank = next((r for r in self.ranks if r.pid == dead.si_pid), None)
            if rank is None:
                self._dead_unknown[dead.si_pid] = status
            else:
                self._note_end(rank, status)
                ended = True
        if ended:
            self.end_strays(keep=[warm_pid or 0])
        return warm_lives

    def _note_end(self, rank: Rank, status: int) -> None:
        rank.status = status
        rank.ended = time.time()

    def end_strays(self, keep: Collection[int]) -> None:
        """Kill what fell to this agent and is no living rank: a dead rank's loader workers keep its sockets open, and its
        peers would wait for them."""
        living = {rank.pid for rank in self.alive}
        for child in processes.children(os.getpid()):
            if child not in living and child not in keep:
                for pid in (child, *processes.descendants(child)):
                    processes.send(pid, signal.SIGKILL)

    def signal(self, rank: Rank, signum: int) -> None:
        if rank.pid and rank.status is None:
            rank.sent = True
            processes.send(rank.pid, signum)

    def signal_all(self, signum: int) -> None:
        for rank in self.alive:
            self.signal(rank, signum)

    def look_at_memory(self) -> None:
        """Once a second: what a rank held is known only while it lives."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _MEMORY_EVERY_S
            for rank in self.alive:
                if rank.pid:
                    rank.resident_bytes = memory.resident_bytes(rank.pid) or rank.resident_bytes

    def progress(self) -> Hashable:
        """Differs from the last time if any rank has begun a step, left a figure, or printed something."""
        rows = [self._page.row(rank.rank) for rank in self.ranks]
        return tuple(
            (row.claim, row.said, _bytes(self._run.log(rank.rank))) for row, rank in zip(rows, self.ranks, strict=True)
        )

    # --- what their ends say

    def evidence(self) -> list[Evidence]:
        """Of every rank that has ended."""
        return [self._evidence(rank) for rank in self.ranks if rank.status is not None]

    def _evidence(self, rank: Rank) -> Evidence:
        assert rank.status is not None
        code = os.waitstatus_to_exitcode(rank.status)
        record: dict[str, Any] = {}
        path = self._run.exception(rank.rank)
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(path.read_text())
            path.unlink()
        return Evidence(
            rank=rank.rank,
            exit_code=code if code >= 0 else None,
            signum=-code if code < 0 else None,
            sent=rank.sent,
            ended=rank.ended,
            exception=f"{record['type']}: {record['message']}" if record else None,
            where=record.get("where"),
            traceback=record.get("traceback"),
            raised=record.get("time"),
            step=self._step(rank.rank),
            remark=self._remark(rank, -code),
        )

    def _remark(self, rank: Rank, signum: int) -> str | None:
        if signum == signal.SIGKILL and memory.oom_kills() > self._oom_kills:
            held = ", ".join(f"rank {r.rank} last held {r.resident_bytes / 1e9:.1f} GB" for r in self.ranks)
            limit = memory.limit_bytes()
            return f"the kernel killed it for memory: {f'limit {limit / 1e9:.1f} GB, ' if limit else ''}{held}"
        if signum == signal.SIGABRT:
            said = re.findall(rb"what\(\): *(.+)", self._log_tail(rank.rank))
            return said[-1].decode(errors="replace").strip() if said else None
        return None

    def _log_tail(self, rank: int) -> bytes:
        with open(self._run.log(rank), "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES, 0))
            return file.read()

    def _step(self, rank: int) -> int | None:
        """The step it was in, or after which it stopped; None if it never said."""
        claim = self._page.row(rank).claim
        if claim in (0, FINISHED):
            return None
        return claim - 1 if self._page.stopping else claim
