"""Runs below `rankwise run`, without a queue: the agent itself, or a launcher of agents (mpirun, srun)."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankwise.host import processes
from rankwise.run.plan import Plan
from rankwise.schedulers.job import AGENT, State
from rankwise.schedulers.protocols import Jobs


class Foreground(Jobs):
    """The agent of this node. job.sh shows how it is started; a shell does not read it."""

    def attached(self, env: Mapping[str, str]) -> bool:
        """Always."""
        return True

    def render(self, plan: Plan) -> str:
        return _only_starts(plan.cwd, [*AGENT, plan.run_dir])

    def submit(self, script: str, job: Mapping[str, Any]) -> str:
        return start(self, script)

    def state(self, job: Mapping[str, Any]) -> State:
        return State("ended" if processes.start_time(int(job["id"])) is None else "running")

    def cancel(self, job: Mapping[str, Any]) -> None:
        """Ask the agents to stop."""
        os.kill(int(job["id"]), self.stop_signals.get(signal.SIGTERM, signal.SIGTERM))


def _only_starts(folder: str, command: Sequence[str]) -> str:
    """The text that starts `command` in `folder`, and does nothing else."""
    return f"#!/bin/sh\ncd {shlex.quote(folder)} || exit 2\nexec {shlex.join(command)}\n"


def start(queue: Jobs, script: str) -> str:
    """Run the script that `queue` has rendered; returns the process id. The process has its own session: a signal from the
    terminal (Ctrl-C) reaches only the launcher."""
    return _start_bound(script) if queue.stop_signals else _start(script)


def _start(path: str) -> str:
    """Start a script that becomes an agent. Stop signals are blocked until the agent unblocks them (agent/event_loop.py)."""
    command = _command(path)
    # Not with subprocess: it may reap the agent itself once the Popen object is gone, and we would lose the status.
    return str(os.posix_spawn(command[0], command, os.environ, setsid=True, setsigmask=processes.STOP_SIGNALS))


def _start_bound(path: str) -> str:
    """Start a script that becomes another launcher: the kernel kills it when this process ends (an agent would notice that
    itself)."""
    command, parent = _command(path), os.getpid()
    reader, writer = os.pipe()  # exec closes the writing end
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            processes.die_with_parent(parent)
            os.execv(command[0], command)
        finally:
            os._exit(127)
    os.close(writer)
    os.read(reader, 1)  # wait for the exec: until then the child has the signal handlers of this program
    os.close(reader)
    return str(pid)


def _command(path: str) -> list[str]:
    """The script, with the shell that its first line names; or the agent itself if the script only starts one, in this folder.

    A shell would change the environment: `cd` sets PWD, and dash, the /bin/sh of Debian, drops the variables whose names are
    not identifiers, for example the functions that bash exports (`module`).
    """
    text = Path(path).read_text("utf-8", "surrogateescape")
    with contextlib.suppress(ValueError, OSError):
        words = shlex.split(text.partition("\n")[2])
        if text == _only_starts(os.getcwd(), words[6:]):
            os.fsencode("".join(words))  # an error in a locale that does not have these letters: the shell takes the bytes
            return words[6:]
    first = text.partition("\n")[0]
    return [*(first[2:].split() if first.startswith("#!") else ["/bin/sh"]), path]
