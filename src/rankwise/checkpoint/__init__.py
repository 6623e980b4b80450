"""Save, find, verify, load and prune checkpoints: a mapping of names to objects with `state_dict`.

`Checkpoints` is resolved on first use: commands that only list and verify, on a login node, do not import torch.
"""

from typing import TYPE_CHECKING

from rankwise.host.lazy import lazy

if TYPE_CHECKING:
    from rankwise.checkpoint.store import Checkpoints as Checkpoints

__all__ = ["Checkpoints"]

__getattr__ = lazy(__name__, {"Checkpoints": "rankwise.checkpoint.store"})
