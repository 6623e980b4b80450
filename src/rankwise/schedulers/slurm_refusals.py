"""Why Slurm refuses a job, or will never start it, and what to type then.

why_refused(stderr, last_line, script);  cure_of_wait("PartitionTimeLimit")
"""

from __future__ import annotations

from pathlib import Path

_NODES = 'to see what the nodes have: sinfo -o "%P %D %N %c %m %G" (partition, nodes, names, cores, MB, GPUs)'

_REFUSALS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("partition name", ("partition",), "to list them: sinfo -o %P; then use --partition NAME"),
    ("configuration is not available", ("nodes", "cpus-per-task", "gres", "mem", "constraint"), f"ask for less; {_NODES}"),
    ("more processors requested", ("nodes", "cpus-per-task"), f"ask for less; {_NODES}"),
    ("generic resource", ("gres",), f"there are no such GPUs here; {_NODES}"),
    ("node name", ("nodelist",), "to list them: sinfo -N; then use --nodelist A,B"),
    ("node count specification", ("nodes", "nodelist"), "--nodes is not a number, or does not fit --nodelist"),
    ("feature specification", ("constraint",), "to list them: sinfo -o %f; then use --constraint FEATURES"),
    ("memory specification", ("mem",), f"give --mem as a number and a unit: 64G; {_NODES}"),
    ("--mem specification", ("mem",), "give --mem as a number and a unit: 64G"),
    ("array specification", ("array",), "give --array 0-7; for the highest number: scontrol show config | grep MaxArraySize"),
    ("dependency", ("dependency",), "give --dependency afterok:ID, with the number of a job"),
    (
        "accounting/qos policy", ("nodes", "time", "account", "qos"),
        "it is more than your account or quality of service allows; your jobs: squeue -u $USER; your limits: sacctmgr show "
        "associations user=$USER format=account,qos,maxsubmit,maxwall,grptres",
    ),
    ("time limit", ("time", "partition"), "to see the limits: sinfo -o '%P %l'; then use --time TIME"),
    ("account", ("account", "partition"), "yours: sacctmgr show associations user=$USER format=account; use --account NAME"),
    ("qos", ("qos",), "yours: sacctmgr show associations user=$USER format=qos; use --qos NAME"),
    ("unrecognized option", (), "correct or remove that --sbatch-arg; to list the options: sbatch --help"),
    ("invalid option", (), "correct or remove that --sbatch-arg; to list the options: sbatch --help"),
    ("contact slurm controller", (), "Slurm's server does not answer; is it up? scontrol ping"),
)  # fmt: skip
"""(a part of sbatch's message, the options of the script that it may mean, what to type); the first that matches counts."""

_NEVER = {
    "PartitionConfig": f"the partition does not have or allow that many nodes, cores or GPUs; ask for fewer; {_NODES}",
    "PartitionNodeLimit": "the partition is down, or allows fewer nodes per job; to see the limits: sinfo -o '%P %a %D %s'",
    "PartitionTimeLimit": "the partition does not allow so much time; to see the limits: sinfo -o '%P %l'",
    "BadConstraints": "no node has the features of --constraint; to list them: sinfo -o %f",
    "AccountNotAllowed": "the partition does not accept this account; give another with --account or --partition",
    "QOSNotAllowed": "the partition does not accept this quality of service; give another with --qos or --partition",
    "InvalidAccount": "there is no such account; give another with --account",
    "InvalidQOS": "there is no such quality of service; give another with --qos",
    "DependencyNeverSatisfied": "the job that --dependency waits for did not exit as --dependency requires",
}
"""Reasons why a job would wait forever, and what to do."""


def why_refused(stderr: str, last: str, script: Path) -> str:
    """The message of sbatch, the options of the script that it may mean, and what to type. `last`: the last line that it
    printed."""
    names: tuple[str, ...] = ()
    hint = ""
    for phrase, about, cure in _REFUSALS:
        if said := [line.strip() for line in stderr.splitlines() if phrase.lower() in line.lower()]:
            last, names, hint = said[-1], about, cure
            break
    for prefix in ("sbatch: ", "error: ", "Batch job submission failed: "):
        last = last.removeprefix(prefix)
    asked = " ".join(text for name in names if (text := _given(script, name)))
    return last + (f" ({asked})" if asked else "") + (f"; {hint}" if hint else "")


def cure_of_wait(reason: str) -> str | None:
    """What to do about a job that waits for this reason; None if it may still start."""
    return _NEVER.get(reason.partition(":")[0])


def _given(path: Path, name: str) -> str:
    """The line of the job's script with this option; empty if there is none."""
    lines = [text.removeprefix("#SBATCH ") for text in path.read_text(errors="replace").splitlines()]
    return next((text for text in lines if text.startswith(f"--{name}=")), "")
