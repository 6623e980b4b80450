"""Shows what a run prints while it runs: the logs of its ranks, or the output of its job.

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
from rankwise.host.terminal import CHUNK, Prefixed, Terminal, typed
from rankwise.host.text import short
from rankwise.launch import status
from rankwise.launch.outcome import conclude, say
from rankwise.run.config import RunConfig
from rankwise.run.directory import Job, RunDir

_TICK_S = 0.2
_ASK_S = (1.0, 15.0)
"""The first and the longest interval between two questions to a scheduler: questions load it, and most jobs are long."""

_FORGOTTEN_S = 60.0


class LogTail:
    """Reads what is new in a file, which need not exist yet; adds a prefix to each line if there is one. `end`: skip what is
    there now."""

    def __init__(self, path: Path, prefix: str = "", end: bool = False) -> None:
        self._path = path
        self._prefixed = Prefixed(prefix)
        self._position = path.stat().st_size if end and path.exists() else 0

    def read(self) -> bytes:
        """At most one chunk."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read(CHUNK)
        except FileNotFoundError:
            return b""
        self._position += len(data)
        return self._prefixed.lines(data)

    def close(self) -> bytes:
        """Returns the last line if it has no line end."""
        return self._prefixed.rest()


def show_logs(run: RunDir, ranks: Sequence[int] | None, follow: bool) -> None:
    """Print the logs of these ranks (None: of all). With `follow`, print new output too, until the run has ended.

    If no rank has a log yet, print the output of the job. Raises RunDirError if there is neither.
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
        tails = {path: LogTail(path, prefix) for path, prefix in paths.items()}

        def new() -> list[LogTail]:
            """Ranks may begin later than this command."""
            all_of_them = ranks is None and "" not in paths.values()
            there = {run.log(rank): f"[rank {rank}] " for rank in _ranks(run)} if all_of_them else {}
            tails.update({path: LogTail(path, prefix) for path, prefix in there.items() if path not in tails})
            return list(tails.values())

        _show(new, _until_it_ended(run, job) if follow else lambda: False)


def _ranks(run: RunDir) -> list[int]:
    """The ranks that have a log."""
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


def _show(tails: Callable[[], list[LogTail]], goes_on: Callable[[], bool]) -> None:
    """Print new output of these until `goes_on` returns False; then print the last of it."""
    terminal = Terminal(sys.stdout)
    while not terminal.closed:
        last = not goes_on()  # asked before reading: so nothing that was written before the end is missed
        busy = list(tails())
        while busy and not terminal.closed:
            for tail in list(busy):
                data = tail.read()
                terminal.write(data)
                if not data:
                    busy.remove(tail)
        if last:
            break
        time.sleep(_TICK_S)
    for tail in tails():
        terminal.write(tail.close())
    terminal.end_line()
    if terminal.lost is not None:
        raise OutputError(f"cannot write to the standard output: {terminal.lost}")
    sys.stdout.flush()


class _Interval:
    """When to ask a scheduler again: after a second at first, then less and less often."""

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
    tails = [LogTail(run.job_log(job.id))]
    _show(lambda: tails, end.goes_on)
    newest = run.attempts()[attempts:][-1:]
    exit_status = end.status if end.status is not None else newest[0].status if newest else None
    if end.stuck:
        say(
            f"stopped waiting: job {job.id} cannot start before it is repaired, and stays in the queue; to remove it, type: "
            f"{typed('cancel', status.called(run))}"
        )
        return 1
    if newest and newest[0].status == EXIT_PREEMPTED and newest[0].outcome.startswith("stopped"):
        exit_status = EXIT_PREEMPTED  # for the scheduler, a job that stopped and saved has succeeded, or was cancelled
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
    """Whether a job continues; once it has ended, its exit status if the scheduler knows it, and the scheduler's reason."""

    def __init__(self, run: RunDir, job: Job) -> None:
        self._run, self._job = run, job
        self._interval = _Interval()
        self._forgotten_since: float | None = None
        self.status: int | None = None
        self.reason = ""
        self.stuck = False
        """Whether the job cannot start: waiting for it would never end."""
        self._seen_stuck = False

    def goes_on(self) -> bool:
        if not self._interval.over():
            return True
        state = status.state_of(self._job)
        if state.reason != self.reason and state.phase in ("waiting", "stuck"):
            say(f"job {self._job.id}: {state.reason}")
        self.reason, self.status = state.reason, state.status
        # Seen twice: what a scheduler reports while a job changes its state may be temporary.
        self.stuck, self._seen_stuck = state.phase == "stuck" and self._seen_stuck, state.phase == "stuck"
        if self.stuck:
            return False
        if state.phase != "unknown":
            self._forgotten_since = None
            return state.phase != "ended"
        # The scheduler is down for a while, or has forgotten the job: rely on the run's own record.
        now = time.monotonic()
        self._forgotten_since = self._forgotten_since or now
        newest = self._run.attempts()[-1:]
        if newest and newest[0].started >= self._job.submitted and newest[0].status is not None:
            return False
        return now < self._forgotten_since + _FORGOTTEN_S
