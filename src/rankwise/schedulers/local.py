"""Only this machine, no scheduler: one process, or an agent and its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rankwise.schedulers.foreground import Foreground
from rankwise.schedulers.options import GPUS
from rankwise.schedulers.protocols import Launcher
from rankwise.schedulers.ranks import Ranks, single


class ThisMachine(Launcher, Foreground):
    name = "local"
    options = (GPUS,)
    this_machine = True
    cures: ClassVar = {
        "nodes": "nothing says where the other nodes are; type -H HOST1,HOST2 to reach them over ssh, --on slurm to queue a "
        "job, or type the command on each node, with --node-rank (0, 1, ...) and --master-addr HOST1"
    }

    def detect(self, env: Mapping[str, str]) -> bool:
        """Always: a process that no other launcher claims is a single process."""
        return True

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        return single("a single process")
