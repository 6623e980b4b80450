"""Slurm: the variables of a step's tasks, and of batch and salloc shells, which look like a task but are not; jobs for its
queue."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankwise.errors import ConfigError, WorldError
from rankwise.run.options import Option
from rankwise.run.plan import Plan
from rankwise.schedulers import slurm_text
from rankwise.schedulers.job import State, call, last_line
from rankwise.schedulers.options import ACCOUNT, CPUS_PER_TASK, GPUS_PER_NODE, MEM, NODES, REQUEUE, SETUP, TIME
from rankwise.schedulers.protocols import FROM_USER_SIGNALS, USER_SIGNALS, Jobs, Launcher
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

_MARKS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
_ASKED = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
"""If any of these is above 1, the job has several tasks. Without SLURM_TASKS_PER_NODE, which may count cores."""

# Slurm's own steps (slurm.h): ...a is the shell that salloc starts on the first node if the site sets use_interactive_step,
# ...b the batch script, ...c the step of ssh logins. They are steps of one task, but not a task of a training.
_FIRST_SPECIAL_STEP = 0xFFFFFFFA


class Slurm(Launcher, Jobs):
    name = "slurm"
    variables = (
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
    needs = "SLURM_JOB_ID"
    title = "Slurm"
    options = (
        NODES,
        GPUS_PER_NODE,
        Option("partition", "The partition in which the job waits.", metavar="NAME", spellings=("--partition", "-p")),
        TIME,
        Option("nodelist", "Nodes that the job must get.", metavar="A,B", spellings=("--nodelist", "-w")),
        CPUS_PER_TASK,
        MEM,
        ACCOUNT,
        Option("qos", "Quality of service.", metavar="NAME"),
        Option("constraint", "Features that its nodes must have.", metavar="FEATURES", spellings=("--constraint", "-C")),
        Option(
            "array", "Several runs, RUN-0 to RUN-7; each finds its number in SLURM_ARRAY_TASK_ID.", metavar="0-7",
            spellings=("--array", "-a"), site=False,
        ),
        Option(
            "dependency", "Start after other jobs.", metavar="afterok:ID", spellings=("--dependency", "-d"), site=False
        ),
        SETUP,
        Option(
            "sbatch_args", "Another option of sbatch, such as --exclusive. Repeatable.", kind=list, metavar="ARG",
            spellings=("--sbatch-arg",),
        ),
        REQUEUE,
    )  # fmt: skip
    # srun does not pass INT and TERM on (a second INT, or the first TERM, ends the step at once), but passes USR1 and
    # USR2 on to the agents.
    stop_signals, taken_as = USER_SIGNALS, FROM_USER_SIGNALS

    def detect(self, env: Mapping[str, str]) -> bool:
        """True anywhere inside a job: in a task of a step, in a batch shell, in a shell of salloc."""
        return any(name in env for name in _MARKS)

    def tasks(self, env: Mapping[str, str]) -> Tasks | None:
        """The tasks of the step. None outside of a step, and in a step of one task within a larger job, which shows nothing."""
        if not _in_step(env):
            return None
        found = tasks_of(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
        lonely = found is not None and found.count == 1 and any(env.get(name, "1") != "1" for name in _ASKED)
        return None if lonely else found

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Raises NotJoinedError in the shell of a job with several tasks, WorldError if the variables of a step contradict each
        other."""
        if not _in_step(env):
            return _shell(env)
        require(env, ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"), "srun")
        if whole_number(env, "SLURM_STEP_NUM_TASKS") == 1:
            return _one_task(env)
        return _task(env)

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """Cluster, job, step, and how often the job was requeued: a requeued job keeps its number and counts its steps from 0
        again."""
        # All parts of a heterogeneous job have the first variable in common.
        job = env.get("SLURM_HET_JOB_ID") or env.get("SLURM_JOB_ID")
        if job is None or "SLURM_STEP_ID" not in env:
            return None
        cluster, restart = env.get("SLURM_CLUSTER_NAME", "cluster"), env.get("SLURM_RESTART_COUNT", "0")
        return f"slurm-{cluster}-{job}.{env['SLURM_STEP_ID']}-{restart}"

    def one_per_node(self, env: Mapping[str, str]) -> bool:
        return all(count == 1 for count in tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", "0")))

    def array_task(self, env: Mapping[str, str]) -> str | None:
        return env.get("SLURM_ARRAY_TASK_ID")

    def rank_env(self, env: Mapping[str, str], ranks: Ranks, per_node: str) -> Mapping[str, str]:
        """The environment as if srun had started each rank as a task. The variables are changed, not removed: if SLURM_JOB_ID
        is set, which scripts need, Ignite requires them all. The PMI variables of `srun --mpi` are removed: they describe the
        agent, and MPI_Init would use them.
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

    def allocated(self, env: Mapping[str, str]) -> int | None:
        """The number of nodes of the allocation of this shell (of salloc, or a batch script); None outside of one, and in a
        step."""
        if "SLURM_JOB_ID" not in env or _in_step(env):
            return None
        name = "SLURM_JOB_NUM_NODES" if "SLURM_JOB_NUM_NODES" in env else "SLURM_NNODES"
        return max(1, whole_number(env, name)) if name in env else 1

    def attached(self, env: Mapping[str, str]) -> bool:
        """True within an allocation: srun starts the agents there, and nothing is queued."""
        return self.allocated(env) is not None

    def render(self, plan: Plan) -> str:
        """A batch script, which works in the shell of an allocation too. Raises ConfigError for options that cannot work."""
        return slurm_text.render(plan)

    def array_tasks(self, job: Mapping[str, Any]) -> tuple[str, ...]:
        return slurm_text.array_tasks(job["array"]) if "array" in job else ()

    def submit(self, script: str, job: Mapping[str, Any]) -> str:
        """Raises ConfigError, in one line, if Slurm refuses the job."""
        done = call(["sbatch", "--parsable", script], _NOT_HERE)
        if done.returncode == 0 and (match := re.search(r"^([0-9]+)(?:;.*)?$", done.stdout, re.MULTILINE)):
            return match[1]
        raise ConfigError(f"Slurm refuses the job: {why_refused(done.stderr, last_line(done), Path(script))}")

    def state(self, job: Mapping[str, Any]) -> State:
        """From scontrol, which needs no accounting and forgets a job some minutes after its end (MinJobAge)."""
        try:
            done = call(["scontrol", "-o", "show", "job", job["id"]], _NOT_HERE)
        except ConfigError as error:
            return State("unknown", str(error))
        match = re.search(r"\bJobState=(\S+) Reason=(.*?) Dependency=", done.stdout)
        if done.returncode != 0 or match is None:
            return State("unknown", "Slurm no longer knows it" if "Invalid job id" in done.stderr else last_line(done))
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
            where = host[1] if host is not None else "its first node"
            shown += (
                f": {where} could not start the job: it does not see the run directory under that path, or may not write "
                "there; use --run-dir PATH with a folder that all nodes share"
            )
        return State("ended", shown, _exit_status(word, re.search(r"\bExitCode=([0-9]+):([0-9]+)", done.stdout)))

    def cancel(self, job: Mapping[str, Any]) -> None:
        """The agents get TERM; Slurm kills what is left after its KillWait (often 30 s). Raises ConfigError."""
        done = call(["scancel", job["id"]], _NOT_HERE)
        if done.returncode != 0 or "error:" in done.stderr:
            raise ConfigError(
                f"Slurm did not cancel job {job['id']}: {last_line(done).removeprefix('scancel: ').removeprefix('error: ')}"
            )


def _in_step(env: Mapping[str, str]) -> bool:
    number = env.get("SLURM_STEP_ID")
    return number is not None and not (number.isdecimal() and int(number) >= _FIRST_SPECIAL_STEP)


def _task(env: Mapping[str, str]) -> Ranks:
    """One of several tasks of a step. Variables of sbatch (NTASKS, JOB_NODELIST) may describe the job; STEP_* describe the
    step."""
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
    """The number of tasks of this step on this node, and how it was found."""
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
                f"SLURM_STEP_TASKS_PER_NODE={text}: Slurm writes it as 3,1(x2); "
                "start the script with srun directly: srun python script.py"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _one_task(env: Mapping[str, str]) -> Ranks:
    """A step of one task, maybe within a larger job (`srun --overlap`, `srun -n1`): there are no other ranks."""
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
            f"{shown(env, ('SLURM_PROCID', 'SLURM_STEP_NUM_TASKS'))}: a rank must be between 0 and world_size - 1; "
            "start the script with srun directly: srun python script.py"
        )
    notes = [f"a step of one task in a job with {several}: it trains alone"] if several else []
    return single("SLURM_STEP_NUM_TASKS=1", "; ".join([*notes, *filter(None, [_array(env)])]) or None)


def _shell(env: Mapping[str, str]) -> Ranks:
    """A batch shell or one of salloc: its variables, such as SLURM_PROCID=0, make it look like rank 0."""
    several = _several(env)
    if not several:
        return single("a Slurm job of one task", _array(env))
    cure = "put srun before the command: srun python script.py"
    here = "; or use this node alone: rankwise run script.py"
    if "SLURM_STEP_ID" in env:
        found, shell = f"SLURM_STEP_ID={env['SLURM_STEP_ID']} (Slurm's own)", "the shell of the job itself"
    elif "SLURM_PROCID" in env:
        found, shell = f"SLURM_PROCID={env['SLURM_PROCID']}, no SLURM_STEP_ID", "the batch shell"
    else:  # the host where the user typed salloc, which is not in the job
        found, shell, here = "no SLURM_PROCID and no SLURM_STEP_ID", "salloc's shell", ""
    where = f" on {env['SLURMD_NODENAME']}" if "SLURMD_NODENAME" in env else ""
    raise not_joined(f"{several}, {found}", f"this is {shell}{where}, not a task of a step", cure + here)


def _several(env: Mapping[str, str]) -> str:
    """The variables which show that the job has several tasks or nodes; empty if it has one."""
    return shown(env, [name for name in _ASKED if name in env and whole_number(env, name) > 1])


def _array(env: Mapping[str, str]) -> str | None:
    """A note for a task of a job array: such tasks are separate jobs, which share neither a job id nor a world."""
    if "SLURM_ARRAY_TASK_ID" not in env:
        return None
    return f"task {env['SLURM_ARRAY_TASK_ID']} of job array {env.get('SLURM_ARRAY_JOB_ID', '?')}: each task trains on its own"


# --- a job for its queue


_NOT_HERE = "type the command on a machine that has Slurm; --dry-run prints the job script on any machine"


_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}


def _exit_status(word: str, code: re.Match[str] | None) -> int | None:
    """128 + n for signal n. If Slurm ended a job before its script exited, the exit code is 0: this returns 1."""
    if code is None:
        return None
    status = int(code[1]) or (128 + int(code[2]) if int(code[2]) else 0)
    return status or (0 if word == "COMPLETED" else 1)
