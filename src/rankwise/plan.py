"""The frozen Plan of one run: all that a launcher tells an agent, in plan.json.

rundir.write_json(run.plan, plan.record());  plan = Plan.load(run.plan)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rankwise.errors import RunDirError


@dataclass(frozen=True)
class Plan:
    """Plain values only: it is JSON on disk, and the agent believes every word."""

    version: int
    """Of this record: 1."""

    run_id: str
    """Unique for each call of the launcher."""

    run_dir: str
    """Absolute path."""

    argv: tuple[str, ...]
    """The script, or `-m` and a module, or a command; and its arguments."""

    interpreter: tuple[str, ...]
    """The Python that runs it, with its flags; empty for a command that is no Python script."""

    environment: dict[str, str]
    """What ranks find in their environment beside the agent's own and torchrun's."""

    cwd: str
    """Absolute path of the folder that the script runs in."""

    nproc: int
    """Ranks on this node."""

    threads: int
    """OMP_NUM_THREADS of each rank."""

    fork: bool
    """Fork the ranks from a warm process; otherwise each is started by itself."""

    master_port: int
    """Of the ranks' rendezvous; 0 is one that is free."""

    max_restarts: int
    """How often all ranks are started again after a failure."""

    grace_s: float
    """From a request to stop until the ranks are killed."""

    stall_warn_s: float
    """After how long without any progress it is told which rank keeps the others waiting; 0 is never."""

    check_collectives: bool
    """Compare what the ranks ask of each other."""

    tee: str
    """Whose output the agent shows on its own: `main` (rank 0), `all`, or `none`."""

    launcher_pid: int
    """The process whose end also ends the run; 0 for none."""

    def record(self) -> dict[str, Any]:
        """As it goes into plan.json."""
        return asdict(self)

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Raises RunDirError when the file is not a plan of this version."""
        try:
            record: Any = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise RunDirError(f"{path}: no plan can be read there ({error})") from None
        if not isinstance(record, dict) or record.get("version") != 1 or record.keys() != {f.name for f in fields(cls)}:
            raise RunDirError(f"{path} was not written by this version of rankwise; start the run again")
        record["argv"] = tuple(record["argv"])
        record["interpreter"] = tuple(record["interpreter"])
        return cls(**record)
