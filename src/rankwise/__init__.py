"""rankwise: train on all devices with a script that was written for one.

    import rankwise
    rankwise.Trainer(model, optimizer, step_fn, dataset, global_batch_size=64, max_epochs=3).fit()

Public names are resolved on first use: importing rankwise costs almost nothing, and the launcher never imports torch. After the
import, a rank remembers a request to stop until it can act on it (early.py).
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankwise.stop import early

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rankwise.actions.periodic import every as every
    from rankwise.checkpoint import Checkpoints as Checkpoints
    from rankwise.checks.trainer import selftest as selftest
    from rankwise.data import LengthBatches as LengthBatches
    from rankwise.data import Loader as Loader
    from rankwise.dist.comm import all_gather_object as all_gather_object
    from rankwise.dist.comm import all_reduce as all_reduce
    from rankwise.dist.comm import barrier as barrier
    from rankwise.dist.comm import broadcast_object as broadcast_object
    from rankwise.dist.comm import init as init
    from rankwise.dist.comm import is_main as is_main
    from rankwise.dist.comm import local_rank as local_rank
    from rankwise.dist.comm import rank as rank
    from rankwise.dist.comm import world_size as world_size
    from rankwise.dist.device import local_device as local_device
    from rankwise.dist.guards import run_on_main as run_on_main
    from rankwise.dist.guards import run_once_per_node as run_once_per_node
    from rankwise.dist.log import say as say
    from rankwise.dist.seed import seed_everything as seed_everything
    from rankwise.dist.seed import seed_rank as seed_rank
    from rankwise.errors import RankwiseError as RankwiseError
    from rankwise.errors import Stopped as Stopped
    from rankwise.evaluation import Evaluate as Evaluate
    from rankwise.evaluation import predict as predict
    from rankwise.functions.run_function import run_function as run_function
    from rankwise.hdf5 import HDF5Dataset as HDF5Dataset
    from rankwise.hdf5 import HDF5Writer as HDF5Writer
    from rankwise.stop.signal import StopSignal as StopSignal
    from rankwise.sync import AllReduce as AllReduce
    from rankwise.sync import DiLoCo as DiLoCo
    from rankwise.sync import LocalSGD as LocalSGD
    from rankwise.telemetry.meters import Meters as Meters
    from rankwise.trainer import Trainer as Trainer
    from rankwise.training.precision import Precision as Precision
    from rankwise.training.state import TrainState as TrainState

_HOME = {
    "rankwise.actions.periodic": ("every",),
    "rankwise.checkpoint": ("Checkpoints",),
    "rankwise.checks.trainer": ("selftest",),
    "rankwise.data": ("LengthBatches", "Loader"),
    "rankwise.dist.comm": (
        "all_gather_object", "all_reduce", "barrier", "broadcast_object", "init", "is_main", "local_rank", "rank", "world_size",
    ),
    "rankwise.dist.device": ("local_device",),
    "rankwise.dist.guards": ("run_on_main", "run_once_per_node"),
    "rankwise.dist.log": ("say",),
    "rankwise.dist.seed": ("seed_everything", "seed_rank"),
    "rankwise.errors": ("RankwiseError", "Stopped"),
    "rankwise.evaluation": ("Evaluate", "predict"),
    "rankwise.functions.run_function": ("run_function",),
    "rankwise.hdf5": ("HDF5Dataset", "HDF5Writer"),
    "rankwise.stop.signal": ("StopSignal",),
    "rankwise.sync": ("AllReduce", "DiLoCo", "LocalSGD"),
    "rankwise.telemetry.meters": ("Meters",),
    "rankwise.trainer": ("Trainer",),
    "rankwise.training.precision": ("Precision",),
    "rankwise.training.state": ("TrainState",),
}  # fmt: skip
_MOVED = {
    "rankwise.dist": ("World", "broadcast", "discover", "is_local_main", "local_world_size"),
    "rankwise.dist.device": ("to_device",),
    "rankwise.dist.guards": ("main_process_only", "once_per_node"),
    "rankwise.dist.log": ("get_logger", "warn", "warning_once"),
    "rankwise.functions": ("FunctionRun", "on_submitit"),
}
"""Names of earlier versions, and their new modules; for one version, they still work here with a warning."""

_PACKAGES = ("actions", "checkpoint", "data", "dist", "evaluation", "files", "functions", "hdf5", "sync")
"""Also resolved as attributes: `rankwise.actions.Log`."""

_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_MOVED_TO = {name: module for module, names in _MOVED.items() for name in names}

__all__ = sorted(_MODULE_OF)

early.listen()


if "torch" in sys.modules:  # otherwise dist/comm.py does this: before the script creates an optimizer, if possible
    from rankwise.dist.private_names import postpone_compiler

    postpone_compiler()


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value
    if name in _MOVED_TO:
        cure = f"from {_MOVED_TO[name]} import {name}"
        warnings.warn(f"rankwise.{name} has moved; write: {cure}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(_MOVED_TO[name]), name)
    if name in _PACKAGES:
        return import_module(f"rankwise.{name}")
    near = [] if name.startswith("_") else import_module("difflib").get_close_matches(name, __all__, n=1)
    raise AttributeError(f"module 'rankwise' has no attribute {name!r}" + (f"; did you mean {near[0]}?" if near else ""))


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
