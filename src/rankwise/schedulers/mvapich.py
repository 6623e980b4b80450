"""MVAPICH2's mpirun_rsh: what it sets for each rank. Its mpirun is Hydra, which mpich.py reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankwise.schedulers.protocols import Launcher
from rankwise.schedulers.ranks import Ranks, Tasks, counted, tasks_of


class Mvapich(Launcher):
    name = "mvapich"
    variables = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE")
    needs = "MV2_COMM_WORLD_RANK"

    def detect(self, env: Mapping[str, str]) -> bool:
        """True if it names a rank or a size, and Hydra has not set its own variables, which say the same."""
        return ("MV2_COMM_WORLD_RANK" in env or "MV2_COMM_WORLD_SIZE" in env) and "MPI_LOCALRANKID" not in env

    def tasks(self, env: Mapping[str, str]) -> Tasks | None:
        return tasks_of(env, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE") if self.detect(env) else None

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Raises WorldError for a part of the variables, a value that is no number, a rank that is not below its size."""
        return counted(env, self.variables, "mpirun_rsh")

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """The host and the process of mpirun_rsh, as it tells its daemons, above the ranks of each node."""
        host, process = env.get("MPISPAWN_MPIRUN_HOST"), env.get("MPISPAWN_MPIRUN_ID")
        return f"mvapich-{host}-{process}" if host and process else None
