"""What a rank knows about itself, and how many ranks it has connected to, for truth.py in tests/."""

import json
import os
import platform
from pathlib import Path

import torch
import torch.distributed as dist


def say(rank, local_rank, node_rank, world_size):
    met = torch.ones(1)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(met)
    record = {
        "host": platform.node(), "rank": rank, "local_rank": local_rank, "node_rank": node_rank, "world_size": world_size,
        "met": int(met.item()),
    }  # fmt: skip
    Path(__file__).with_name("said").joinpath(f"{platform.node()}-{os.getpid()}").write_text(json.dumps(record))
