"""Synchronisation strategies: how the ranks train one model together.

Names are resolved on first use: code that only reads the name of a strategy (names.py) does not wait for torch.
"""

from typing import TYPE_CHECKING

from rankwise.host.lazy import lazy

if TYPE_CHECKING:
    from rankwise.sync.all_reduce import AllReduce as AllReduce
    from rankwise.sync.diloco import DiLoCo as DiLoCo
    from rankwise.sync.local import Local as Local
    from rankwise.sync.local_sgd import LocalSGD as LocalSGD
    from rankwise.sync.names import named as named
    from rankwise.sync.returnn import FromReturnn as FromReturnn
    from rankwise.sync.returnn import from_returnn as from_returnn
    from rankwise.sync.strategy import Held as Held
    from rankwise.sync.strategy import Mine as Mine
    from rankwise.sync.strategy import Shared as Shared
    from rankwise.sync.strategy import StepResult as StepResult
    from rankwise.sync.strategy import SyncStrategy as SyncStrategy

_HOME = {
    "rankwise.sync.all_reduce": ("AllReduce",),
    "rankwise.sync.diloco": ("DiLoCo",),
    "rankwise.sync.local": ("Local",),
    "rankwise.sync.local_sgd": ("LocalSGD",),
    "rankwise.sync.names": ("named",),
    "rankwise.sync.returnn": ("FromReturnn", "from_returnn"),
    "rankwise.sync.strategy": ("Held", "Mine", "Shared", "StepResult", "SyncStrategy"),
}

__all__ = [
    "AllReduce", "DiLoCo", "FromReturnn", "Held", "Local", "LocalSGD", "Mine", "Shared", "StepResult", "SyncStrategy",
    "from_returnn", "named",
]  # fmt: skip

__getattr__ = lazy(__name__, {name: module for module, names in _HOME.items() for name in names})
