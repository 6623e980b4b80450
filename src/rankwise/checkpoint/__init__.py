"""Save, find, verify, load and prune a mapping of Stateful things.

`Checkpoints` is resolved on first use: what only lists and verifies, on a login node, does not wait for torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankwise.checkpoint.store import Checkpoints as Checkpoints

__all__ = ["Checkpoints"]


def __getattr__(name: str) -> Any:
    if name == "Checkpoints":
        from rankwise.checkpoint.store import Checkpoints

        return Checkpoints
    raise AttributeError(f"module 'rankwise.checkpoint' has no attribute {name!r}")
