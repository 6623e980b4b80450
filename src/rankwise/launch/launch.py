"""From a RunConfig to the exit status of the run.

status = launch(RunConfig(argv=("train.py",)), env=os.environ)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from rankwise import schedulers
from rankwise.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, ConfigError, RunDirError
from rankwise.host import machine, network, processes, sources
from rankwise.host.text import count, listed, seconds_of, short
from rankwise.launch import code, join, script, submit
from rankwise.launch.outcome import conclude, say
from rankwise.launch.scheduler_choice import Choice, choose
from rankwise.run.config import RunConfig
from rankwise.run.directory import RunDir, write_text
from rankwise.run.plan import Plan
from rankwise.schedulers import Foreground, foreground
from rankwise.sync import names as strategies

_FEW_FILES = 1024  # the usual limit of a login shell
_MANY_FILES = 4096
_FILES_TO_BEGIN = 32
_LOG_TAIL_BYTES = 4096
_NAMED = 4  # hosts named in the first line; plan.json has all of them


def launch(config: RunConfig, env: Mapping[str, str], call: bytes | None = None) -> int:
    """Run the script on the devices of this machine, or give it to the scheduler that starts it elsewhere.

    `call`: written into the run directory for ranks that run a function (`rankwise.functions`). Prints how the run ended, and
    returns its exit status. If the job is queued and not waited for, prints the job and returns 0.
    """
    processes.check_proc()
    started = None if config.allow_independent else join.together(env)
    program = script.find(config)
    if config.sync is not None:
        _check_strategy(config.sync, program)
    run = RunDir(config.path(schedulers.named_by_task(program.run_name, env)))
    if started is not None and started.tasks.index > 0:
        return join.follow(started, run)
    choice = choose(config, env) if started is None else join.choice(started, config)
    if choice.node_rank > 0:  # only the first node owns the run directory; the agent logs there too if it can see it
        run = RunDir(run.path.with_name(f".{run.path.name}-node-{choice.node_rank}"))
    if program.no_torch is not None:
        if choice.is_here:
            raise ConfigError(program.no_torch)
        say(f"warning: {program.no_torch}")  # the setup commands of the job may provide torch
    if choice.is_here:
        environment = machine.visible(choice.gpus, env)
        if (others := machine.replaced(environment, env)) is not None:
            say(f"warning: --gpus {choice.gpus} replaces {others} of this shell, which may name the GPUs of its job")
        nproc, why = machine.ranks_for(config.nproc, {**env, **environment})
        _refuse_what_this_machine_cannot_hold(nproc)
        _refuse_nccl_without_gpu(program, {**env, **environment})
    else:  # each node counts its own devices and cores
        environment = {} if choice.gpus is None else {"CUDA_VISIBLE_DEVICES": choice.gpus}
        nproc, why = (0, "auto") if config.nproc == "auto" else (int(config.nproc), "as asked")
        if started is not None and config.nproc == "auto" and not started.one_per_node:
            nproc, why = 1, "one per task"
    plan = _plan(config, choice, program, run, environment, nproc, _threads(env, nproc if choice.is_here else 0))
    text = choice.starter.render(plan)
    for pitfall in program.pitfalls if nproc != 1 or choice.nodes > 1 else ():
        say(f"warning: {program.name}, {pitfall}")
    if config.dry_run or not choice.attached:
        found = submit.members(choice, run, plan)
        say(_headline(program, plan, choice))
        if config.dry_run:
            return submit.dry_run(text, found, config)
        return submit.queue(choice, text, found, config, program, call)
    gpus = machine.gpus({**env, **environment})
    return _run_here(
        config, choice, program, run, plan, text, lambda attempts: _announce(program, plan, choice, why, attempts, gpus), call
    )  # fmt: skip


def _check_strategy(name: str, program: script.Program) -> None:
    """Check --sync before the job waits in a queue. Raises ConfigError for an unknown name; warns if the script would not use
    it."""
    strategies.check(name, "--sync ")
    if not program.interpreter or program.argv[0] == "-m":
        return
    folder = str(Path(program.argv[0]).absolute().parent)
    if not any("rankwise" in text for text in sources.texts([program.argv[0]], [folder])):
        say(
            f"warning: --sync {name} is for a Trainer, or for rankwise.sync.named() in your own loop; {program.name} does "
            "not import rankwise, so --sync has no effect"
        )


def _run_here(
    config: RunConfig,
    choice: Choice,
    program: script.Program,
    run: RunDir,
    plan: Plan,
    text: str,
    announce: Callable[[int], None],
    call: bytes | None,
) -> int:
    """Run the job script as a child of this process, pass signals on to it, and print how it ended."""
    processes.become_subreaper()  # if the agent is killed, this process inherits its children
    submit.refuse_if_queued(run)
    aside = run.prepare(config.fresh, say)
    lease = run.take(say)
    sweep_s = 5.0
    try:
        if aside is not None:
            say(f"the older run was moved to {short(aside)}")
        submit.compare_with_earlier_attempts(run, program)
        submit.leave_records(run, plan, text, config, call)
        run.write_job(None)
        attempts = len(run.attempts())
        announce(attempts)
        forward = _Forward(choice.starter.stop_signals)
        agent = forward.to(_start(run, choice))
        with contextlib.suppress(OSError, RunDirError):
            write_text(run.code, code.describe(Path(program.name).absolute().parent))
        status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
        if choice.starts_agents and (newest := run.attempts()[attempts:][-1:]) and newest[0].status is not None:
            status = newest[0].status  # the launcher of the agents may return another status (MPICH: 0 after a signal)
        # The signal came before the launcher of the agents could handle it, or while the agents joined (MPICH: 0 here too).
        ended_by_it = status < 0 or (status == 0 and choice.starts_agents)
        if ended_by_it and forward.asked and len(run.attempts()) == attempts:
            say("stopped before any rank had started")
            return EXIT_INTERRUPTED if forward.interrupted else EXIT_PREEMPTED
        if status >= 0:
            sweep_s = 1.0  # an agent that exited by itself has left only processes that cannot be killed
        if status == EXIT_PREEMPTED and forward.interrupted:
            status = EXIT_INTERRUPTED  # another request to stop came before the Ctrl-C
        by = f"the launcher of the agents ({choice.name})" if choice.starts_agents else "the agent"
        if choice.node_rank > 0 and status > 0 and not forward.asked:
            say(f"the run has ended with exit status {status}; the reason is in the output of the first node")
        return conclude(run, status, attempts, config, by, forward.asked)
    finally:
        processes.end_tree(bound_s=sweep_s)
        lease.release()
        for signum in processes.STOP_SIGNALS:  # the run is over: another Ctrl-C must not make this process look killed
            signal.signal(signum, signal.SIG_IGN)


def _plan(
    config: RunConfig,
    choice: Choice,
    program: script.Program,
    run: RunDir,
    environment: dict[str, str],
    nproc: int,
    threads: int,
) -> Plan:
    return Plan(
        version=2,
        run_id=uuid.uuid4().hex,
        run_dir=str(run.path),
        argv=program.argv,
        interpreter=program.interpreter,
        environment=environment,
        cwd=os.getcwd(),
        name=config.name or run.path.name,
        on=choice.name,
        nodes=choice.nodes,
        min_nodes=choice.min_nodes,
        hosts=choice.hosts,
        node_rank=choice.node_rank,
        job=choice.job,
        master_addr=choice.master_addr,
        nproc=nproc,
        threads=threads,
        fork=bool(program.interpreter) and program.keep_cold is None and config.start_method == "fork",
        master_port=config.master_port or choice.queue.default_port,
        join_timeout_s=config.join_timeout_s,
        node_wait_s=config.node_wait_s,
        max_restarts=config.max_restarts,
        stop_after_s=_stop_after_s(config, choice),
        grace_s=config.grace_s,
        stall_warn_s=config.stall_warn_s,
        check_collectives=config.check_collectives,
        tee=config.tee,
        # An agent that another launcher starts may be on another host, where this pid belongs to another process.
        launcher_pid=os.getpid() if choice.attached and not config.dry_run and not choice.starts_agents else 0,
        fresh=config.fresh,
        checkpoint_scope=config.checkpoint_scope,
        sync=config.sync or "",
        terminal=choice.attached and sys.stdout.isatty(),
        attended=choice.attached and sys.stderr.isatty(),
        launcher_holds=choice.attached and not config.dry_run,
    )


def _stop_after_s(config: RunConfig, choice: Choice) -> float:
    """The earlier of --stop-after and what the job's time limit leaves; 0 for never."""
    asked = seconds_of(config.stop_after) if config.stop_after else None
    limit = choice.queue.stop_after_s(choice.job, config.grace_s)
    return float(min(filter(None, (asked, limit)), default=0.0))


def _threads(env: Mapping[str, str], nproc: int) -> int:
    """OMP_NUM_THREADS of each rank: as the user set it, else an equal share of this machine's cores; 0 if the ranks are
    elsewhere."""
    asked = env.get("OMP_NUM_THREADS", "")
    if asked.isdecimal():
        return max(1, int(asked))
    return max(1, machine.cores() // nproc) if nproc else 0


def _start(run: RunDir, choice: Choice) -> int:
    try:
        if isinstance(choice.starter, Foreground):
            return int(choice.starter.submit(str(run.job), choice.job))
        return int(foreground.start(choice.starter, str(run.job)))
    except OSError as error:
        shortage = processes.shortage(error) or f"{run.job} could not be run"
        raise ConfigError(f"cannot start the agent: {error.strerror}: {shortage}") from None


def _headline(program: script.Program, plan: Plan, choice: Choice, attempts: int = 0) -> str:
    """What is started on which nodes, by which scheduler, and why that one."""
    nodes = count(plan.nodes, choice.word) if plan.min_nodes == plan.nodes else f"{plan.min_nodes} to {plan.nodes} nodes"
    if plan.hosts:
        names = [f"{host.name}:{host.slots}" if host.slots else host.name for host in plan.hosts]
        nodes += f" ({listed(names, _NAMED, rest=', ...')})"
    gpus = str(plan.job.get("gpus_per_node", "")).rpartition(":")[2]
    each = plan.nproc or int(gpus or 0)
    if each:
        ranks = f"{count(each, 'rank')} each"
    elif slots := plan.job.get("slots"):
        nodes, ranks = f"the nodes of its {count(int(slots), 'slot')}", "one rank per slot"
    elif plan.hosts and all(host.slots for host in plan.hosts):
        ranks = f"{count(sum(host.slots for host in plan.hosts), 'rank')} in all"
    else:
        ranks = "one rank per device"
    ranks += f" ({each * plan.nodes} in all)" if each and plan.min_nodes == plan.nodes > 1 else ""
    going_on = f", attempt {attempts + 1}" if attempts else ""
    return f"{program.name} with {plan.on} ({choice.why}) on {nodes}, {ranks}, in {short(Path(plan.run_dir))}{going_on}"


def _announce(program: script.Program, plan: Plan, choice: Choice, why: str, attempts: int, gpus: int) -> None:
    """Print what will run where, and warn if this machine has too little for it."""
    if program.keep_cold is not None:
        say(f"{program.keep_cold}: each rank imports torch separately")
    if not choice.is_here:
        say(_headline(program, plan, choice, attempts))
        return
    nproc = plan.nproc
    going_on = f", attempt {attempts + 1}" if attempts else ""
    say(f"{program.name} on {count(nproc, 'rank')} ({why}), {count(plan.threads, 'thread')} each, "
         f"in {short(Path(plan.run_dir))}{going_on}")  # fmt: skip
    if 0 < gpus < nproc:
        say(f"warning: {nproc} ranks share {count(gpus, 'GPU')}; NCCL refuses that. Use --nproc {gpus} for one per GPU")
    elif nproc > machine.cores():
        say(f"warning: {nproc} ranks share {count(machine.cores(), 'core')}: each step waits for the slowest")
    if (files := machine.open_files()) < _FEW_FILES:
        say(
            f"warning: only {files} open files per process (ulimit -n): loader workers may need more"
            + (f". Type: ulimit -n {cure}" if (cure := _advised(files, machine.open_files(at_most=True))) > files else "")
        )


def _refuse_what_this_machine_cannot_hold(nproc: int) -> None:
    """Each rank is a process. It has a connection to every other rank, besides the files that Python, torch and the agent
    need."""
    files, most_files = machine.open_files(), machine.open_files(at_most=True)
    most = min(most_files - _FILES_TO_BEGIN, machine.processes())
    if nproc > most:
        cure = f"give --nproc {most} or less, or more nodes" if most > 0 else "ask an administrator for more"
        raise ConfigError(
            f"{count(nproc, 'rank')} do not fit on this machine, at most {max(most, 0)}: the limits are {most_files} open "
            f"files per process (ulimit -Hn), {machine.processes()} processes; {cure}"
        )
    if files < (needed := _FILES_TO_BEGIN + nproc):
        raise ConfigError(
            f"{count(nproc, 'rank')} need {needed} open files to start, and a process may have only {files} (ulimit -n); "
            f"type: ulimit -n {_advised(needed, most_files)}"
        )
    if nproc > 1:
        network.check_loopback()


def _advised(needed: int, most: int) -> int:
    """A limit of open files that is enough, and that the user may set."""
    return min(max(_MANY_FILES, 2 * needed), most)


def _refuse_nccl_without_gpu(program: script.Program, env: Mapping[str, str]) -> None:
    if program.nccl_line is not None and (why := machine.why_not_nccl(env, program.interpreter)) is not None:
        raise ConfigError(
            f"{program.name}, line {program.nccl_line}: it asks for the backend nccl, and {why}; write "
            'init_process_group("gloo") there, or init_process_group() for what each machine has'
        )


class _Forward:
    """Passes signals of this process on to the child that runs the job script, including those that came before the child was
    started.

    `passed`: by signal, the one that another launcher (srun) takes as a request to stop; a second Ctrl-C sends SIGTERM to it.
    """

    def __init__(self, passed: Mapping[int, int]) -> None:
        self._passed = passed
        self._child = 0
        self._early: list[int] = []
        self.interrupted = False
        self.asked = False
        for signum in processes.stop_signals():
            signal.signal(signum, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.stop_signals())  # a program may have started us with some blocked

    def to(self, child: int) -> int:
        """From now on, pass signals on to `child`."""
        self._child = child
        for signum in self._early:
            processes.send(child, signum)
        return child

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        again = signum == signal.SIGINT and self.interrupted
        self.asked = True
        self.interrupted = self.interrupted or signum == signal.SIGINT
        sent = signal.SIGTERM if again and signum in self._passed else self._passed.get(signum, signum)
        if self._child:
            processes.send(self._child, sent)
        else:
            self._early.append(sent)
