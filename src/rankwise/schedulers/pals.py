"""mpiexec and aprun of HPE's PALS (Cray EX): the variables that they set for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankwise.schedulers.protocols import Launcher
from rankwise.schedulers.ranks import Ranks, Tasks, address, not_joined, require, shown, tasks_of, whole_number


class Pals(Launcher):
    name = "pals"
    variables = (
        "PALS_RANKID",
        "PMI_SIZE",
        "PALS_LOCAL_RANKID",
        "PALS_LOCAL_SIZE",
        "PMI_LOCAL_SIZE",
        "PALS_NODEID",
        "PALS_APID",
    )
    needs = "PALS_RANKID"

    def detect(self, env: Mapping[str, str]) -> bool:
        return "PALS_RANKID" in env

    def tasks(self, env: Mapping[str, str]) -> Tasks | None:
        return tasks_of(env, "PALS_RANKID", "PMI_SIZE") if self.detect(env) else None

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Raises NotJoinedError if the number of ranks is not given, WorldError if other variables are missing."""
        if "PMI_SIZE" not in env:
            raise not_joined(
                f"{shown(env, self.variables)} but no PMI_SIZE",
                "this is one of several ranks of PALS, and PALS does not say how many there are",
                "set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each",
            )
        local_size = "PMI_LOCAL_SIZE" if "PALS_LOCAL_SIZE" not in env and "PMI_LOCAL_SIZE" in env else "PALS_LOCAL_SIZE"
        names = ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", local_size, "PALS_NODEID")
        require(env, names, "PALS")
        rank, world_size, local_rank, local_world_size, node_rank = (whole_number(env, name) for name in names)
        master_addr, master_port, where = address(env, "PALS")
        origin = dict(zip(("rank", "world_size", "local_rank", "local_world_size", "node_rank"), names, strict=True))
        return Ranks(
            rank, world_size, local_rank, local_world_size, node_rank, master_addr, master_port, origin={**origin, **where}
        )

    def one_of_several(self, env: Mapping[str, str]) -> bool:
        return "PMI_SIZE" not in env

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """The identifier that PALS gives each application that it starts."""
        return f"pals-{env['PALS_APID']}" if env.get("PALS_APID") else None
