"""MPICH's and Intel MPI's mpirun (Hydra): the variables of each rank that it starts, and how it starts one agent per node."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

from rankwise.run.plan import Plan
from rankwise.schedulers.foreground import Foreground
from rankwise.schedulers.host_names import NamesHosts
from rankwise.schedulers.job import agent, in_foreground
from rankwise.schedulers.options import NODES
from rankwise.schedulers.protocols import Launcher
from rankwise.schedulers.ranks import (
    Ranks,
    Tasks,
    counted,
    not_joined,
    require,
    shown,
    single,
    tasks_of,
    whole_number,
    without,
)

_IDENTITY = ("PMI_", "PMI2_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "HYDI_CONTROL_FD")


class Mpich(Launcher, NamesHosts, Foreground):
    name = "mpich"
    variables = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    needs = "PMI_RANK and MPI_LOCALRANKID"
    options = (NODES, *NamesHosts.options)
    # These two signals would end mpirun and the agents; it passes SIGINT, SIGTERM and SIGUSR1 on to them. After any of these it
    # exits with 0, whatever the agents' status is: only the run directory shows how the run ended.
    stop_signals: ClassVar = {signal.SIGHUP: signal.SIGTERM, signal.SIGUSR2: signal.SIGUSR1}

    def detect(self, env: Mapping[str, str]) -> bool:
        """True if Hydra's variables are set. `srun --mpi=pmi2` sets PMI_RANK too, so inside a Slurm step a local rank is
        required."""
        if "MPI_LOCALRANKID" in env:
            return True
        return ("PMI_RANK" in env or "PMI_SIZE" in env) and "SLURM_STEP_ID" not in env

    def tasks(self, env: Mapping[str, str]) -> Tasks | None:
        return tasks_of(env, "PMI_RANK", "PMI_SIZE") if self.detect(env) else None

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Raises WorldError if only some of the variables are set, if a value is not a number, or if a rank is not below its
        size."""
        require(env, ("PMI_RANK", "PMI_SIZE"), "MPICH")
        if "MPI_LOCALRANKID" not in env and "MPI_LOCALNRANKS" not in env:
            return self._another_launcher(env)
        return counted(env, self.variables, "MPICH")

    def one_of_several(self, env: Mapping[str, str]) -> bool:
        """True under another launcher that uses PMI."""
        return "MPI_LOCALRANKID" not in env and env.get("PMI_SIZE") != "1"

    def one_per_node(self, env: Mapping[str, str]) -> bool:
        """Decided from this node only: Hydra does not give the number of nodes."""
        return env.get("MPI_LOCALNRANKS") == "1"

    def rank_env(self, env: Mapping[str, str], ranks: Ranks, per_node: str) -> Mapping[str, str]:
        """The environment without MPI's identity, which belongs to one process."""
        return without(env, _IDENTITY)

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """The address where mpirun listens for its proxies. Hydra sets no variable that identifies the job, but each proxy, the
        parent of a node's ranks, has mpirun's HOST:PORT as an argument.
        """
        for command in ancestors:
            for word, value in pairwise(command):
                if word == "--control-port":
                    return f"mpich-{value}"
        return None

    def render(self, plan: Plan) -> str:
        """A shell script that becomes mpirun, which starts one agent per node with the complete environment."""
        where = ["-hosts", ",".join(host.name for host in plan.hosts)] if plan.hosts else []
        mpirun = ["mpirun", "-np", str(plan.nodes), "-ppn", "1", *where]
        # </dev/null does not give every agent an end of file: those after the first would wait for the end of their stdin
        # forever.
        return in_foreground(plan.cwd, f"{shlex.join(mpirun)} {agent(plan.run_dir)} </dev/null")

    def _another_launcher(self, env: Mapping[str, str]) -> Ranks:
        """PMI's rank and size without a local rank: another launcher that uses PMI. Nothing shows which device this process may
        use."""
        if whole_number(env, "PMI_SIZE") == 1:
            return single("PMI_SIZE")
        raise not_joined(
            f"{shown(env, self.variables)} but no MPI_LOCALRANKID",
            "the launcher is neither MPICH nor Intel MPI, and does not give the local rank",
            "start it with mpirun, or set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each",
        )
