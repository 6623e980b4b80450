"""What the schedulers with queues share: the state of a job, the parts of its script, and checks of values for it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rankwise.errors import ConfigError
from rankwise.run.plan import Plan

AGENT = (sys.executable, "-P", "-m", "rankwise.agent")
"""Starts an agent. -P: the current folder may contain a secrets.py or platform.py, which the agent must not import."""

_PATIENCE_S = 60.0


@dataclass(frozen=True)
class State:
    """The state of a job, as far as its scheduler still knows it."""

    phase: str
    """`waiting`, `running`, `stuck` (it will never start by itself), `ended`, or `unknown`: the scheduler has forgotten it."""

    reason: str = ""
    """The reason in the scheduler's own words; for a stuck job also what to type."""

    status: int | None = None
    """The exit status of an ended job, if the scheduler has kept it: 128 + n for signal n."""


def slug(name: str) -> str:
    """A valid job name made from `name`: ASCII letters, digits, `.`, `_` and `-`, beginning with a letter."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}".rstrip("-")


def one_line(text: str, what: str) -> str:
    """Returns the text. Raises ConfigError for a control character: a newline would begin another line of the script."""
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise ConfigError(f"{what} {text!r}: a job script cannot contain a newline or another control character; remove it")
    return text


SHELL = ("/bin/bash", "-p")
"""The shell before an agent. dash, the /bin/sh of Debian, drops the variables whose names are not identifiers, for example the
functions that bash exports (`module`). -p: it reads no BASH_ENV."""


_CHECK = (
    '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; '
    'exec "$@"'
)


def agent(run_dir: str = "") -> str:
    """The shell command that starts an agent on a node. A node without this Python prints a message of rankwise.

    The launcher's own message may be lost: with plain srun, one in twenty never arrives. `run_dir` empty: the caller adds it.
    """
    words = [*AGENT, *([run_dir] if run_dir else [])]
    return f"{shlex.join([*SHELL, '-c', _CHECK, 'bash'])} \\\n  {shlex.join(words)}"


def in_foreground(folder: str, command: str) -> str:
    """A script that becomes this command, which starts agents. `command`: shell code, with `agent` in it."""
    return f"#!{' '.join(SHELL)}\ncd {shlex.quote(folder)} || exit 2\nexec {command}\n"


def enter(folder: str) -> str:
    """The line of the job's script that changes to the script's folder. If that fails, the shell's error names the folder."""
    why = "does not see the script's folder; use one on a file system that all nodes share"
    return f'cd {shlex.quote(folder)} || {{ echo "rankwise: $(uname -n) {why}" >&2; exit 2; }}'


def setup_lines(plan: Plan) -> list[str]:
    """The lines of --setup. Raises ConfigError for one with a newline or another control character."""
    return [one_line(line, "--setup") for line in plan.job.get("setup", ())]


def batch_script(plan: Plan, asked: Sequence[str], job_id: str, others: str, start: str) -> str:
    """A job script that becomes the head's agent on the first node. Raises ConfigError.

    On each of the other nodes, `others`, the command `start` runs this same script with the number of the node. `job_id`,
    `others` and `start` are shell code; `start` may use "$node", the number, and "$host", the item of `others`.
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
    """The cores to request per node: --cpus-per-task, else one per rank; None if the number of ranks is unknown."""
    gpus = str(plan.job.get("gpus_per_node") or "").rpartition(":")[2]
    return int(plan.job.get("cpus_per_task") or plan.nproc or gpus or 0) or None


_LONGEST_S = 366 * 86400
_TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")


def limit_s(time: str) -> int | None:
    """The seconds of a --time: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s, as in Slurm. None for UNLIMITED. Raises ConfigError.

    Slurm itself would accept -5 as 2982611 days, and 0 as no limit.
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
    """How many seconds after the start of a job its ranks are asked to stop: `grace_s` before the limit, but not in its first
    half. 0 without a limit."""
    return max(limit_s - int(grace_s), limit_s // 2) if limit_s is not None else 0


def stop_before(time: str | None, grace_s: float) -> int:
    """The same for the value of --time; 0 for None."""
    return stop_at_s(limit_s(time) if time is not None else None, grace_s)


def plain(option: str, value: str, queue: str) -> str:
    """Returns the value. Raises ConfigError for characters, such as blanks and quotes, that would need quoting in the job's
    script."""
    if not re.fullmatch(r"[A-Za-z0-9_.,:=@/+-]+", one_line(value, option)):
        raise ConfigError(f"{option} {value!r}: {queue} takes only letters, digits and `_.,:=@/+-` here")
    return value


def limited_s(time: str, queue: str) -> int:
    """A time limit in seconds, for a queue that has no "unlimited". Raises ConfigError."""
    limit = limit_s(time)
    if limit is None:
        raise ConfigError(f"--time {time}: {queue} has no such limit; leave --time out to get the limit of the queue")
    return limit


def call(command: Sequence[str], missing: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of a scheduler. Raises ConfigError if it does not answer, or does not exist: `missing` is what to type
    then.
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
