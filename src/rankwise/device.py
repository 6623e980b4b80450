"""This rank's device, and batches on it.

device = local_device(world);  batch = to_device(batch, device)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rankwise.errors import WorldError
from rankwise.world import World, ranks_of_one_agent


def local_device(world: World) -> torch.device:
    """The GPU of this rank, or the CPU where there is none. A rank that sees one GPU alone takes that one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = 0 if count == 1 else world.local_rank
    if index >= count or (count == 1 and ranks_of_one_agent(world) > 1):
        raise WorldError(
            f"{world.local_world_size} ranks on this node but {count} visible GPUs; type --nproc {count}, "
            "or hide the GPUs from a run on the CPU: CUDA_VISIBLE_DEVICES= rankwise run ..."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def to_device(batch: Any, device: torch.device) -> Any:
    """The same nest of tuples, lists and mappings with every tensor on `device`; what is there already is not copied."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
