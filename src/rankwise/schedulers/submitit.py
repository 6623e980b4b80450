"""Submitit: the variables of its local executor, which starts the tasks itself, and the folder of its jobs.

With its Slurm executor, srun starts the tasks: see slurm.py.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankwise.schedulers.protocols import Launcher
from rankwise.schedulers.ranks import Ranks, Tasks, address, require, tasks_of, whole_number


class Submitit(Launcher):
    name = "submitit"
    variables = (
        "SUBMITIT_EXECUTOR",
        "SUBMITIT_LOCAL_JOB_ID",
        "SUBMITIT_LOCAL_GLOBALID",
        "SUBMITIT_LOCAL_NTASKS",
        "SUBMITIT_LOCAL_LOCALID",
    )
    needs = "SUBMITIT_EXECUTOR=local and SUBMITIT_LOCAL_GLOBALID"

    def detect(self, env: Mapping[str, str]) -> bool:
        """True in a task of the local executor. A Slurm job that such a task submits inherits the variables, but its executor
        is `slurm`."""
        return env.get("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_GLOBALID" in env

    def tasks(self, env: Mapping[str, str]) -> Tasks | None:
        return tasks_of(env, "SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS") if self.detect(env) else None

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Raises WorldError if only some of the variables are set, or a value is not a number. All tasks are on this host."""
        require(env, self.variables, "Submitit's local executor")
        names = ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_LOCALID", "SUBMITIT_LOCAL_NTASKS")
        rank, world_size, local_rank, local_world_size = (whole_number(env, name) for name in names)
        master_addr, master_port, where = address(env, "Submitit")
        origin = dict(zip(("rank", "world_size", "local_rank", "local_world_size"), names, strict=True))
        origin |= {"node_rank": "its local executor has one node", **where}
        return Ranks(rank, world_size, local_rank, local_world_size, 0, master_addr, master_port, origin=origin)

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """Host and job; the job's number is the process id of its controller. When a job starts again, its earlier tasks are
        gone."""
        return f"submitit-{platform.node()}-{env['SUBMITIT_LOCAL_JOB_ID']}"

    def job_folder(self, env: Mapping[str, str]) -> Path | None:
        """A folder of the job, with any executor, the same in each of its starts; None outside of such a job."""
        folder = env.get("SUBMITIT_FOLDER")
        array = env.get("SLURM_ARRAY_JOB_ID")
        job = {
            "local": env.get("SUBMITIT_LOCAL_JOB_ID"),
            "slurm": f"{array}_{env.get('SLURM_ARRAY_TASK_ID')}" if array else env.get("SLURM_JOB_ID"),
        }.get(env.get("SUBMITIT_EXECUTOR", ""))
        return Path(folder) / f"{job}_run" if folder and job else None
