"""How the ranks stay one model."""

from rankwise.sync.all_reduce import AllReduce
from rankwise.sync.diloco import DiLoCo
from rankwise.sync.local import Local
from rankwise.sync.local_sgd import LocalSGD
from rankwise.sync.strategy import Held, Mine, Shared, StepResult, SyncStrategy

__all__ = ["AllReduce", "DiLoCo", "Held", "Local", "LocalSGD", "Mine", "Shared", "StepResult", "SyncStrategy"]
