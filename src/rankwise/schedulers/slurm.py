"""Slurm: what the tasks of a step are told, and how a batch or salloc shell, which is none, looks like one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rankwise.errors import WorldError
from rankwise.schedulers.ranks import Ranks, Tasks, address, not_joined, require, shown, single, tasks_of, whole_number

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
