"""Slurm: what the tasks of a step are told; how a batch or salloc shell, which is none, looks like one; jobs for its queue."""

from __future__ import annotations

import math
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankwise.errors import ConfigError, WorldError
from rankwise.run.plan import Plan
from rankwise.schedulers.job import State, agent, call, enter, last_line, one_line, slug
from rankwise.schedulers.ranks import (
    Ranks,
    Tasks,
    address,
    not_joined,
    require,
    shown,
    single,
    tasks_of,
    whole_number,
    without,
)
from rankwise.schedulers.slurm_refusals import cure_of_wait, why_refused

VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_GTIDS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
)
NEEDS = "SLURM_JOB_ID"

OPTIONS = (
    "nodes", "gpus_per_node", "partition", "time", "nodelist", "cpus_per_task", "mem", "account", "qos", "constraint", "array",
    "dependency", "setup", "sbatch_args", "requeue",
)  # fmt: skip

WITHIN = ("nodes", "cpus_per_task", "setup")

# srun keeps INT and TERM to itself (a second INT, or the first TERM, ends the step at once) and passes USR1 on to the agents.
PASSED = {signal.SIGINT: signal.SIGUSR1, signal.SIGTERM: signal.SIGUSR1, signal.SIGHUP: signal.SIGUSR1}

_MARKS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
_ASKED = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
"""Any of them above 1: the job is of several tasks. SLURM_TASKS_PER_NODE is not one: it may count cores."""

# Slurm's own steps (slurm.h): ...a is the shell that salloc starts on the first node where sites ask for it
# (use_interactive_step), ...b the batch script, ...c what ssh adopts into. Their "step of one task" is nobody's training.
_FIRST_SPECIAL_STEP = 0xFFFFFFFA


def detect(env: Mapping[str, str]) -> bool:
    """True anywhere inside a job: in a task of a step, in a batch shell, in salloc's."""
    return any(name in env for name in _MARKS)


def tasks(env: Mapping[str, str]) -> Tasks | None:
    """Those of the step. None outside of one, and in a step of one task within a larger job, which proves nothing."""
    if not _in_step(env):
        return None
    found = tasks_of(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    lonely = found is not None and found.count == 1 and any(env.get(name, "1") != "1" for name in _ASKED)
    return None if lonely else found


def ranks(env: Mapping[str, str]) -> Ranks:
    """Raises NotJoinedError in the shell of a job of several tasks, WorldError for a step that contradicts itself."""
    if not _in_step(env):
        return _shell(env)
    require(env, ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"), "srun")
    if whole_number(env, "SLURM_STEP_NUM_TASKS") == 1:
        return _one_task(env)
    return _task(env)


def start(env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
    """Cluster, job, step, and how often the job was requeued: a requeued job keeps its number and counts its steps anew."""
    job = env.get("SLURM_HET_JOB_ID") or env.get("SLURM_JOB_ID")  # the parts of a heterogeneous job share the first
    if job is None or "SLURM_STEP_ID" not in env:
        return None
    cluster, restart = env.get("SLURM_CLUSTER_NAME", "cluster"), env.get("SLURM_RESTART_COUNT", "0")
    return f"slurm-{cluster}-{job}.{env['SLURM_STEP_ID']}-{restart}"


def one_a_node(env: Mapping[str, str]) -> bool:
    return all(count == 1 for count in tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", "0")))


def array_task(env: Mapping[str, str]) -> str | None:
    return env.get("SLURM_ARRAY_TASK_ID")


def of_rank(env: Mapping[str, str], ranks: Ranks, per_node: str) -> Mapping[str, str]:
    """As if srun had started each rank as a task of its own. Taken out, they would be missed: with SLURM_JOB_ID, which a script
    needs, Ignite asks for all of them. What `srun --mpi` says of the agent is taken out: MPI_Init would believe it.
    """
    counts = tasks_per_node(per_node)
    every = {"NTASKS": ranks.world_size, "NPROCS": ranks.world_size, "NNODES": len(counts), "TASKS_PER_NODE": per_node}
    step = {"NUM_TASKS": ranks.world_size, "NUM_NODES": len(counts), "TASKS_PER_NODE": per_node} if _in_step(env) else {}
    place = {"PROCID": ranks.rank, "LOCALID": ranks.local_rank, "NODEID": ranks.node_rank}
    if len(set(counts)) == 1:
        every["NTASKS_PER_NODE"] = counts[0]
    if "SLURM_CPUS_PER_TASK" in env and env.get("SLURM_CPUS_ON_NODE", "").isdecimal():
        every["CPUS_PER_TASK"] = max(1, int(env["SLURM_CPUS_ON_NODE"]) // ranks.local_world_size)
    of_mpirun = any(name in env for name in ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"))
    stays = without(env, ("SLURM_GTIDS", "SLURM_NTASKS_PER_NODE", *(() if of_mpirun else ("PMI_", "PMI2_", "PMIX_"))))
    said = {**every, **place, **{f"STEP_{name}": value for name, value in step.items()}}
    return {**stays, **{f"SLURM_{name}": str(value) for name, value in said.items()}}


def _in_step(env: Mapping[str, str]) -> bool:
    number = env.get("SLURM_STEP_ID")
    return number is not None and not (number.isdecimal() and int(number) >= _FIRST_SPECIAL_STEP)


def _task(env: Mapping[str, str]) -> Ranks:
    """One of several tasks of a step. What sbatch set (NTASKS, JOB_NODELIST) may be the job's: STEP_* is the step's."""
    require(env, ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS"), "srun")
    local_world_size, counted = _local_world_size(env)
    master_addr, master_port, where = address(env, "Slurm")
    return Ranks(
        rank=whole_number(env, "SLURM_PROCID"),
        world_size=whole_number(env, "SLURM_STEP_NUM_TASKS"),
        local_rank=whole_number(env, "SLURM_LOCALID"),
        local_world_size=local_world_size,
        node_rank=whole_number(env, "SLURM_NODEID"),
        master_addr=master_addr,
        master_port=master_port,
        origin={
            "rank": "SLURM_PROCID",
            "world_size": "SLURM_STEP_NUM_TASKS",
            "local_rank": "SLURM_LOCALID",
            "local_world_size": counted,
            "node_rank": "SLURM_NODEID",
            **where,
        },
        note=_array(env),
    )


def _local_world_size(env: Mapping[str, str]) -> tuple[int, str]:
    """The tasks of this step on this node, and how they were counted."""
    here = env.get("SLURM_GTIDS", "").split(",")
    if env["SLURM_PROCID"] in here:  # the ranks on this node
        return len(here), "SLURM_GTIDS, counted"
    require(env, ("SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE"), "srun")
    counts = tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
    node = whole_number(env, "SLURM_NODEID")
    if not 0 <= node < len(counts):
        raise WorldError(
            f"{shown(env, ('SLURM_NODEID', 'SLURM_STEP_TASKS_PER_NODE'))}: the step has no such node; "
            "start the script with srun directly: srun python script.py"
        )
    return counts[node], "SLURM_STEP_TASKS_PER_NODE at SLURM_NODEID"


def tasks_per_node(text: str) -> list[int]:
    """`3,1(x2)` is [3, 1, 1]. Raises WorldError for anything that Slurm does not write."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            raise WorldError(
                f"SLURM_STEP_TASKS_PER_NODE={text}: Slurm writes it like 3,1(x2); "
                "start the script with srun directly: srun python script.py"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _one_task(env: Mapping[str, str]) -> Ranks:
    """A step of one task, maybe within a larger job (`srun --overlap`, `srun -n1`): nobody is there to be joined."""
    several = _several(env)
    if several and env.get("SLURM_PROCID") != "0":
        found = shown(env, ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"))
        raise not_joined(
            f"{found}{'' if 'SLURM_PROCID' in env else ', no SLURM_PROCID'}, in a job with {several}",
            "the one task of that step has SLURM_PROCID=0, and this process was started by something else",
            "put srun before the command: srun python script.py",
        )
    if env.get("SLURM_PROCID", "0") != "0":
        raise WorldError(
            f"{shown(env, ('SLURM_PROCID', 'SLURM_STEP_NUM_TASKS'))}: a rank lies between 0 and world_size - 1; "
            "start the script with srun directly: srun python script.py"
        )
    notes = [f"a step of one task in a job with {several}: it trains alone"] if several else []
    return single("SLURM_STEP_NUM_TASKS=1", "; ".join([*notes, *filter(None, [_array(env)])]) or None)


def _shell(env: Mapping[str, str]) -> Ranks:
    """A batch shell or salloc's: SLURM_PROCID=0 and all, it looks like rank 0 of nobody."""
    several = _several(env)
    if not several:
        return single("a Slurm job of one task", _array(env))
    cure = "put srun before the command: srun python script.py"
    here = "; or use this node alone: rankwise run script.py"
    if "SLURM_STEP_ID" in env:
        found, shell = f"SLURM_STEP_ID={env['SLURM_STEP_ID']} (Slurm's own)", "the shell of the job itself"
    elif "SLURM_PROCID" in env:
        found, shell = f"SLURM_PROCID={env['SLURM_PROCID']}, no SLURM_STEP_ID", "the batch shell"
    else:  # on the host where salloc was typed, which is none of the job's
        found, shell, here = "no SLURM_PROCID and no SLURM_STEP_ID", "salloc's shell", ""
    where = f" on {env['SLURMD_NODENAME']}" if "SLURMD_NODENAME" in env else ""
    raise not_joined(f"{several}, {found}", f"this is {shell}{where} and not a task of a step", cure + here)


def _several(env: Mapping[str, str]) -> str:
    """The variables that say that the job is of several tasks or nodes; empty if it is of one."""
    return shown(env, [name for name in _ASKED if name in env and whole_number(env, name) > 1])


def _array(env: Mapping[str, str]) -> str | None:
    """The tasks of a job array are jobs of their own, which share neither a job id nor a world."""
    if "SLURM_ARRAY_TASK_ID" not in env:
        return None
    return f"task {env['SLURM_ARRAY_TASK_ID']} of job array {env.get('SLURM_ARRAY_JOB_ID', '?')}: each is a world of its own"


# --- a job for its queue


def allocated(env: Mapping[str, str]) -> int | None:
    """The nodes of the allocation that this shell (salloc's, or a batch script's) holds; None outside of one, and in a step."""
    if "SLURM_JOB_ID" not in env or _in_step(env):
        return None
    name = "SLURM_JOB_NUM_NODES" if "SLURM_JOB_NUM_NODES" in env else "SLURM_NNODES"
    return max(1, whole_number(env, name)) if name in env else 1


def attached(env: Mapping[str, str]) -> bool:
    """Within an allocation srun starts the agents there, and nothing is queued."""
    return allocated(env) is not None


def render(plan: Plan) -> str:
    """A batch script; run in an allocation's shell it does the same there. Raises ConfigError for what cannot work."""
    job = {name: value for name, value in plan.job.items() if value not in (None, False)}
    array = "array" in job
    one_line(plan.cwd, "the folder")
    folder = Path(one_line(plan.run_dir, "--run-dir"))
    run_dir = shlex.quote(plan.run_dir) + ('-"$SLURM_ARRAY_TASK_ID"' if array else "")
    output, redirection = _output(folder, run_dir, array)
    redirection = [] if "within" in job else redirection
    lines = [
        "#!/bin/bash",
        _line("job-name", slug(plan.name)),
        _line("nodes", str(plan.nodes) if plan.min_nodes == plan.nodes else f"{plan.min_nodes}-{plan.nodes}"),
        # Of a range Slurm gives the fewest, unless there are as many tasks as nodes: then the most that are free now.
        _line("ntasks-per-node", "1") if plan.min_nodes == plan.nodes else _line("ntasks", str(plan.nodes)),
        *_asked(job, plan),
        _line("chdir", str(folder.parent if array else folder)),
        _line("output", output),
        _line("open-mode", "append"),
        *([] if _ends_with_the_first(plan) else ["#SBATCH --no-kill"]),
        *map(_argument, job.get("sbatch_args", ())),
        "",
        *redirection,
        *(one_line(text, "--setup") for text in job.get("setup", ())),
        enter(plan.cwd),
        *_start(plan, job, run_dir),
    ]
    return "\n".join(lines) + "\n"


def _output(folder: Path, run_dir: str, array: bool) -> tuple[str, list[str]]:
    """(--output, lines): where the job prints, and what the script does for it itself.

    Slurm takes the working folder and the name together for one pattern: a `%` of a folder's is one of Slurm's then, and after
    a backslash there are none. For such a folder the shell opens the file.
    """
    if not set("%\\") & set(str(folder)):
        return (f"{folder.name}-%a/logs/job-%A_%a.log" if array else "logs/job-%j.log"), []
    job_id = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if array else '"$SLURM_JOB_ID"'
    return "/dev/null", [f"exec >>{run_dir}/logs/job-{job_id}.log 2>&1"]


def _asked(job: Mapping[str, Any], plan: Plan) -> list[str]:
    """What the user asks of Slurm, a line each."""
    lines = []
    if (cpus := _cpus(job, plan)) is not None:
        lines.append(_line("cpus-per-task", str(cpus)))
    if "gpus_per_node" in job:
        lines.append(_line("gres", f"gpu:{job['gpus_per_node']}"))  # every version knows it, whatever selects resources
    if "time" in job:
        seconds(job["time"])
    for name in ("partition", "time", "nodelist", "mem", "account", "qos", "constraint", "array", "dependency"):
        if name in job:
            lines.append(_line(name, job[name]))
    if job.get("requeue"):
        lines += ["#SBATCH --requeue", _line("signal", f"USR1@{_lead_s(job.get('time'), plan.grace_s)}")]
    return lines


def _cpus(job: Mapping[str, Any], plan: Plan) -> int | None:
    """Cores of each node: unless told, one a rank as far as their number is known. Slurm by itself gives the agent one.

    Within an allocation, unless told, all that it has there.
    """
    if "within" in job:
        return job.get("cpus_per_task")
    gpus = str(job.get("gpus_per_node", "0")).rpartition(":")[2]
    return job.get("cpus_per_task") or plan.nproc or int(gpus) or None


def _start(plan: Plan, job: Mapping[str, Any], run_dir: str) -> list[str]:
    """srun, an agent a node. Its own cores are said again: a step does not inherit them. --export: sbatch --export=NONE would
    be inherited, and the agents have no PATH.
    """
    several = plan.min_nodes < plan.nodes
    counts = '"$nodes"' if several else str(plan.nodes)
    words = ["srun --export=ALL", f"--nodes={counts} --ntasks={counts} --ntasks-per-node=1"]
    if (cpus := _cpus(job, plan)) is not None:
        words.append(f"--cpus-per-task={cpus}")
    elif "within" in job:
        words.append("$bind")
    words.append("--kill-on-bad-exit=1" if _ends_with_the_first(plan) else "--kill-on-bad-exit=0 --no-kill")
    command = f"{' '.join(words)} \\\n  {agent()} {run_dir}"
    # Slurm gave the job from MIN to MAX; the user's own allocation may have more.
    there = ["nodes=${SLURM_JOB_NUM_NODES:-$SLURM_NNODES}", f"nodes=$((nodes < {plan.nodes} ? nodes : {plan.nodes}))"]
    there = there if several else []
    if "$bind" in words:
        # srun would give the agent one core. Where nothing binds it needs no word of this, and has one against it.
        there.append("bind=$(scontrol show config | grep -q '^TaskPlugin .*affinity' && echo --cpu-bind=none)")
    if not job.get("requeue"):
        return [*there, f"exec {command}"]
    return [
        *there,
        command,
        "status=$?",
        "# 75: stopped and saved, to go on. Slurm ends this script as soon as it is asked.",
        '[ "$status" = 75 ] && scontrol requeue "$SLURM_JOB_ID"',
        'exit "$status"',
    ]


def _ends_with_the_first(plan: Plan) -> bool:
    """Whether the first agent to fail ends the job: nothing is started again, and no node may be lost."""
    return plan.max_restarts == 0 and plan.min_nodes == plan.nodes


def _line(name: str, value: str) -> str:
    """Quoted as sbatch reads it. A plain value stays plain."""
    one_line(value, f"--{name}")
    if re.fullmatch(r"[A-Za-z0-9._:@/%,=+\[\]-]+", value):
        return f"#SBATCH --{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{name}="{escaped}"'


def _argument(text: str) -> str:
    """`--exclusive`, `--comment=a b`, `-p main`."""
    match = re.fullmatch(r"(?:--([A-Za-z][A-Za-z-]*)(?:[= ](.*))?|-([A-Za-z])(?: ?(.+))?)", text)
    if match is None:
        raise ConfigError(f"--sbatch-arg {text!r}: give one option of sbatch, such as --sbatch-arg=--exclusive")
    long, value, short, short_value = match.groups()
    if long is not None:
        return _line(long, value) if value else f"#SBATCH --{long}"
    return f"#SBATCH -{short}" + (_line("x", short_value).removeprefix("#SBATCH --x=") if short_value else "")


_LONGEST_S = 366 * 86400
_TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")


def seconds(time: str) -> int | None:
    """A limit of time as Slurm reads it: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s. None for UNLIMITED. Raises ConfigError.

    Slurm itself takes -5 for 2982611 days, and 0 for no limit.
    """
    if time == "UNLIMITED":
        return None
    match = _TIME.fullmatch(time)
    numbers = [int(n) for n in match.groups() if n is not None] if match is not None else []
    if not numbers:
        total = 0
    elif match is not None and match[1] is not None:
        days, hours, minutes, rest = (*numbers, 0, 0)[:4]
        total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif len(numbers) == 3:
        total = (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    else:
        total = numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)
    if not 0 < total <= _LONGEST_S:
        raise ConfigError(
            f"--time {time}: give minutes, h:m:s, or d-h:m:s, up to 366 days: --time 20:00:00 is twenty hours "
            "(without any limit: --time UNLIMITED)"
        )
    return total


def _lead_s(time: str | None, grace_s: float) -> int:
    """How long before its limit the job is asked to stop: the grace and a reserve, at most a quarter of a short limit."""
    lead = math.ceil(min(grace_s, 60000)) + 30
    limit = seconds(time) if time is not None else None
    return lead if limit is None else max(1, min(lead, limit // 4))


MOST_TASKS = 1000


def array_tasks(array: str) -> tuple[str, ...]:
    """The numbers of `0-3,7` or `3-9:3%2` (at most two at once). Raises ConfigError."""
    numbers: set[int] = set()
    for part in array.partition("%")[0].split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", part)
        first, last, step = (int(match[1]), int(match[2] or match[1]), int(match[3] or 1)) if match else (0, -1, 1)
        if last < first or step < 1 or not re.fullmatch(r"[^%]*(%[1-9][0-9]*)?", array):
            raise ConfigError(f"--array {array}: give numbers, such as 0-7, or 1,3,5, or 0-99%4 for four at once")
        numbers.update(range(first, min(last, first + step * MOST_TASKS) + 1, step))
    if len(numbers) > MOST_TASKS:
        raise ConfigError(f"--array {array}: each task is a run with a folder of its own, and there are at most {MOST_TASKS}")
    return tuple(map(str, sorted(numbers)))


_NOT_HERE = "type the command where Slurm is; --dry-run prints the job's text anywhere"


def submit(path: str) -> str:
    """Raises ConfigError in one line when Slurm refuses the job."""
    done = call(["sbatch", "--parsable", path], _NOT_HERE)
    if done.returncode == 0 and (match := re.search(r"^([0-9]+)(?:;.*)?$", done.stdout, re.MULTILINE)):
        return match[1]
    raise ConfigError(f"Slurm refuses the job: {why_refused(done.stderr, last_line(done), Path(path))}")


_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}


def state(job_id: str) -> State:
    """By scontrol, which needs no accounting and forgets a job some minutes after its end (MinJobAge)."""
    try:
        done = call(["scontrol", "-o", "show", "job", job_id], _NOT_HERE)
    except ConfigError as error:
        return State("unknown", str(error))
    match = re.search(r"\bJobState=(\S+) Reason=(.*?) Dependency=", done.stdout)
    if done.returncode != 0 or match is None:
        return State("unknown", "Slurm has forgotten it" if "Invalid job id" in done.stderr else last_line(done))
    word, reason = match.groups()
    shown = word if reason == "None" else f"{word} ({reason})"
    if word in _WAITING:
        never = cure_of_wait(reason)
        return State("waiting", shown) if never is None else State("stuck", f"{shown}: {never}")
    if word in _RUNNING:
        nodes = re.search(r"\bNodeList=(\S+)", done.stdout.replace("ReqNodeList", "").replace("ExcNodeList", ""))
        return State("running", f"{shown} on {nodes[1]}" if nodes is not None and nodes[1] != "(null)" else shown)
    if reason == "JobLaunchFailure":
        host = re.search(r"\bBatchHost=(\S+)", done.stdout)
        shown += f": {host[1] if host is not None else 'its first node'} could not begin it: it does not see the run directory "
        shown += "under that path, or may not write there; type --run-dir PATH, a folder on a file system that all nodes share"
    return State("ended", shown, _exit_status(word, re.search(r"\bExitCode=([0-9]+):([0-9]+)", done.stdout)))


def _exit_status(word: str, code: re.Match[str] | None) -> int | None:
    """128 + n for signal n. A job that Slurm ended before its script could has the status 0 and did not succeed."""
    if code is None:
        return None
    status = int(code[1]) or (128 + int(code[2]) if int(code[2]) else 0)
    return status or (0 if word == "COMPLETED" else 1)


def cancel(job_id: str) -> None:
    """The agents get TERM, and what is left after Slurm's KillWait (often 30 s) is killed. Raises ConfigError."""
    done = call(["scancel", job_id], _NOT_HERE)
    if done.returncode != 0 or "error:" in done.stderr:
        raise ConfigError(
            f"Slurm does not cancel job {job_id}: {last_line(done).removeprefix('scancel: ').removeprefix('error: ')}"
        )
