"""Models and optimizers whose tensors are divided over the ranks: by `fully_shard` or `parallelize_module` (DTensor), or by
ZeroRedundancyOptimizer.

how_divided(model)                               # "0.weight is a DTensor"; None if each rank has the whole model
state = whole(model.state_dict(), keep=True)     # collective
divide(state, like=model.state_dict())

Nothing of torch.distributed is imported here: a class that the script has not imported has no objects.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rankwise.dist import comm
from rankwise.dist.device import each_tensor

_TENSORS, _FSDP, _OPTIM = "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.optim"


def _is_of(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def is_divided(value: object) -> bool:
    """Whether it is a DTensor."""
    return _is_of(value, _TENSORS, "DTensor")


def is_partitioned(optimizer: object) -> bool:
    """Whether each rank has the state of some of the parameters, which every rank has whole."""
    return _is_of(optimizer, _OPTIM, "ZeroRedundancyOptimizer")


def is_flattened(model: object) -> bool:
    """Whether it has a module in FullyShardedDataParallel, torch's first FSDP: it hides the tensors, and each rank has other
    elements of them."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(_is_of(module, _FSDP, "FullyShardedDataParallel") for module in modules)


def how_divided(part: object) -> str | None:
    """Of a model or an optimizer, in words; None if each rank has all of it."""
    if is_flattened(part):
        return "it is in FullyShardedDataParallel"
    if isinstance(part, nn.Module):
        # fully_shard leaves whole parameters in a module after a forward pass that has no backward pass.
        sharded = tuple(name and f"{name}." for name, module in part.named_modules() if _is_of(module, _FSDP, "FSDPModule"))
        for name, tensor in itertools.chain(part.named_parameters(), part.named_buffers()):
            if is_divided(tensor) or name.startswith(sharded):
                return f"{name} is a DTensor"
    elif isinstance(part, Optimizer):
        if is_partitioned(part):
            return "it is a ZeroRedundancyOptimizer"
        for number, group in enumerate(part.param_groups):
            if any(map(is_divided, group["params"])):
                return f"a parameter of group {number} is a DTensor"
    return None


@torch.no_grad()
def whole(state: Any, keep: bool) -> Any:
    """Collective, if the state has divided tensors. The state with these tensors in one piece, in host memory. Without `keep`,
    this rank only takes part: it gets None for them, and needs no memory for more than one at a time."""

    def joined(tensor: Any) -> Any:
        if not is_divided(tensor):
            return tensor
        found = tensor.full_tensor()
        return found.cpu() if keep else None

    return each_tensor(state, joined)


def consolidated(optimizer: Any, writers: Iterable[int]) -> dict[str, Any] | None:
    """Collective. The whole state of a partitioned optimizer on the ranks of `writers`; None on the others."""
    found = None
    for writer in writers:
        optimizer.consolidate_state_dict(to=writer)
        if comm.rank() == writer:
            found = optimizer.state_dict()
    return found


def divide(state: dict[Any, Any], like: Any) -> dict[Any, Any]:
    """The state of a model, of which this rank keeps its part of the tensors that are divided in `like`."""
    return {key: _divided(value, like.get(key)) for key, value in state.items()}


def divide_of_optimizer(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The state of an optimizer: what has the shape of a parameter is divided as the parameter is."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = dict(zip(numbers, (p for group in optimizer.param_groups for p in group["params"]), strict=False))
    kept = {
        number: {key: _divided(value, parameters.get(number)) for key, value in values.items()}
        if isinstance(values, dict)
        else values
        for number, values in state["state"].items()
    }
    return {**state, "state": kept}


@torch.no_grad()
def _divided(value: Any, like: Any) -> Any:
    """A tensor of another shape is left as it is: the part itself reports it."""
    if not is_divided(like) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    tensors: Any = sys.modules[_TENSORS]
    replicas = [tensors.Replicate()] * like.device_mesh.ndim
    everywhere = tensors.DTensor.from_local(value.to(like.device), like.device_mesh, replicas, run_check=False)
    return everywhere.redistribute(placements=like.placements)  # sends nothing: each rank has the whole tensor
