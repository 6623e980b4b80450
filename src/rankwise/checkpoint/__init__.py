"""Save, find, verify, load and prune a mapping of Stateful things.

`Checkpoints` is resolved on first use: what only lists and verifies, on a login node, does not wait for torch.
"""

from typing import TYPE_CHECKING

from rankwise.host.lazy import lazy

if TYPE_CHECKING:
    from rankwise.checkpoint.store import Checkpoints as Checkpoints

__all__ = ["Checkpoints"]

__getattr__ = lazy(__name__, {"Checkpoints": "rankwise.checkpoint.store"})
