"""A run submitted to a queue: its folders, its job, and the commands to type next.

status = queue(choice, text, [(run, plan)], config, program)
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rankwise import schedulers
from rankwise.errors import EXIT_INTERRUPTED, EXIT_USAGE, ConfigError, RunDirError
from rankwise.host.terminal import typed
from rankwise.host.text import short, stamp
from rankwise.ipc import pickles
from rankwise.launch import code, follow
from rankwise.launch.caller import caller_of
from rankwise.launch.outcome import say
from rankwise.launch.scheduler_choice import Choice
from rankwise.launch.script import Program
from rankwise.launch.status import called, state_of
from rankwise.run.config import RunConfig
from rankwise.run.directory import Job, RunDir, write_json, write_text
from rankwise.run.plan import Plan, asks_for_help
from rankwise.schedulers.job import State

_LOOK_S = 1.0
"""How long to look at a new job: a scheduler needs a moment to find out that a job can never start."""

ArrayMember = tuple[RunDir, Plan]
"""One run of a job. Only a job array has several."""


def members(choice: Choice, run: RunDir, plan: Plan) -> list[ArrayMember]:
    """The runs of the job; each task of a job array is a separate run, RUN-<number>. Raises ConfigError."""
    found = []
    for number in choice.queue.array_tasks(choice.job):
        path = run.path.with_name(f"{run.path.name}-{number}")
        found.append((RunDir(path), replace(plan, run_dir=str(path), name=path.name)))
    return found or [(run, plan)]


def refuse_if_queued(run: RunDir) -> None:
    """Raises RunDirError while a job of this run waits or runs: two jobs would write into one folder."""
    job = run.read_job()
    if job is None or (state := state_of(job)).phase not in ("waiting", "stuck", "running"):
        return
    raise RunDirError(
        f"the run in {short(run.path)} is job {job.id} of {job.scheduler}, submitted {stamp(job.submitted)}: {state.reason}; "
        f"to follow it: {typed('logs', '-f', called(run))}; to stop it: {typed('cancel', called(run))}; for another run: "
        "--name NAME"
    )


def leave_records(run: RunDir, plan: Plan, text: str, config: RunConfig, call: bytes | None = None) -> None:
    """Write config.json, plan.json and job.sh; and for a run of a function, the function, which no other user can read."""
    shutil.rmtree(run.function, ignore_errors=True)
    if call is not None:
        run.function.mkdir(mode=0o700)
        pickles.write(run.call, call)
    write_json(run.config, config.record(schedulers.options()))
    write_json(run.plan, plan.record())
    write_text(run.job, text, mode=0o755)


def compare_with_earlier_attempts(run: RunDir, program: Program) -> None:
    """A run is one training. Raises ConfigError if its directory belongs to another script; warns if the arguments differ."""
    attempts = run.attempts()
    if not attempts:
        return
    before, now = attempts[-1].argv, program.argv
    caller = program.caller
    of_other_name = Path(before[0]).name != Path(now[0]).name
    of_other_module = now[0] == "-m" and caller.identity(before) != caller.identity(now)
    if of_other_name or of_other_module or _are_two_files(before[0], now[0]):
        raise ConfigError(
            f"the run in {short(run.path)} belongs to {caller_of(before).name_of(before)}, and this is {program.name}; give "
            f"this run another name with {caller.name_option}, or rename the older run with {caller.fresh_option}"
        )
    trained = [each.argv for each in attempts if each.status != EXIT_USAGE and not asks_for_help(each.argv)]
    if trained and trained[-1][1:] != now[1:] and not asks_for_help(now):
        before = trained[-1]
        resumes = "; it resumes from its checkpoints" if run.saved() else ""
        say(
            f"warning: the run in {short(run.path)} was last started as `{shlex.join(before)}`, now as `{shlex.join(now)}`"
            f"{resumes}. To start a new run: --name NAME or --fresh"
        )


def _are_two_files(before: str, now: str) -> bool:
    """Whether these scripts are two files of one name in two folders. False if the earlier one is not there any more, or was
    typed in another folder."""
    try:
        return before != now and not Path(before).samefile(now)
    except OSError:
        return False


def dry_run(text: str, found: Sequence[ArrayMember], config: RunConfig) -> int:
    """Write the records, print only the job's script, start nothing; does not rename an older run."""
    for run, plan in found:
        refuse_if_queued(run)
        run.prepare(fresh=False)
        lease = run.take(say)
        try:
            leave_records(run, plan, text, config)
        finally:
            lease.release()
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode(errors="surrogateescape"))  # names of folders need not be UTF-8
    sys.stdout.buffer.flush()
    return 0


def queue(
    choice: Choice, text: str, found: Sequence[ArrayMember], config: RunConfig, program: Program, call: bytes | None = None
) -> int:
    """Submit the job, print how to follow it, and with --wait follow it. Returns the exit status. Ctrl-C stops following, not
    the job.

    Releases the leases of the run directories before submitting: the job's agents take them, maybe at once.
    """
    if len(found) > 1 and config.wait:
        raise ConfigError(
            "--wait and --array: an array is several runs, and --wait follows one; leave --wait out, then type: rankwise "
            "logs -f RUN-0"
        )
    # Before the job is submitted: after that, its agents may start at any moment.
    described = code.describe(Path(program.name).absolute().parent)
    with contextlib.ExitStack() as leases:
        for run, plan in found:
            refuse_if_queued(run)
            if (aside := run.prepare(config.fresh, say)) is not None:
                say(f"the older run was moved to {short(aside)}")
            leases.callback(run.take(say).release)
            compare_with_earlier_attempts(run, program)
            leave_records(run, plan, text, config, call)
            run.write_job(None)
            with contextlib.suppress(RunDirError):
                write_text(run.code, described)
    attempts = len(found[0][0].attempts())  # counted before the job can add one
    job_id = choice.queue.submit(str(found[0][0].job), choice.job)
    jobs = [Job(choice.name, job_id, time.time(), socket.gethostname(), choice.job) for _ in found]
    if numbers := choice.queue.array_tasks(choice.job):
        jobs = [replace(job, id=f"{job_id}_{number}") for job, number in zip(jobs, numbers, strict=True)]
    for (run, _), job in zip(found, jobs, strict=True):
        run.write_job(job)
    run, name = found[0][0], called(found[0][0])
    try:
        _tell(choice, job_id, jobs[0], found, name)
        if config.wait:
            return follow.wait(run, jobs[0], attempts, config)
    except KeyboardInterrupt:
        say(
            f"stopped following; job {job_id} continues. To follow it: {typed('logs', '-f', name)}; "
            f"to stop it: {typed('cancel', name)}"
        )
        return EXIT_INTERRUPTED
    if program.caller.reads:
        print(job_id)
    return 0


def _tell(choice: Choice, job_id: str, job: Job, found: Sequence[ArrayMember], name: str) -> None:
    """Print the first state of the job, and how to follow it. Raises ConfigError if it would never start."""
    state = _first_look(job)
    if state.phase == "stuck":
        choice.queue.cancel(replace(job, id=job_id).for_scheduler())
        raise ConfigError(f"job {job_id} of {choice.name} would never start, and was cancelled: {state.reason}")
    say(f"submitted job {job_id} of {choice.name}{_and_runs(found)}: {state.reason or state.phase}")
    say(f"to follow it: {typed('status', name)}, {typed('logs', '-f', name)}; to stop it: {typed('cancel', name)}")


def _and_runs(found: Sequence[ArrayMember]) -> str:
    return "" if len(found) == 1 else f", {len(found)} runs, {short(found[0][0].path)} to {found[-1][0].path.name}"


def _first_look(job: Job) -> State:
    """The state of a job that was just submitted, once it is more than "waiting", or after a second."""
    deadline = time.monotonic() + _LOOK_S
    while (state := state_of(job)).phase == "waiting" and time.monotonic() < deadline:
        time.sleep(_LOOK_S / 4)
    return state
