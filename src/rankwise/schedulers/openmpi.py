"""Open MPI's mpirun: what it tells each rank that it starts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from rankwise.schedulers.ranks import Ranks, Tasks, address, require, tasks_of, whole_number

# _NODE_RANK is not among them: it is the local rank under another name, not the index of the node.
VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
NEEDS = "OMPI_COMM_WORLD_RANK"


def detect(env: Mapping[str, str]) -> bool:
    """True if it names a rank or a size; a part of its variables is an error that `ranks` explains."""
    return "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env


def tasks(env: Mapping[str, str]) -> Tasks | None:
    return tasks_of(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


def ranks(env: Mapping[str, str]) -> Ranks:
    """Raises WorldError for a part of the variables, a value that is no number, a rank that is not below its size."""
    require(env, VARIABLES, "Open MPI")
    rank, world_size, local_rank, local_world_size = (whole_number(env, name) for name in VARIABLES)
    # rank // local size is wrong under --map-by node and with an uneven number of slots.
    one_node = local_world_size == world_size
    master_addr, master_port, where = address(env, "Open MPI")
    origin = dict(zip(("rank", "world_size", "local_rank", "local_world_size"), VARIABLES, strict=True))
    origin["node_rank"] = "all ranks are on one node" if one_node else "Open MPI does not tell it"
    node_rank = 0 if one_node else None
    return Ranks(
        rank, world_size, local_rank, local_world_size, node_rank, master_addr, master_port, origin={**origin, **where}
    )


def start(env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
    """The job's name and a part of its random key. The name alone is 16 bits of a hash of mpirun's host and process."""
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    if job is None:
        return None
    key = env.get("OMPI_MCA_orte_precondition_transports", "")  # Open MPI 5 has none: its name holds host and process in full
    return "-".join(["openmpi", job, *([hashlib.sha256(key.encode()).hexdigest()[:12]] if key else [])])
