"""`srun rankwise run train.py`: several rankwise processes that another launcher starts together are one run.

started = together(os.environ);  started.tasks.index     # None if this process was started alone
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from rankwise import schedulers
from rankwise.dist.world import explain
from rankwise.errors import WorldError
from rankwise.host import processes
from rankwise.launch.scheduler_choice import Choice
from rankwise.run.config import RunConfig
from rankwise.run.directory import RunDir
from rankwise.schedulers import Jobs
from rankwise.schedulers.job import AGENT
from rankwise.schedulers.ranks import Tasks


@dataclass(frozen=True)
class Started:
    """What has started this process together with others, and which of them this one is."""

    queue: Jobs
    tasks: Tasks
    one_per_node: bool
    """Whether each process is for all devices of its node; otherwise each is one rank."""


def together(env: Mapping[str, str]) -> Started | None:
    """None if this process is alone. Raises WorldError under a launcher whose processes are ranks already (torchrun), or which
    does not tell a process its index."""
    found = explain(env)
    launcher = schedulers.launchers(env)[found.source]
    if found.error is not None and launcher.one_of_several(env):
        raise found.error
    if found.world is None or found.world.world_size == 1:
        return None
    tasks, one_per_node = launcher.tasks(env), launcher.one_per_node(env)
    if tasks is None or one_per_node is None or not isinstance(launcher, Jobs):
        raise WorldError(
            f"this is one of {found.world.world_size} processes of one job ({found.source}: "
            f"{', '.join(f'{k}={v}' for k, v in found.found.items())}), and each would start a separate run; start rankwise "
            "once, or start the script with that launcher: python script.py (for separate runs: --allow-independent)"
        )
    return Started(launcher, tasks, one_per_node)


def choice(started: Started, config: RunConfig) -> Choice:
    """The choice of the first process, which runs the head: the others find the head through the run directory."""
    return Choice(
        queue=started.queue,
        why=f"one of {started.tasks.count} that it has started",
        attached=True,
        nodes=started.tasks.count,
        min_nodes=started.tasks.count,
        hosts=(),
        node_rank=-1,
        master_addr="",
        gpus=config.job.get("gpus"),
        job={},
        joined=True,
        word="node" if started.one_per_node else "task",
    )


def follow(started: Started, run: RunDir) -> int:
    """Run any process except the first: its agent follows the head's orders. Returns 0 unless the head was lost: the first
    process returns the exit status of the run."""
    processes.become_subreaper()
    words = [*AGENT, str(run.path), "--node", str(started.tasks.index)]
    agent = os.posix_spawn(words[0], words, os.environ, setsid=True)
    for signum in processes.stop_signals():
        signal.signal(signum, lambda number, _: processes.send(agent, number))
    status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    processes.end_tree()
    return status if status >= 0 else 128 - status
