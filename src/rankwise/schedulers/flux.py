"""Flux (`flux run`): the variables that it sets for each task of a job. It sets none in a batch script, which is not a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankwise.schedulers.protocols import Launcher
from rankwise.schedulers.ranks import Ranks, Tasks, address, not_joined, require, shown, tasks_of, whole_number


class Flux(Launcher):
    name = "flux"
    variables = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES", "FLUX_JOB_ID_PATH")
    needs = "FLUX_TASK_RANK"

    def detect(self, env: Mapping[str, str]) -> bool:
        return "FLUX_TASK_RANK" in env

    def tasks(self, env: Mapping[str, str]) -> Tasks | None:
        return tasks_of(env, "FLUX_TASK_RANK", "FLUX_JOB_SIZE")

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Raises NotJoinedError if the tasks of a node cannot be counted, WorldError if only some of the variables are set."""
        names = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
        require(env, names, "Flux")
        rank, world_size, local_rank, nodes = (whole_number(env, name) for name in names)
        if nodes < 1 or world_size % nodes:
            raise not_joined(
                shown(env, self.variables),
                "the nodes have different numbers of tasks, and Flux does not say how many this one has",
                "start the same number on each: flux run -N NODES --tasks-per-node=N python script.py",
            )
        master_addr, master_port, where = address(env, "Flux")
        return Ranks(
            rank,
            world_size,
            local_rank,
            world_size // nodes,
            0 if nodes == 1 else None,
            master_addr,
            master_port,
            origin={
                "rank": "FLUX_TASK_RANK",
                "world_size": "FLUX_JOB_SIZE",
                "local_rank": "FLUX_TASK_LOCAL_ID",
                "local_world_size": "FLUX_JOB_SIZE" if nodes == 1 else "FLUX_JOB_SIZE / FLUX_JOB_NNODES",
                "node_rank": "all ranks are on one node" if nodes == 1 else "Flux does not say",
                **where,
            },
        )

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """The job's path among the instances of Flux, and the Slurm job in which the outermost instance runs, if any."""
        job = env.get("FLUX_JOB_ID_PATH") or env.get("FLUX_JOB_ID")
        return "-".join(["flux", *([env["SLURM_JOB_ID"]] if "SLURM_JOB_ID" in env else []), job]) if job else None
