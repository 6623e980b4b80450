"""The script of a job for Slurm, and how Slurm reads its values: times, arrays, other options."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankwise.errors import ConfigError
from rankwise.run.plan import Plan
from rankwise.schedulers.job import agent, cores, enter, limit_s, one_line, setup_lines, slug


def render(plan: Plan) -> str:
    """A batch script, which works in the shell of an allocation too. Raises ConfigError for options that cannot work."""
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
        # From a range of nodes Slurm gives the fewest; with as many tasks as nodes it gives as many nodes as are free now.
        _line("ntasks-per-node", "1") if plan.min_nodes == plan.nodes else _line("ntasks", str(plan.nodes)),
        *_asked(job, plan),
        _line("chdir", str(folder.parent if array else folder)),
        _line("output", output),
        _line("open-mode", "append"),
        *([] if _ends_with_the_first(plan) else ["#SBATCH --no-kill"]),
        *map(_argument, job.get("sbatch_args", ())),
        "",
        *redirection,
        *setup_lines(plan),
        enter(plan.cwd),
        *_start(plan, job, run_dir),
    ]
    return "\n".join(lines) + "\n"


def _output(folder: Path, run_dir: str, array: bool) -> tuple[str, list[str]]:
    """(--output, lines): where Slurm writes the job's output, and the lines with which the script redirects it instead.

    Slurm reads the working folder and the file name as one pattern: a `%` in the folder's name would be replaced too, and after
    a backslash nothing is replaced. For such a folder the shell opens the file.
    """
    if not set("%\\") & set(str(folder)):
        return (f"{folder.name}-%a/logs/job-%A_%a.log" if array else "logs/job-%j.log"), []
    job_id = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if array else '"$SLURM_JOB_ID"'
    return "/dev/null", [f"exec >>{run_dir}/logs/job-{job_id}.log 2>&1"]


def _asked(job: Mapping[str, Any], plan: Plan) -> list[str]:
    """The user's options for Slurm, one per line."""
    lines = []
    if (cpus := _cpus(plan)) is not None:
        lines.append(_line("cpus-per-task", str(cpus)))
    if "gpus_per_node" in job:
        # --gres works in every version, with any plugin that selects resources.
        lines.append(_line("gres", f"gpu:{job['gpus_per_node']}"))
    if "time" in job:
        limit_s(job["time"])
    for name in ("partition", "time", "nodelist", "mem", "account", "qos", "constraint", "array", "dependency"):
        if name in job:
            lines.append(_line(name, job[name]))
    if job.get("requeue"):
        lines += ["#SBATCH --requeue", _line("signal", f"USR1@{_lead_s(job.get('time'), plan.grace_s)}")]
    return lines


def _cpus(plan: Plan) -> int | None:
    """The cores to request per node: by default Slurm gives the agent one. Within an allocation, without --cpus-per-task, None:
    the agent uses all cores that the allocation has on its node."""
    return plan.job.get("cpus_per_task") if "within" in plan.job else cores(plan)


def _start(plan: Plan, job: Mapping[str, Any], run_dir: str) -> list[str]:
    """The srun command, which starts one agent per node. It repeats the number of cores, because a step does not inherit it.
    --export=ALL: otherwise sbatch --export=NONE would be inherited, and the agents would have no PATH.
    """
    several = plan.min_nodes < plan.nodes
    counts = '"$nodes"' if several else str(plan.nodes)
    words = ["srun --export=ALL", f"--nodes={counts} --ntasks={counts} --ntasks-per-node=1"]
    if (cpus := _cpus(plan)) is not None:
        words.append(f"--cpus-per-task={cpus}")
    elif "within" in job:
        words.append("$bind")
    words.append("--kill-on-bad-exit=1" if _ends_with_the_first(plan) else "--kill-on-bad-exit=0 --no-kill")
    command = f"{' '.join(words)} \\\n  {agent()} {run_dir}"
    # Slurm gave the job MIN to MAX nodes; the user's own allocation may have more.
    there = ["nodes=${SLURM_JOB_NUM_NODES:-$SLURM_NNODES}", f"nodes=$((nodes < {plan.nodes} ? nodes : {plan.nodes}))"]
    there = there if several else []
    if "$bind" in words:
        # srun would bind the agent to one core. Without an affinity plugin it binds nothing, and rejects the option.
        there.append("bind=$(scontrol show config | grep -q '^TaskPlugin .*affinity' && echo --cpu-bind=none)")
    if not job.get("requeue"):
        return [*there, f"exec {command}"]
    return [
        *there,
        command,
        "status=$?",
        "# 75: stopped and saved. Slurm kills this script as soon as it gets the request, so this comes last.",
        '[ "$status" = 75 ] && scontrol requeue "$SLURM_JOB_ID"',
        'exit "$status"',
    ]


def _ends_with_the_first(plan: Plan) -> bool:
    """Whether the first agent that fails ends the job: there are no restarts, and no node may be lost."""
    return plan.max_restarts == 0 and plan.min_nodes == plan.nodes


def _line(name: str, value: str) -> str:
    """An #SBATCH line, with the value quoted for sbatch if necessary."""
    one_line(value, f"--{name}")
    if re.fullmatch(r"[A-Za-z0-9._:@/%,=+\[\]-]+", value):
        return f"#SBATCH --{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{name}="{escaped}"'


_OF_OURS = {
    **dict.fromkeys(("array", "a"), "--array"),
    **dict.fromkeys(("nodes", "N"), "--nodes"),
    **dict.fromkeys(("ntasks", "n", "ntasks-per-node"), "--nproc"),
    **dict.fromkeys(("cpus-per-task", "c"), "--cpus-per-task"),
    **dict.fromkeys(("chdir", "D", "output", "o"), "--run-dir"),
}
"""Options of sbatch that the rest of the script must agree with, and the option of rankwise that changes both."""


def _argument(text: str) -> str:
    """The #SBATCH line of a --sbatch-arg: `--exclusive`, `--comment=a b`, `-p main`. Raises ConfigError."""
    match = re.fullmatch(r"(?:--([A-Za-z][A-Za-z-]*)(?:[= ](.*))?|-([A-Za-z])(?: ?(.+))?)", text)
    if match is None:
        raise ConfigError(f"--sbatch-arg {text!r}: give one option of sbatch, such as --sbatch-arg=--exclusive")
    long, value, short, short_value = match.groups()
    if (ours := _OF_OURS.get(long or short)) is not None:
        raise ConfigError(f"--sbatch-arg {text!r}: the job's script depends on this option; use {ours} instead")
    if long is not None:
        return _line(long, value) if value else f"#SBATCH --{long}"
    return f"#SBATCH -{short}" + (_line("x", short_value).removeprefix("#SBATCH --x=") if short_value else "")


def _lead_s(time: str | None, grace_s: float) -> int:
    """How many seconds before its limit the job is asked to stop: the grace and a reserve, but at most a quarter of the
    limit."""
    lead = math.ceil(min(grace_s, 60000)) + 30
    limit = limit_s(time) if time is not None else None
    return lead if limit is None else max(1, min(lead, limit // 4))


MOST_TASKS = 1000


def array_tasks(array: str) -> tuple[str, ...]:
    """The task numbers of `0-3,7` or `3-9:3%2` (at most two at once). Raises ConfigError."""
    numbers: set[int] = set()
    for part in array.partition("%")[0].split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", part)
        first, last, step = (int(match[1]), int(match[2] or match[1]), int(match[3] or 1)) if match else (0, -1, 1)
        if last < first or step < 1 or not re.fullmatch(r"[^%]*(%[1-9][0-9]*)?", array):
            raise ConfigError(f"--array {array}: give numbers, such as 0-7, or 1,3,5, or 0-99%4 for four at once")
        numbers.update(range(first, min(last, first + step * MOST_TASKS) + 1, step))
    if len(numbers) > MOST_TASKS:
        raise ConfigError(f"--array {array}: each task is a run with its own folder, and there are at most {MOST_TASKS}")
    return tuple(map(str, sorted(numbers)))
