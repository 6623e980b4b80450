"""What runs below the launcher, in the user's session, without a queue: the agent itself, or a launcher of agents."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping
from typing import Any

from rankwise.host import processes
from rankwise.run.plan import Plan
from rankwise.schedulers.job import State
from rankwise.schedulers.protocols import Jobs


class Foreground(Jobs):
    """A shell script that becomes the agent of this node."""

    def attached(self, env: Mapping[str, str]) -> bool:
        """Always."""
        return True

    def render(self, plan: Plan) -> str:
        command = [sys.executable, "-m", "rankwise.agent", plan.run_dir]
        return f"#!/bin/sh\ncd {shlex.quote(plan.cwd)} || exit 2\nexec {shlex.join(command)}\n"

    def submit(self, script: str, job: Mapping[str, Any]) -> str:
        return start(self, script)

    def state(self, job: Mapping[str, Any]) -> State:
        return State("ended" if processes.start_time(int(job["id"])) is None else "running")

    def cancel(self, job: Mapping[str, Any]) -> None:
        """Ask the agents to stop."""
        os.kill(int(job["id"]), self.stop_signals.get(signal.SIGTERM, signal.SIGTERM))


def start(queue: Jobs, script: str) -> str:
    """Run the text that `queue` has rendered, by the shell that its first line names; returns the id of that process. It has a
    session of its own: what the terminal sends to its foreground reaches the launcher alone."""
    return _start_bound(script) if queue.stop_signals else _start(script)


def _start(path: str) -> str:
    """For an agent. Requests to stop wait until it unblocks their signals (agent/event_loop.py)."""
    command = _command(path)
    # Not by subprocess: what it forgets it reaps behind our back, and the agent's status would be lost.
    return str(os.posix_spawn(command[0], command, os.environ, setsid=True, setsigmask=processes.STOP_SIGNALS))


def _start_bound(path: str) -> str:
    """For another starter: killed when this process ends, which an agent would see itself."""
    command, parent = _command(path), os.getpid()
    reader, writer = os.pipe()  # the exec closes it
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            processes.die_with_parent(parent)
            os.execv(command[0], command)
        finally:
            os._exit(127)
    os.close(writer)
    os.read(reader, 1)  # until then a signal would meet this program's own handlers
    os.close(reader)
    return str(pid)


def _command(path: str) -> list[str]:
    with open(path, "rb") as file:
        first = file.readline()
    return [*(first[2:].decode().split() if first.startswith(b"#!") else ["/bin/sh"]), path]
