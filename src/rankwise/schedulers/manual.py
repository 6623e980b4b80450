"""Nodes that the user starts one by one, as with torchrun: the same command on each, with its node rank.

    rankwise run --nnodes 2 --node_rank 0 --nproc_per_node 4 --master_addr host1 --master_port 29500 train.py     on host1
    rankwise run --nnodes 2 --node_rank 1 --nproc_per_node 4 --master_addr host1 --master_port 29500 train.py     on host2

The agents meet at that address; the ranks' own rendezvous gets another, free port.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankwise.errors import ConfigError
from rankwise.run.plan import Plan
from rankwise.schedulers.foreground import Foreground
from rankwise.schedulers.options import GPUS, MASTER_ADDR, NODE_RANK, NODES, counts


class Manual(Foreground):
    name = "manual"
    default_port = 29500  # that of torchrun
    options = (GPUS, NODES, NODE_RANK, MASTER_ADDR)

    def claims(self, asked: Mapping[str, Any]) -> str | None:
        """Claims a run with a node rank, unless it has one node: people type torchrun's --node_rank 0 for a single machine
        too."""
        if "node_rank" not in asked or ("nodes" in asked and counts(asked["nodes"]) == (1, 1)):
            return None
        return f"{NODE_RANK.typed}: you type the command on each node"

    def check(self, job: Mapping[str, Any]) -> None:
        if "node_rank" not in job:
            raise ConfigError(
                f"--on {self.name}: {NODE_RANK.typed} K is missing, the number of this node; type the command on each node, "
                f"with {NODES.typed} N, {NODE_RANK.typed} K (from 0) and {MASTER_ADDR.typed} HOST"
            )
        rank = f"{NODE_RANK.typed} {job['node_rank']}"
        host, _, port = str(job.get("master_addr", "")).rpartition(":")
        if host and ":" not in host and port.isdecimal():
            raise ConfigError(
                f"{MASTER_ADDR.typed} {host}:{port}: give the host alone, and the port: {MASTER_ADDR.typed} {host} "
                f"--master-port {port}"
            )
        if "nodes" not in job:
            raise ConfigError(f"{rank}: the number of nodes is missing; add {NODES.typed} N, on each node")
        _, most = counts(job["nodes"])
        if not 0 <= job["node_rank"] < most:
            raise ConfigError(f"{rank}: with {NODES.typed} {job['nodes']} it must be between 0 and {most - 1}")

    def render(self, plan: Plan) -> str:
        """Raises ConfigError if the nodes have no address to meet."""
        if not plan.master_addr:
            raise ConfigError(
                f"{NODE_RANK.typed} {plan.node_rank}: the nodes need an address to connect to; add the same on each of them: "
                f"{MASTER_ADDR.typed} HOST, the host of node 0 (and --master-port PORT if {self.default_port} is in use there)"
            )
        return super().render(plan)
