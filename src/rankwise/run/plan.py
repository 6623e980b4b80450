"""The frozen Plan of one run: all that a launcher tells an agent, in plan.json.

rundir.write_json(run.plan, plan.record());  plan = Plan.load(run.plan)
"""

from __future__ import annotations

import json
import platform
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


@dataclass(frozen=True)
class Plan:
    """Plain values only: it is JSON on disk, and the agent believes every word."""

    version: int
    """Of this record: 2."""

    run_id: str
    """Unique for each call of the launcher."""

    run_dir: str
    """Absolute path."""

    argv: tuple[str, ...]
    """The script, or `-m` and a module, or a command; and its arguments."""

    interpreter: tuple[str, ...]
    """The Python that runs it, with its flags; empty for a command that is not a Python script."""

    environment: dict[str, str]
    """What ranks find in their environment beside the agent's own and torchrun's."""

    cwd: str
    """Absolute path of the folder that the script runs in."""

    name: str
    """Of the run; what a scheduler shows."""

    on: str
    """The scheduler that starts the agents, one of `schedulers.BY_NAME`."""

    nodes: int
    """Agents to wait for, one per node (or one per task, if the scheduler starts one task per device)."""

    min_nodes: int
    """Fewer than `nodes`: a lost node may be done without down to so many."""

    hosts: tuple[Host, ...]
    """The nodes in the order of their ranks where the user names them; empty where the scheduler chooses them."""

    node_rank: int
    """Which of the nodes this agent is if each is started manually; -1 if the scheduler or the head says it."""

    nproc: int
    """Ranks on each node; 0 where each node counts its own devices, or has its own number in `hosts`."""

    threads: int
    """OMP_NUM_THREADS of each rank; 0: the cores of the node shared among its ranks."""

    job: dict[str, Any]
    """What the scheduler was asked for, by the names of RunConfig; nothing that is None. `within`: not a new job, but the
    allocation of this shell."""

    fork: bool
    """Fork the ranks from a warm process; otherwise each is started by itself."""

    master_addr: str
    """The host of the first agent if the nodes are started manually; else empty."""

    master_port: int
    """Of the ranks' rendezvous, or of the agents' if the nodes are started manually; 0 is a free one."""

    join_timeout_s: float
    """How long the other nodes may take to come."""

    node_wait_s: float
    """How long to wait for a node if the run may start without it."""

    max_restarts: int
    """How often all ranks are started again after a failure."""

    stop_after_s: float
    """All ranks stop after the step that they are in when the head has lived so long; 0 is never."""

    grace_s: float
    """From a request to stop until the ranks are killed."""

    stall_warn_s: float
    """After how long without progress to report which rank blocks the others; 0 is never."""

    check_collectives: bool
    """Compare what the ranks ask of each other."""

    tee: str
    """Whose output the agent shows on its own: `main` (rank 0), `all`, or `none`."""

    launcher_pid: int
    """The process whose end also ends the run; 0 for none."""

    fresh: bool = False
    """Nodes that do not see the head's folder move an older run of theirs aside too."""

    checkpoint_scope: str = "main"
    """Whose first rank writes a Trainer's checkpoints: `main`, that of the run, or `node`, that of each node."""

    sync: str = ""
    """The strategy of a script that names none; empty for the usual one."""

    terminal: bool = True
    """Whether the launcher prints to a terminal: an agent may find one that mpirun made, and that leads to a file."""

    attended: bool = False
    """Whether somebody at a terminal sees what the agents say, and may type Ctrl-C."""

    launcher_holds: bool = False
    """The launcher has the right to write in the run directory as long as the run lasts; otherwise the head takes it."""

    def record(self) -> dict[str, Any]:
        """As it goes into plan.json: without `sync` if there is none, as it was before there was any."""
        record = asdict(self)
        return record if self.sync else {name: value for name, value in record.items() if name != "sync"}

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Raises RunDirError when the file is not a plan of this version."""
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
        """From what `record()` gave; `path` is where it was found. Raises RunDirError."""
        known = {f.name for f in fields(cls)}
        if not isinstance(record, dict) or record.get("version") != 2 or record.keys() | {"sync"} != known:
            raise RunDirError(f"{path} was not written by this version of rankwise; start the run again")
        record["argv"] = tuple(record["argv"])
        record["interpreter"] = tuple(record["interpreter"])
        record["hosts"] = tuple(Host(**host) for host in record["hosts"])
        return cls(**record)
