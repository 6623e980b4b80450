"""MVAPICH2's mpirun_rsh: the variables that it sets for each rank. MVAPICH2's mpirun is Hydra: see mpich.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankwise.schedulers.counting import Counting


class Mvapich(Counting):
    name = "mvapich"
    called = "mpirun_rsh"
    variables = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE")
    needs = "MV2_COMM_WORLD_RANK"

    def detect(self, env: Mapping[str, str]) -> bool:
        """True if a rank or a size is set, and Hydra's own variables, which have the same values, are not."""
        return super().detect(env) and "MPI_LOCALRANKID" not in env

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """The host and process id of mpirun_rsh, which its daemons pass on to the ranks."""
        host, process = env.get("MPISPAWN_MPIRUN_HOST"), env.get("MPISPAWN_MPIRUN_ID")
        return f"mvapich-{host}-{process}" if host and process else None
