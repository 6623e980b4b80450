"""Open MPI's mpirun: the variables of each rank that it starts, and how it starts one agent per node."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rankwise.errors import ConfigError
from rankwise.run.plan import Plan
from rankwise.schedulers.counting import Counting
from rankwise.schedulers.foreground import Foreground
from rankwise.schedulers.host_names import NamesHosts
from rankwise.schedulers.job import agent, in_foreground
from rankwise.schedulers.options import NODES
from rankwise.schedulers.protocols import FROM_USER_SIGNALS, USER_SIGNALS
from rankwise.schedulers.ranks import Ranks, without

# Variables from which MPI_Init learns which process it is. Other OMPI_MCA_* variables are settings of the user.
_IDENTITY = (
    "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_SIZE", "OMPI_APP_CTX_NUM_PROCS", "OMPI_NUM_APP_CTX", "OMPI_FIRST_RANKS",
    "OMPI_COMMAND", "OMPI_ARGV", "OMPI_FILE_LOCATION", "OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix",
    "OMPI_MCA_initial_wdir", "PMIX_",
)  # fmt: skip

_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


class OpenMpi(Counting, NamesHosts, Foreground):
    name = "openmpi"
    called = "Open MPI"
    # Without _NODE_RANK: it is another name for the local rank, not the index of the node.
    variables = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    needs = "OMPI_COMM_WORLD_RANK"
    when_bound = (
        "Open MPI has bound each rank and its loader workers to one core, as it does with -np 1 and 2; "
        "with mpirun --bind-to none they use all {cores}"
    )
    options = (NODES, *NamesHosts.options)
    # mpirun kills the agents within two seconds of a SIGTERM, SIGINT or SIGHUP to it, and passes SIGUSR1 and SIGUSR2 on.
    stop_signals, taken_as = USER_SIGNALS, FROM_USER_SIGNALS

    def one_per_node(self, env: Mapping[str, str]) -> bool:
        return env.get("OMPI_MCA_orte_num_nodes") == env.get("OMPI_COMM_WORLD_SIZE")

    def rank_env(self, env: Mapping[str, str], ranks: Ranks, per_node: str) -> Mapping[str, str]:
        """The environment without MPI's identity, which belongs to one process: several ranks that call MPI_Init with the same
        one hang."""
        return without(env, _IDENTITY)

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """The job's name and a hash of its random key: the name is only 16 bits of a hash of mpirun's host and process."""
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
        if job is None:
            return None
        # Open MPI 5 has no key: the job's name contains host and process in full.
        key = env.get("OMPI_MCA_orte_precondition_transports", "")
        return "-".join(["openmpi", job, *([hashlib.sha256(key.encode()).hexdigest()[:12]] if key else [])])

    def render(self, plan: Plan) -> str:
        """A shell script that becomes mpirun, which starts one agent per node. It binds no cores: the agents divide them among
        their ranks."""
        where = ["-H", ",".join(host.name for host in plan.hosts)] if plan.hosts else []
        mpirun = ["mpirun", "-np", str(plan.nodes), "--map-by", "ppr:1:node", "--bind-to", "none", *where]
        # mpirun passes PATH on by itself. -x passes the variables that a Python may need to start and to find rankwise, only if
        # they are set: otherwise mpirun warns.
        export = " ".join(f"${{{name}:+-x {name}}}" for name in ("PYTHONPATH", "LD_LIBRARY_PATH"))
        return in_foreground(plan.cwd, f"{shlex.join(mpirun)} \\\n  {export} \\\n  {agent(plan.run_dir)} </dev/null")

    def submit(self, script: str, job: Mapping[str, Any]) -> str:
        """Raises ConfigError for root: Open MPI refuses to run as root unless two variables are set."""
        refuse_root(os.environ, os.geteuid())
        return super().submit(script, job)


def refuse_root(env: Mapping[str, str], uid: int) -> None:
    """Raises ConfigError if mpirun would refuse to run as this user."""
    if uid == 0 and any(env.get(name) != "1" for name in _ROOT):
        raise ConfigError(
            "Open MPI does not run as root unless two variables are set; use another user, or put before the command: "
            + " ".join(f"{name}=1" for name in _ROOT)
        )
