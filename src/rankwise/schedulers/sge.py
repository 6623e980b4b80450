"""Grid Engine (Son of Grid Engine and its kin): it counts hosts and slots and names no rank."""

from __future__ import annotations

from collections.abc import Mapping

from rankwise.schedulers.ranks import Ranks, not_joined, shown, single, whole_number

VARIABLES = ("PE_HOSTFILE", "JOB_SCRIPT", "NHOSTS", "NSLOTS", "SGE_TASK_ID")
NEEDS = "PE_HOSTFILE or JOB_SCRIPT=QRSH"

_CURE = "start the ranks with mpirun, which reads the job's host list: mpirun python script.py"


def detect(env: Mapping[str, str]) -> bool:
    """True in a job's script, on its first host, and in what `qrsh -inherit` started on the others."""
    return "PE_HOSTFILE" in env or env.get("JOB_SCRIPT") == "QRSH" or "SGE_TASK_ID" in env


def ranks(env: Mapping[str, str]) -> Ranks:
    """A single process. Raises NotJoinedError in a job of several hosts: Grid Engine tells no process its rank."""
    if env.get("JOB_SCRIPT") == "QRSH":
        # NSLOTS and NHOSTS are this host's here: they say 1 on the smallest part of the largest job.
        raise not_joined(
            shown(env, ("JOB_SCRIPT", "JOB_NAME", "JOB_ID")),
            "a task that qrsh started, and its rank must come from its starter",
            f"pass RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT with qrsh -v, or {_CURE}",
        )
    hosts, slots = (whole_number(env, name) if name in env else None for name in ("NHOSTS", "NSLOTS"))
    if hosts is None and "PE_HOSTFILE" in env and slots != 1:
        raise not_joined(
            f"{shown(env, ('PE_HOSTFILE', 'NSLOTS'))} but no NHOSTS",
            "a parallel job whose number of hosts is not told",
            _CURE,
        )
    if hosts is not None and hosts > 1:
        raise not_joined(
            shown(env, ("NHOSTS", "NSLOTS", "PE_HOSTFILE")),
            f"this is the job's script, on the first of its {hosts} hosts",
            _CURE,
        )
    notes = []
    if slots is not None and slots > 1:
        notes.append(f"NSLOTS={slots} slots on this host and one process; to use them all: rankwise run script.py")
    if env.get("SGE_TASK_ID", "undefined") != "undefined":
        notes.append(f"task {env['SGE_TASK_ID']} of job array {env.get('JOB_ID', '?')}: each is a world of its own")
    return single("a Grid Engine job on one host", "; ".join(notes) or None)
