"""This machine alone: no scheduler; one process, or an agent and its ranks started right here."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping

from rankwise import processes
from rankwise.plan import Plan
from rankwise.schedulers.ranks import Ranks, single

VARIABLES = ()
NEEDS = "nothing"


def detect(env: Mapping[str, str]) -> bool:
    """Always: what nobody else claims is a single process."""
    return True


def ranks(env: Mapping[str, str]) -> Ranks:
    return single("a single process")


def render(plan: Plan) -> str:
    """A shell script that becomes the agent of this node."""
    command = [sys.executable, "-m", "rankwise.agent", plan.run_dir]
    return f"#!/bin/sh\ncd {shlex.quote(plan.cwd)} || exit 2\nexec {shlex.join(command)}\n"


def submit(path: str) -> str:
    """Start the agent in a session of its own: what the terminal sends to its foreground reaches the launcher alone."""
    # Not by subprocess: what it forgets it reaps behind our back, and the agent's status would be lost.
    return str(os.posix_spawn("/bin/sh", ["/bin/sh", path], os.environ, setsid=True))


def state(job_id: str) -> str:
    return "ended" if processes.start_time(int(job_id)) is None else "running"


def cancel(job_id: str) -> None:
    os.kill(int(job_id), signal.SIGTERM)
