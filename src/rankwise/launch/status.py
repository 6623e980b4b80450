"""The state of a run, and the request to stop it, for any scheduler and host.

print(as_text(facts(run)));  print(cancel(run))
"""

from __future__ import annotations

import signal
import socket
import textwrap
import time
from dataclasses import asdict
from typing import Any

from rankwise import schedulers
from rankwise.errors import RunDirError
from rankwise.host import processes
from rankwise.host.terminal import typed
from rankwise.host.text import clock, count, short, stamp
from rankwise.run import lease
from rankwise.run.directory import Attempt, Job, RunDir
from rankwise.run.lease import Holder
from rankwise.schedulers.job import State

_ALIVE = ("waiting", "stuck", "running")


def state_of(job: Job) -> State:
    """The job's state now, as its scheduler reports it."""
    queue = schedulers.queue(job.scheduler)
    if queue is None:
        return State(
            "unknown", f"there is no scheduler {job.scheduler} here: neither rankwise nor an installed package provides it"
        )
    return queue.state(job.for_scheduler())


def is_alive(run: RunDir, job: Job | None) -> bool:
    """Whether a process writes into the run directory, or a job of the run waits or runs."""
    return _writer(run) is not None or (job is not None and state_of(job).phase in _ALIVE)


def _writer(run: RunDir) -> Holder | None:
    """The process that holds the run directory, unless it is certainly gone."""
    holder = run.holder()
    return None if holder is None or holder.is_gone() else holder


def facts(run: RunDir) -> dict[str, Any]:
    """The complete state, as a record for programs: the keys are those of `rankwise status --json`."""
    job = run.read_job()
    state = state_of(job) if job is not None else None
    writer = _writer(run)
    figures = run.newest_metrics()
    failure = run.read_failure()
    waiting_or_running = state is not None and state.phase in _ALIVE
    return {
        "run": run.path.absolute().name,
        "path": str(run.path.absolute()),
        "alive": writer is not None or waiting_or_running,
        "job": {**_without_options(job), **asdict(state)} if job is not None and state is not None else None,
        "writer": _described(run, writer) if writer is not None else None,
        "lives": [attempt.record() for attempt in run.attempts()],
        "last": _last(figures),
        "written": run.metrics.stat().st_mtime if figures else None,
        "failure": asdict(failure) if failure is not None else None,
    }


def _without_options(job: Job) -> dict[str, Any]:
    return {name: value for name, value in asdict(job).items() if name != "options"}


def _last(figures: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The metrics of the last step that has any, merged: training and evaluation write separate lines."""
    of_step = [record for record in figures if record.get("step") == figures[-1].get("step")]
    return {name: value for record in of_step for name, value in record.items()} if figures else None


def _described(run: RunDir, writer: Holder) -> dict[str, Any]:
    return {"host": writer.host, "pid": writer.pid, "since": writer.since, "silent_s": lease.silent_s(run.lease)}


def as_text(found: dict[str, Any], columns: int | None = None) -> str:
    """One line per fact. `columns`: the width of the terminal; lines are broken between words to fit."""
    rows = [("run", f"{found['run']}, in {found['path']}")]
    if (job := found["job"]) is not None:
        known = f": {job['reason'] or job['phase']}" + ("" if job["status"] is None else f", exit status {job['status']}")
        rows.append(("job", f"{job['id']} of {job['scheduler']}, submitted {stamp(job['submitted'])}{known}"))
    if (writer := found["writer"]) is not None:
        quiet = f", no heartbeat for {clock(writer['silent_s'])}" if writer["silent_s"] > lease.GONE_S else ""
        rows.append(("process", f"{writer['pid']} on {writer['host']}, since {stamp(writer['since'])}{quiet}"))
    attempts = found["lives"]
    for attempt in attempts[-1:]:
        rows.append(
            (
                f"attempt {attempt['life']}",
                f"{count(attempt['ranks'], 'rank')}, first on {attempt['host']}, {_course(attempt, found)}",
            )
        )
    if not attempts:
        rows.append(("attempt 1", "not started yet" if found["alive"] else "never started"))
    if (last := found["last"]) is not None:
        told = [name for name in last if name in ("loss", "lr") or name.startswith("eval_")]
        numbers = [f"{name} {last[name]:.4g}" for name in told if isinstance(last[name], int | float)]
        written = f"written {clock(max(0.0, time.time() - found['written']))} ago"
        rows.append(("step", ", ".join([str(last.get("step", "?")), *numbers, written])))
    if found["failure"] is not None:
        rows.append(("failed", f"{found['failure']['summary']}, on {found['failure']['host']}; see {found['failure']['log']}"))
    width = max(len(name) for name, _ in rows)
    lines = (f"{name.ljust(width)}  {text}" for name, text in rows)
    if columns is None:
        return "\n".join(lines)
    indent = " " * (width + 2)
    return "\n".join(
        textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) for line in lines
    )


def _course(attempt: dict[str, Any], found: dict[str, Any]) -> str:
    began = f"started {stamp(attempt['started'])}"
    if attempt["ended"] is not None:
        status = f", exit status {attempt['status']}" if attempt["status"] else ""
        return f"{began}, took {clock(attempt['ended'] - attempt['started'])}{status}: {attempt['outcome']}"
    if found["alive"]:
        return f"{began}, running for {clock(time.time() - attempt['started'])}"
    return f"{began}; it was killed, or its machine went down"


def cancel(run: RunDir) -> str:
    """Ask the run's job or process to stop; returns what was done. Raises RankwiseError if that is not possible."""
    job = run.read_job()
    queue = schedulers.queue(job.scheduler) if job is not None else None
    if job is not None and queue is not None and (state := state_of(job)).phase in _ALIVE:
        queue.cancel(job.for_scheduler())
        rest = "; its ranks save and stop" if state.phase == "running" else ""
        return f"job {job.id} of {job.scheduler} ({state.reason or state.phase}) is cancelled{rest}"
    writer = _writer(run)
    if writer is None:
        attempts = run.attempts()
        return f"{short(run.path)} is not running; {_end(attempts[-1]) if attempts else 'it never started'}"
    if not writer.is_here():
        raise RunDirError(
            f"{short(run.path)} runs on {writer.host} (pid {writer.pid}), and this is {socket.gethostname()}; type on "
            f"{writer.host}: {typed('cancel', called(run))}"
        )
    if not processes.send(writer.pid, signal.SIGTERM):
        raise RunDirError(
            f"{short(run.path)} runs as another user (pid {writer.pid}); type as that user: {typed('cancel', called(run))}"
        )
    return f"pid {writer.pid} is asked to stop: all ranks stop after the current step, and save"


def _end(attempt: Attempt) -> str:
    return f"its last attempt: {attempt.outcome}" if attempt.outcome else "its last attempt was killed"


def called(run: RunDir) -> str:
    """How to name this run on a command line that is typed in this folder."""
    path = short(run.path.absolute())
    word = run.path.name if path == f"runs/{run.path.name}" else path
    return word if not word.startswith("-") else f"./{path}"  # otherwise it would look like an option
