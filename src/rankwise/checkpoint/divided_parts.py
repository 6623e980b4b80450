"""Parts of a checkpoint whose tensors are divided over the ranks: saved whole, so that any number of ranks can load them.

parts = whole_parts(parts, writers=[0])      # collective: what to save
load(part, state)                            # a whole state into such a part
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.optim import Optimizer

from rankwise.dist import comm, divided
from rankwise.errors import ConfigError
from rankwise.training.state import Stateful


class _Whole:
    """A part that can only be saved: its state, in one piece."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


def check(name: str, part: object) -> None:
    """Raises ConfigError for a model of which no rank can save the whole."""
    if divided.is_flattened(part):
        raise ConfigError(
            f"the part {name!r} is in FullyShardedDataParallel, whose state a checkpoint cannot hold; divide the model with "
            "torch.distributed.fsdp.fully_shard(model) instead"
        )


def whole_parts(parts: Mapping[str, Stateful], writers: Collection[int], sharded: bool) -> dict[str, Any]:
    """Collective, if a part is divided. The parts, of which the divided ones have whole tensors in host memory on the ranks of
    `writers`. Raises ConfigError with `sharded`, which writes shares of tensors that each rank has."""
    found = {name: how for name, part in parts.items() if (how := divided.how_divided(part)) is not None}
    if found and sharded:
        name, how = next(iter(found.items()))
        raise ConfigError(
            f"Checkpoints(sharded=True): the part {name!r} is divided over the ranks already ({how}), and is saved whole, by "
            "the main rank; remove sharded=True"
        )
    return {name: _whole(part, writers) if name in found else part for name, part in parts.items()}


def _whole(part: Stateful, writers: Collection[int]) -> _Whole:
    state = divided.consolidated(part, writers) if divided.is_partitioned(part) else part.state_dict()
    return _Whole(divided.whole(state, keep=comm.rank() in writers))


def load(part: Stateful, state: dict[str, Any]) -> None:
    """Load the state of a checkpoint, as the part's own load_state_dict does. Not collective."""
    if divided.how_divided(part) is not None and not divided.is_partitioned(part):
        if isinstance(part, Optimizer):
            state = divided.divide_of_optimizer(state, part)
        else:
            state = divided.divide(state, part.state_dict())
    part.load_state_dict(state)
