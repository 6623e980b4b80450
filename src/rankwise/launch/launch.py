"""From a RunConfig to the exit status of the run.

status = launch(RunConfig(argv=("train.py",)), env=os.environ)
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import FrameType

from rankwise import machine, processes
from rankwise.config import RunConfig
from rankwise.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, ConfigError, WorldError
from rankwise.launch import backend, code, script
from rankwise.plan import Plan
from rankwise.rundir import Failure, RunDir, write_json, write_text
from rankwise.schedulers import local
from rankwise.terminal import count, short
from rankwise.world import explain

_FEW_FILES = 1024  # what a login shell has
_FILES_TO_BEGIN = 32
_LOG_TAIL_BYTES = 4096
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def launch(config: RunConfig, env: Mapping[str, str]) -> int:
    """Run the script on all devices of this machine; returns the exit status, having said what became of the run."""
    if not config.allow_independent:
        _refuse_lonely_runs(env)
    program = script.find(config)
    environment = machine.visible(config.gpus, env)
    nproc, why = machine.ranks_for(config.nproc, {**env, **environment})
    _refuse_too_few_files(nproc)
    _refuse_nccl_without_gpu(program, {**env, **environment})
    threads = int(env["OMP_NUM_THREADS"]) if env.get("OMP_NUM_THREADS", "").isdecimal() else machine.cores() // nproc
    threads = max(1, threads)
    processes.become_subreaper()  # if the agent is killed, what it leaves falls to this process
    run = RunDir(config.path(program.run_name))
    aside = run.prepare(config.fresh)
    lease = run.take()
    sweep_s = 5.0
    try:
        plan = _plan(config, program, run, environment, nproc, threads)
        write_json(run.config, asdict(config))
        write_json(run.plan, plan.record())
        write_text(run.job, local.render(plan), mode=0o755)
        if aside is not None:
            _say(f"the older run was moved to {short(aside)}")
        _compare_with_earlier_lives(run, program)
        lives = len(run.lives())
        _announce(program, plan, why, lives, machine.gpus({**env, **environment}))
        forward = _Forward()
        agent = forward.to(_start_agent(run))
        with contextlib.suppress(OSError):
            write_text(run.code, code.describe(Path(program.name).absolute().parent))
        status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
        if status >= 0:
            sweep_s = 1.0  # an agent that ended by itself has left nothing but what nothing ends
        return _conclude(run, status, lives, config)
    finally:
        processes.end_tree(bound_s=sweep_s)
        lease.release()
        for signum in _FORWARDED:  # the run is over: one Ctrl-C more must not make this process look killed
            signal.signal(signum, signal.SIG_IGN)


def _plan(
    config: RunConfig, program: script.Program, run: RunDir, environment: dict[str, str], nproc: int, threads: int
) -> Plan:
    return Plan(
        version=2,
        run_id=uuid.uuid4().hex,
        run_dir=str(run.path),
        argv=program.argv,
        interpreter=program.interpreter,
        environment=environment,
        cwd=os.getcwd(),
        name=run.path.name,
        on="local",
        nodes=1,
        min_nodes=1,
        hosts=(),
        node_rank=-1,
        job={},
        master_addr="",
        nproc=nproc,
        threads=threads,
        fork=bool(program.interpreter) and program.keep_cold is None and config.start_method == "fork",
        master_port=config.master_port,
        join_timeout_s=config.join_timeout_s,
        node_wait_s=config.node_wait_s,
        max_restarts=config.max_restarts,
        grace_s=config.grace_s,
        stall_warn_s=config.stall_warn_s,
        check_collectives=config.check_collectives,
        tee=config.tee,
        launcher_pid=os.getpid(),
    )


def _start_agent(run: RunDir) -> int:
    try:
        return int(local.submit(str(run.job)))
    except OSError as error:
        shortage = processes.shortage(error) or f"{run.job} could not be run"
        raise ConfigError(f"cannot start the agent: {error.strerror}: {shortage}") from None


def _announce(program: script.Program, plan: Plan, why: str, lives: int, gpus: int) -> None:
    """What will run where; and what of this machine will be too little for it."""
    nproc = plan.nproc
    going_on = f", life {lives + 1}" if lives else ""
    _say(f"{program.name} on {count(nproc, 'rank')} ({why}), {count(plan.threads, 'thread')} each, "
         f"in {short(Path(plan.run_dir))}{going_on}")  # fmt: skip
    if 0 < gpus < nproc:
        _say(f"warning: {nproc} ranks share {count(gpus, 'GPU')}; NCCL refuses that. --nproc {gpus} is one a GPU")
    elif nproc > machine.cores():
        _say(f"warning: {nproc} ranks share {count(machine.cores(), 'core')}: each step waits for the slowest")
    if (files := machine.open_files()) < _FEW_FILES:
        _say(f"warning: only {files} open files a process (ulimit -n): loader workers may need more. Type: ulimit -n 4096")
    if program.keep_cold is not None:
        _say(f"{program.keep_cold}: each rank imports torch by itself")


def _refuse_too_few_files(nproc: int) -> None:
    """Each rank holds a connection to every other, beside what Python, torch and the agent need to begin at all."""
    needed, files = _FILES_TO_BEGIN + nproc, machine.open_files()
    if files < needed:
        raise ConfigError(
            f"a process may have only {files} files open (ulimit -n), and {count(nproc, 'rank')} need {needed} to begin; "
            f"type: ulimit -n 4096"
        )


def _refuse_nccl_without_gpu(program: script.Program, env: Mapping[str, str]) -> None:
    if program.nccl_line is not None and (why := backend.why_not_nccl(env, program.interpreter)) is not None:
        raise ConfigError(
            f"{program.name}, line {program.nccl_line}: it asks for the backend nccl, and {why}; write "
            'init_process_group("gloo") there, or init_process_group() for what each machine has'
        )


def _compare_with_earlier_lives(run: RunDir, program: script.Program) -> None:
    """A run is one training. Raises ConfigError when its directory belongs to another script; other arguments are said."""
    lives = run.lives()
    if not lives:
        return
    before, now = lives[-1].argv, program.argv
    if Path(before[0]).name != Path(now[0]).name or (now[0] == "-m" and before[:2] != now[:2]):
        raise ConfigError(
            f"the run in {short(run.path)} is of {shlex.join(before)} and this is {program.name}; give this one another name "
            "with --name NAME, or move the older aside with --fresh"
        )
    if before[1:] != now[1:]:
        _say(
            f"warning: the run in {short(run.path)} was last started as `{shlex.join(before)}`, now as `{shlex.join(now)}`; "
            "it goes on with what its checkpoints hold. For a training of its own: --name NAME, or --fresh"
        )


def _refuse_lonely_runs(env: Mapping[str, str]) -> None:
    """Several launchers, each with all ranks, would be as many runs in one directory."""
    found = explain(env)
    if found.world is not None and found.world.world_size > 1:
        raise WorldError(
            f"this is one of {found.world.world_size} processes that were started together (by what {found.source} looks like: "
            f"{', '.join(f'{k}={v}' for k, v in found.found.items())}), and each would start a run of its own; start rankwise "
            "once, or let that launcher start the script itself: python script.py (if separate runs are meant: "
            "--allow-independent)"
        )


def _conclude(run: RunDir, status: int, lives_before: int, config: RunConfig) -> int:
    """Say how it ended. The failure's lines are the last that the run prints."""
    lives = run.lives()
    life = lives[-1] if len(lives) > lives_before else None
    failure = run.read_failure()
    if status < 0:
        _say(f"the agent was killed by {signal.Signals(-status).name}; its ranks were ended, nothing else is lost")
        return 128 - status
    if life is None or life.status is None:
        return status  # the agent has said why it could not begin
    if failure is not None:
        _say_failure(run, failure)
    elif status in (EXIT_PREEMPTED, EXIT_INTERRUPTED) and life.outcome.startswith("stopped"):
        _say(f"{life.outcome}; to go on, type: {_resume_command(config)}")
    elif status != 0 or ";" in life.outcome:
        _say(life.outcome)
    return status


def _say_failure(run: RunDir, failure: Failure) -> None:
    print(file=sys.stderr)
    if failure.traceback is not None:
        if not _is_told(failure):
            print(failure.traceback.rstrip("\n"), file=sys.stderr)
    elif failure.log is not None and failure.rank != 0 and (failure.exit_code or failure.signal):  # rank 0's are above
        print(_last_lines(run.log_tail(failure.rank, _LOG_TAIL_BYTES)), end="", file=sys.stderr)
    _say(f"{failure.summary}, on {failure.host}")
    if failure.step is not None:
        saved = run.saved()
        _say(f"saved: {saved[-1]}; the same command goes on from there" if saved else
             "nothing was saved yet: the same command starts from the beginning")  # fmt: skip
    _say(f"its output is in {short(Path(failure.log or ''))}; exit status {failure.exit_status}")


def _is_told(failure: Failure) -> bool:
    """Whether all that the traceback says is in the summary: an error of ours, which is one line and a place."""
    first, _, _ = (failure.traceback or "").partition("\n")
    return first.startswith("error: ") and first.removeprefix("error: ") in failure.summary


def _last_lines(log: bytes, count: int = 5) -> str:
    """Why a rank left without an exception is often there."""
    return "".join(f"  {line}\n" for line in log.decode(errors="replace").splitlines()[-count:])


def _resume_command(config: RunConfig) -> str:
    """The same command, without --fresh."""
    words = ["rankwise", "run"]
    for field in fields(config):
        value = getattr(config, field.name)
        if value == field.default or field.name in ("argv", "module", "command", "fresh"):
            continue
        words.append(f"--{field.name.removesuffix('_s').replace('_', '-')}")
        if value is not True:
            words.append(f"{value:g}" if isinstance(value, float) else str(value))
    words += ["-m"] if config.module else ["--"] if config.command else []
    return shlex.join([*words, *config.argv])


class _Forward:
    """Passes the signals that the launcher gets on to the agent, those that came before it was there too."""

    def __init__(self) -> None:
        self._agent = 0
        self._early: list[int] = []
        for signum in _FORWARDED:
            signal.signal(signum, self._on_signal)

    def to(self, agent: int) -> int:
        """From now on to this process, the launcher's child."""
        self._agent = agent
        for signum in self._early:
            processes.send(agent, signum)
        return agent

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._agent:
            processes.send(self._agent, signum)
        else:
            self._early.append(signum)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"rankwise: {text}", file=sys.stderr, flush=True)
