"""How the ranks stay one model."""

from rankwise.sync.all_reduce import AllReduce
from rankwise.sync.strategy import StepResult, SyncStrategy

__all__ = ["AllReduce", "StepResult", "SyncStrategy"]
