"""Nodes that the user starts one by one, as torchrun is started: the same command on each, with its node rank.

    rankwise run --nnodes 2 --node_rank 0 --nproc_per_node 4 --master_addr host1 --master_port 29500 train.py     on host1
    rankwise run --nnodes 2 --node_rank 1 --nproc_per_node 4 --master_addr host1 --master_port 29500 train.py     on host2

The agents meet at that address; the ranks' own rendezvous gets a free port beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from rankwise.schedulers import local

OPTIONS = ("gpus", "nodes", "node_rank", "master_addr")

render = local.render
submit = local.submit
state = local.state
cancel = local.cancel


def attached(env: Mapping[str, str]) -> bool:
    """Always: each agent runs below its own launcher."""
    return True
