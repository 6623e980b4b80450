"""How the ranks stay one model."""

from rankwise.sync.all_reduce import AllReduce
from rankwise.sync.local import Local
from rankwise.sync.strategy import Held, Mine, Shared, StepResult, SyncStrategy

__all__ = ["AllReduce", "Held", "Local", "Mine", "Shared", "StepResult", "SyncStrategy"]
