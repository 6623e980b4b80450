"""Shared by the schedulers with queues: the state of a job, the parts of its script, and which values are safe in it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rankwise.errors import ConfigError
from rankwise.run.plan import Plan

_PATIENCE_S = 60.0


@dataclass(frozen=True)
class State:
    """What became of a job, as far as its scheduler still knows."""

    phase: str
    """`waiting`, `running`, `stuck` (it will never start by itself), `ended`, or `unknown`: the scheduler has forgotten it."""

    reason: str = ""
    """In the scheduler's own words; for a stuck job also what to type."""

    status: int | None = None
    """The exit status of an ended job where the scheduler kept it: 128 + n for signal n."""


def slug(name: str) -> str:
    """The name as a job may have it: ASCII letters, digits, `.`, `_` and `-`, a letter first."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}".rstrip("-")


def one_line(text: str, what: str) -> str:
    """The text itself. Raises ConfigError for a newline or another control character: it would begin a line of its own."""
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise ConfigError(f"{what} {text!r}: a job script cannot contain a newline or another control character; remove it")
    return text


_CHECK = (
    '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; '
    'exec "$@"'
)


def agent(run_dir: str = "") -> str:
    """The words that start an agent on a node, for a shell to read: a node without this Python says so, in words of ours.

    What starts processes there has its own, and some lose them: of plain srun's a twentieth never come. `run_dir` empty: it
    follows.
    """
    words = [sys.executable, "-m", "rankwise.agent", *([run_dir] if run_dir else [])]
    return f"{shlex.join(['/bin/sh', '-c', _CHECK, 'sh'])} \\\n  {shlex.join(words)}"


def enter(folder: str) -> str:
    """The line of a job's text that enters the folder of the script. The shell's own words name it where it is not there."""
    why = "does not see the script's folder; use one on a file system that all nodes share"
    return f'cd {shlex.quote(folder)} || {{ echo "rankwise: $(uname -n) {why}" >&2; exit 2; }}'


def setup_lines(plan: Plan) -> list[str]:
    """What the user asked for by --setup. Raises ConfigError for what would begin a line of its own."""
    return [one_line(line, "--setup") for line in plan.job.get("setup", ())]


def batch_script(plan: Plan, asked: Sequence[str], job_id: str, others: str, start: str) -> str:
    """The text of a job whose script becomes the head's agent, on the first of its nodes. Raises ConfigError.

    On the others this script is started once more, with the number of the node: by the words `start`, for each of `others`.
    `job_id`, `others` and `start` are for a shell to read, the last with "$node", the number, and "$host", which of `others`.
    """
    run_dir = shlex.quote(one_line(plan.run_dir, "--run-dir"))
    lines = ["#!/bin/bash", *asked, ""]
    if "within" not in plan.job:
        lines.append(f"exec >>{run_dir}/logs/job-{job_id}.log 2>&1")
    lines += [*setup_lines(plan), enter(one_line(plan.cwd, "the folder"))]
    if plan.nodes > 1:
        lines += [
            f'[ -z "$1" ] || exec {agent(plan.run_dir)} --node "$1"',
            "node=0",
            f"for host in {others}; do",
            "  node=$((node + 1))",
            f'  {start} /bin/bash {run_dir}/job.sh "$node" &',
            "done",
        ]
    return "\n".join([*lines, f"exec {agent(plan.run_dir)}"]) + "\n"


def cores(plan: Plan) -> int | None:
    """The cores of each node to ask for: --cpus-per-task, else one per rank; None where the number of ranks is unknown."""
    gpus = str(plan.job.get("gpus_per_node") or "").rpartition(":")[2]
    return int(plan.job.get("cpus_per_task") or plan.nproc or gpus or 0) or None


_LONGEST_S = 366 * 86400
_TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")


def limit_s(time: str) -> int | None:
    """A limit of time as --time takes it: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s, as Slurm. None for UNLIMITED. Raises
    ConfigError.

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


def stop_at_s(limit_s: int | None, grace_s: float) -> int:
    """How many seconds after the start of a job with this limit its ranks are asked to stop: `grace_s` before the limit, but
    not before half of it. 0 without a limit."""
    return max(limit_s - int(grace_s), limit_s // 2) if limit_s is not None else 0


def stop_before(time: str | None, grace_s: float) -> int:
    """The same for a limit as --time takes it; 0 for None."""
    return stop_at_s(limit_s(time) if time is not None else None, grace_s)


def plain(option: str, value: str, queue: str) -> str:
    """The value itself. Raises ConfigError for one that a blank or a quote would end in the job's script."""
    if not re.fullmatch(r"[A-Za-z0-9_.,:=@/+-]+", one_line(value, option)):
        raise ConfigError(f"{option} {value!r}: {queue} takes only letters, digits and `_.,:=@/+-` here")
    return value


def limited_s(time: str, queue: str) -> int:
    """A limit of time in seconds, for a queue in which "unlimited" cannot be written. Raises ConfigError."""
    limit = limit_s(time)
    if limit is None:
        raise ConfigError(f"--time {time}: {queue} has no such limit; leave --time out to get the limit of the queue")
    return limit


def call(command: Sequence[str], missing: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    """Ask a scheduler, whose answer is short. Raises ConfigError where its command does not answer, or is not there:
    `missing` says what to type then.
    """
    try:
        return subprocess.run(
            command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S
        )
    except (FileNotFoundError, PermissionError) as error:
        if cwd is not None and error.filename == cwd:
            raise ConfigError(f"{cwd}: {error.strerror}; start the run again") from None
        raise ConfigError(f"{command[0]}: {error.strerror}; {missing}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} has not answered for {_PATIENCE_S:g} s; is the scheduler's server up?") from None


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that a command printed, on either stream."""
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {done.returncode}"
