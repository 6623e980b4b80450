"""The frozen Plan of one run: everything that the launcher passes to an agent, in plan.json.

rundir.write_json(run.plan, plan.record());  plan = Plan.load(run.plan)
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rankwise.errors import RunDirError


@dataclass(frozen=True)
class Host:
    """One node as the user or the scheduler names it."""

    name: str
    slots: int
    """Ranks there; 0: as many as it has devices."""


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether the script prints its arguments, and trains nothing."""
    return not {"-h", "--help"}.isdisjoint(argv[1:])


@dataclass(frozen=True)
class Plan:
    """Plain values only: it is stored as JSON. The agent does not check them again."""

    version: int
    """The version of this record: 2."""

    run_id: str
    """Unique for each call of the launcher."""

    run_dir: str
    """Absolute path."""

    argv: tuple[str, ...]
    """The script, or `-m` and a module, or a command; and its arguments."""

    interpreter: tuple[str, ...]
    """The Python that runs it, with its flags; empty for a command that is not a Python script."""

    environment: dict[str, str]
    """Variables for the ranks, in addition to the agent's environment and those of torchrun."""

    cwd: str
    """Absolute path of the folder that the script runs in."""

    name: str
    """The name of the run, as a scheduler shows it."""

    on: str
    """The name of the scheduler that starts the agents, a key of `schedulers.queues()`."""

    nodes: int
    """The number of agents to wait for: one per node (or one per task, if the scheduler starts one task per device)."""

    min_nodes: int
    """If less than `nodes`: the run may continue after losing nodes, as long as this many are left."""

    hosts: tuple[Host, ...]
    """The nodes in the order of their ranks if the user names them; empty if the scheduler chooses them."""

    node_rank: int
    """The index of this agent's node if each node is started manually; -1 if the scheduler or the head gives it."""

    nproc: int
    """Ranks on each node; 0 if each node counts its own devices, or has its own number in `hosts`."""

    threads: int
    """OMP_NUM_THREADS of each rank; 0: an equal share of the node's cores."""

    job: dict[str, Any]
    """The options for the scheduler that were given. `within`: no new job, but the allocation of this shell."""

    fork: bool
    """Fork the ranks from a warm process; otherwise each is a new process."""

    master_addr: str
    """The host of the first agent if the nodes are started manually; else empty."""

    master_port: int
    """The port of the ranks' rendezvous, or of the agents' if the nodes are started manually; 0 is a free one."""

    join_timeout_s: float
    """How long the other nodes may take to join."""

    node_wait_s: float
    """How long to wait for a node if the run may start without it."""

    max_restarts: int
    """How often all ranks are started again after a failure."""

    stop_after_s: float
    """How long after the head's start all ranks stop, after their current step; 0 is never."""

    grace_s: float
    """How long after a request to stop the ranks are killed."""

    stall_warn_s: float
    """After how long without progress to report which rank blocks the others; 0 is never."""

    check_collectives: bool
    """Compare the collectives of all ranks."""

    tee: str
    """Whose output the agent shows: `main` (rank 0), `all`, or `none`."""

    launcher_pid: int
    """The process whose end also ends the run; 0 for none."""

    fresh: bool = False
    """Whether nodes that do not see the head's folder move their part of an older run aside too."""

    checkpoint_scope: str = "main"
    """Who writes a Trainer's checkpoints: `main`, the first rank of the run, or `node`, the first rank of each node."""

    sync: str = ""
    """The strategy if the script sets none; empty for the default."""

    terminal: bool = True
    """Whether the launcher prints to a terminal. An agent cannot know: mpirun may give it a terminal whose output goes to a
    file."""

    attended: bool = False
    """Whether somebody at a terminal sees the messages of the agents, and may type Ctrl-C."""

    launcher_holds: bool = False
    """Whether the launcher holds the lease of the run directory during the run; otherwise the head takes it."""

    def record(self) -> dict[str, Any]:
        """The record in plan.json; without `sync` if it is empty, as before this setting existed."""
        record = asdict(self)
        return record if self.sync else {name: value for name, value in record.items() if name != "sync"}

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Raises RunDirError if the file is not a plan of this version."""
        try:
            record: Any = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise RunDirError(
                f"{path}: {platform.node()} cannot read this plan ({error}); every node must see the run directory "
                "under the same path; use --run-dir PATH with a folder that all nodes share"
            ) from None
        return cls.of(record, str(path))

    @classmethod
    def of(cls, record: Any, path: str) -> Plan:
        """The plan of such a record. `path`: where the record was found, for errors. Raises RunDirError."""
        known = {f.name for f in fields(cls)}
        if not isinstance(record, dict) or record.get("version") != 2 or record.keys() | {"sync"} != known:
            raise RunDirError(f"{path} was not written by this version of rankwise; start the run again")
        record["argv"] = tuple(record["argv"])
        record["interpreter"] = tuple(record["interpreter"])
        record["hosts"] = tuple(Host(**host) for host in record["hosts"])
        return cls(**record)
