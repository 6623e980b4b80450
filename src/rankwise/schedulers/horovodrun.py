"""horovodrun with its own starter (gloo): what it sets for each rank. With MPI it starts mpirun, which openmpi.py reads."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

from rankwise.schedulers.protocols import Launcher
from rankwise.schedulers.ranks import Ranks, Tasks, counted, tasks_of

# HOROVOD_CROSS_RANK is not among them: on hosts of different sizes it is not the index of the node.


class Horovodrun(Launcher):
    name = "horovodrun"
    variables = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    needs = "HOROVOD_RANK"

    def detect(self, env: Mapping[str, str]) -> bool:
        """True if it names a rank or a size; a part of its variables is an error that `ranks` explains."""
        return "HOROVOD_RANK" in env or "HOROVOD_SIZE" in env

    def tasks(self, env: Mapping[str, str]) -> Tasks | None:
        return tasks_of(env, "HOROVOD_RANK", "HOROVOD_SIZE")

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Raises WorldError for a part of the variables, a value that is no number, a rank that is not below its size."""
        return counted(env, self.variables, "horovodrun")

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """Where horovodrun listens for its ranks. On one host that may be 127.0.0.1: then the host's name is needed too."""
        host, port = env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), env.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
        if not host or not port:
            return None
        here = [platform.node()] if env.get("HOROVOD_SIZE") == env.get("HOROVOD_LOCAL_SIZE") else []
        return "-".join(["horovodrun", *here, host, port])
