"""horovodrun when it starts the ranks itself (gloo): the variables of each rank. With MPI it starts mpirun: see openmpi.py."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

from rankwise.schedulers.counting import Counting


class Horovodrun(Counting):
    name = "horovodrun"
    called = "horovodrun"
    # Without HOROVOD_CROSS_RANK: if hosts have different numbers of ranks, it is not the index of the node.
    variables = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    needs = "HOROVOD_RANK"

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """The address where horovodrun listens for its ranks. On one host that may be 127.0.0.1, so the host's name is
        added."""
        host, port = env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), env.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
        if not host or not port:
            return None
        here = [platform.node()] if env.get("HOROVOD_SIZE") == env.get("HOROVOD_LOCAL_SIZE") else []
        return "-".join(["horovodrun", *here, host, port])
