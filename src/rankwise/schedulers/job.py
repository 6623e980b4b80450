"""What the schedulers that take jobs have in common: what became of a job, and words that are safe in its text."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rankwise.errors import ConfigError

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
        raise ConfigError(f"{what} {text!r}: a job's script cannot carry a newline or another control character; take it out")
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
    """The last thing that a command said, on either stream."""
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {done.returncode}"
