"""Translates RETURNN's settings for several devices, which include Horovod's, into those of rankwise.

sync, lr_factor, notes = from_returnn({"use_horovod": True, "horovod_reduce_type": "param", "horovod_param_sync_step": 100})
sync, lr_factor, notes = from_returnn({"torch_distributed": {"reduce_type": "param", "param_sync_step": 100}})

RETURNN: docs/advanced/multi_gpu, returnn/tf/horovod.py, returnn/tf/updater.py, returnn/torch/distributed.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from rankwise.dist import comm
from rankwise.errors import ConfigError
from rankwise.host.arguments import ABOVE_ZERO, FROM_ONE, MAPPING, Argument, one_of, takes
from rankwise.sync.all_reduce import AllReduce
from rankwise.sync.local_sgd import LocalSGD
from rankwise.sync.strategy import SyncStrategy

_SWITCH = Argument(lambda value: value in (True, False), "True or False")
_ANY = Argument(lambda value: True, "")
_HOROVOD = {
    "use_horovod": _SWITCH,
    "horovod_reduce_type": one_of("grad", "param"),
    "horovod_avg_grad": _SWITCH,
    "horovod_param_sync_step": FROM_ONE,
    "horovod_param_sync_time_diff": ABOVE_ZERO.or_none,
    "horovod_scale_lr": _SWITCH,
    "horovod_dataset_distribution": one_of("shard", "random_seed_offset"),
    "grad_sum": _SWITCH,
}
_TORCH = {
    "reduce_type": one_of("grad", "param", "grad_explicit"),
    "param_sync_step": FROM_ONE,
    "sync_on_cpu": _SWITCH,
    **dict.fromkeys(("backend", "timeout_sec", "class", "options"), _ANY),
}
_AVERAGES = (
    "steps are counted over the whole training, not from 0 in each epoch; replicas are weighted by their samples, "
    "floating-point buffers (running statistics) are averaged too, and evaluation, checkpoints and the end of the training "
    "use the average"
)
_NOT_NEEDED = {
    "backend": "nccl and gloo are chosen automatically",
    "timeout_sec": "`rankwise run --stall-warn SECONDS` reports the rank that blocks the others",
    "class": "the model is not wrapped",
    "options": "the model is not wrapped: unused parameters and changing graphs need no setting",
    "sync_on_cpu": "averages are computed on the parameters' device",
}


class FromReturnn(NamedTuple):
    """The result of the translation."""

    sync: SyncStrategy
    lr_factor: float
    """The factor by which to multiply the learning rates."""

    notes: list[str]
    """The differences, one sentence each."""


@takes(config=MAPPING)
def from_returnn(config: Mapping[str, Any]) -> FromReturnn:
    """Translate the settings for several devices of a RETURNN config: `horovod_...`, `torch_distributed`, `grad_sum`;
    others are ignored. Call it after `rankwise.init()`: a factor may be the number of ranks.

    Raises ConfigError if nothing, or both, or something unknown is set.
    """
    given = {name: value for name, value in config.items() if name.startswith("horovod_") or name in _HOROVOD}
    torch_settings = config.get("torch_distributed")
    if bool(given) == (torch_settings is not None):
        found = "both are set" if given else f"found: {', '.join(map(str, config)) or 'nothing'}"
        raise ConfigError(f"from_returnn: give settings of Horovod (horovod_reduce_type, ...) or torch_distributed; {found}")
    if torch_settings is not None:
        return _of_torch(torch_settings)
    _check(given, _HOROVOD, "")
    return _of_horovod(given)


def _check(given: Mapping[str, Any], known: Mapping[str, Argument], of: str) -> None:
    for name, value in given.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ConfigError(f"{of}{name}: RETURNN has no such setting; {f'did you mean {near[0]}?' if near else 'remove it'}")
        if not known[name].accepts(value):
            raise ConfigError(f"{of}{name}={value!r}: give {known[name].words}")


def _of_horovod(given: Mapping[str, Any]) -> FromReturnn:
    by_parameters = given.get("horovod_reduce_type", "grad") == "param"
    seconds, steps = given.get("horovod_param_sync_time_diff"), given.get("horovod_param_sync_step")
    lr_factor = float(comm.world_size()) if given.get("horovod_scale_lr") else 1.0
    notes = []
    if given.get("horovod_dataset_distribution") == "random_seed_offset":
        notes.append(
            "random_seed_offset let each rank see all data in a different order; here each sample is seen once per "
            "epoch, by one rank"
        )
    if by_parameters:
        if seconds is not None and steps is not None and steps != 1:
            raise ConfigError("horovod_param_sync_step and horovod_param_sync_time_diff are both set; remove one")
        notes.append(_AVERAGES)
        local = LocalSGD(steps or 1) if seconds is None else LocalSGD(seconds=seconds)
        return FromReturnn(local, lr_factor, notes)
    if useless := [name for name in ("horovod_param_sync_step", "horovod_param_sync_time_diff") if given.get(name) is not None]:
        notes.append(f"{useless[0]} has no effect with horovod_reduce_type='grad': gradients are summed in each step")
    summed = given.get("grad_sum", not given.get("horovod_avg_grad", False))
    if summed:
        notes.append(
            "RETURNN's Horovod summed the gradients of the ranks unless horovod_avg_grad was set, and so does "
            f"AllReduce(reduce='sum'): here the sum is {comm.world_size()} times the mean. AllReduce() uses the mean"
        )
    if summed and lr_factor > 1:
        notes.append(
            f"horovod_scale_lr multiplies the learning rate by {lr_factor:g}, and the gradients are summed as well: with SGD a "
            f"step is {lr_factor**2:g} times as large as with AllReduce() and the rate that is not scaled"
        )
    return FromReturnn(AllReduce(reduce="sum" if summed else "mean"), lr_factor, notes)


def _of_torch(given: Any) -> FromReturnn:
    if not MAPPING.accepts(given):
        raise ConfigError(f"torch_distributed={given!r}: give {MAPPING.words}")
    _check(given, _TORCH, "torch_distributed: ")
    notes = [f"{name} is not needed: {why}" for name, why in _NOT_NEEDED.items() if given.get(name)]
    steps = given.get("param_sync_step")
    if given.get("reduce_type", "grad") == "param":
        if steps is None:
            raise ConfigError("torch_distributed: reduce_type='param' needs param_sync_step, the steps between two averages")
        return FromReturnn(LocalSGD(steps), 1.0, [_AVERAGES, *notes])
    if steps is not None:
        notes.append("param_sync_step has no effect without reduce_type='param': gradients are summed in each step")
    return FromReturnn(AllReduce(overlap=False if given.get("reduce_type") == "grad_explicit" else None), 1.0, notes)
