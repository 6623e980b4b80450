"""What a run prints, as it grows: the logs of its ranks, or the output of its job.

show_logs(run, ranks=(0,), follow=True);  status = wait(run, job, attempts, config)
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rankwise.errors import EXIT_PREEMPTED, OutputError, RunDirError
from rankwise.host.terminal import Terminal, typed
from rankwise.host.text import short
from rankwise.launch import status
from rankwise.launch.outcome import conclude, say
from rankwise.run.config import RunConfig
from rankwise.run.directory import Job, RunDir

_TICK_S = 0.2
_ASK_S = (1.0, 15.0)
"""A scheduler is asked this often at first, and at last: its answers cost it something, and most jobs are long."""

_CHUNK = 1 << 16
_FORGOTTEN_S = 60.0


class LogTail:
    """A file from its beginning, which may not be there yet: what is new, each line with a prefix if there is one."""

    def __init__(self, path: Path, prefix: str = "", end: bool = False) -> None:
        self._path = path
        self._prefix = prefix.encode()
        self._position = path.stat().st_size if end and path.exists() else 0
        self._partial = b""

    def read(self) -> bytes:
        """At most one chunk."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read(_CHUNK)
        except FileNotFoundError:
            return b""
        self._position += len(data)
        if not self._prefix:
            return data
        *whole, self._partial = (self._partial + data).split(b"\n")
        return b"".join(self._prefix + line + b"\n" for line in whole)

    def close(self) -> bytes:
        """What is left of a line that was never ended."""
        rest, self._partial = self._partial, b""
        return self._prefix + rest + b"\n" if rest else b""


def show_logs(run: RunDir, ranks: Sequence[int] | None, follow: bool) -> None:
    """Print the logs of these ranks (None: of all), and with `follow` what comes, until the run has ended.

    Where no rank has written anything, what the job itself printed. Raises RunDirError where there is neither.
    """
    chosen = _ranks(run) if ranks is None else ranks
    paths = {run.log(rank): f"[rank {rank}] " if ranks is None else "" for rank in chosen}
    job = run.read_job()
    if not any(path.exists() for path in paths):
        other = run.job_log(job.id) if job is not None else None
        if other is not None and other.exists() and not (ranks and ranks != (0,)):
            say(f"no rank has started yet; this is the output of job {job.id if job is not None else ''}")
            paths = {other: ""}
        elif not follow or not status.is_alive(run, job):
            there = ", ".join(map(str, _ranks(run))) or "none"
            raise RunDirError(
                f"{short(run.path)} has no log of rank {', '.join(map(str, chosen)) or '0'}; there are logs of: {there}"
            )
        elif not paths:
            paths = {run.log(0): "[rank 0] "}
    with contextlib.suppress(KeyboardInterrupt):
        _show([LogTail(path, prefix) for path, prefix in paths.items()], _until_it_ended(run, job) if follow else lambda: False)


def _ranks(run: RunDir) -> list[int]:
    """Those that have a log."""
    found = [re.fullmatch(r"rank-([0-9]+)\.log", path.name) for path in run.logs.glob("rank-*.log")]
    return sorted(int(match[1]) for match in found if match is not None)


def _until_it_ended(run: RunDir, job: Job | None) -> Callable[[], bool]:
    interval = _Interval()
    alive = True

    def goes_on() -> bool:
        nonlocal alive
        if alive and interval.over():
            alive = status.is_alive(run, job)
        return alive

    return goes_on


def _show(tails: Sequence[LogTail], goes_on: Callable[[], bool]) -> None:
    """All that is new, until `goes_on` is false, and what came until then."""
    terminal = Terminal(sys.stdout)
    while not terminal.closed:
        last = not goes_on()  # asked first: what was written before it ended is read after
        busy = list(tails)
        while busy and not terminal.closed:
            for tail in list(busy):
                data = tail.read()
                terminal.write(data)
                if not data:
                    busy.remove(tail)
        if last:
            break
        time.sleep(_TICK_S)
    for tail in tails:
        terminal.write(tail.close())
    terminal.end_line()
    if terminal.lost is not None:
        raise OutputError(f"cannot write to the standard output: {terminal.lost}")
    sys.stdout.flush()


class _Interval:
    """When to ask a scheduler again: soon at first, ever more seldom."""

    def __init__(self) -> None:
        self._pause, self._longest = _ASK_S
        self._next = time.monotonic() + self._pause

    def over(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._pause = min(self._pause * 1.2, self._longest)
        self._next = now + self._pause
        return True


def wait(run: RunDir, job: Job, attempts: int, config: RunConfig) -> int:
    """Show what the job prints until it has ended; returns its exit status. `attempts`: how many the run had before."""
    end = JobEnd(run, job)
    _show([LogTail(run.job_log(job.id))], end.goes_on)
    newest = run.attempts()[attempts:][-1:]
    exit_status = end.status if end.status is not None else newest[0].status if newest else None
    if end.stuck:
        say(
            f"stopped waiting: job {job.id} cannot start before it is repaired, and stays in the queue; to remove it, type: "
            f"{typed('cancel', status.called(run))}"
        )
        return 1
    if newest and newest[0].status == EXIT_PREEMPTED and newest[0].outcome.startswith("stopped"):
        exit_status = EXIT_PREEMPTED  # to its scheduler a job that has stopped and saved has not failed, or was cancelled
    if exit_status is None:
        say(f"job {job.id}: {end.reason}; its exit status is not known")
        return 1
    if not newest or newest[0].status is None:
        log = run.job_log(job.id)
        printed = f"its output is in {short(log)}" if log.exists() else "it printed nothing"
        say(f"job {job.id}: {end.reason}, exit status {exit_status} before any rank started; {printed}")
        return exit_status
    return conclude(run, exit_status, attempts, config)


class JobEnd:
    """Whether a job continues; when it does not, its exit status if the scheduler knows it, and the scheduler's reason."""

    def __init__(self, run: RunDir, job: Job) -> None:
        self._run, self._job = run, job
        self._interval = _Interval()
        self._forgotten_since: float | None = None
        self.status: int | None = None
        self.reason = ""
        self.stuck = False
        """It would be waited for without end."""
        self._seen_stuck = False

    def goes_on(self) -> bool:
        if not self._interval.over():
            return True
        state = status.state_of(self._job)
        if state.reason != self.reason and state.phase in ("waiting", "stuck"):
            say(f"job {self._job.id}: {state.reason}")
        self.reason, self.status = state.reason, state.status
        # Twice: what a scheduler says of a job between two of its states need not last.
        self.stuck, self._seen_stuck = state.phase == "stuck" and self._seen_stuck, state.phase == "stuck"
        if self.stuck:
            return False
        if state.phase != "unknown":
            self._forgotten_since = None
            return state.phase != "ended"
        # The scheduler is down for a while, or has forgotten the job: then the run's own record is all there is.
        now = time.monotonic()
        self._forgotten_since = self._forgotten_since or now
        newest = self._run.attempts()[-1:]
        if newest and newest[0].started >= self._job.submitted and newest[0].status is not None:
            return False
        return now < self._forgotten_since + _FORGOTTEN_S
