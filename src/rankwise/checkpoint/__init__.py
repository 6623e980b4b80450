"""Save, find, verify, load and prune a mapping of Stateful things."""

from rankwise.checkpoint.store import Checkpoints

__all__ = ["Checkpoints"]
