"""The settings that identify a training. They are saved with it, and a resumed run must have the same.

parts = {"settings": Fingerprint(fixed={"lr": 0.1}, kept={"T_max": 100}), ...}      # first: before anything is loaded
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from rankwise.dist import comm, log
from rankwise.errors import ConfigError
from rankwise.host.arguments import shown
from rankwise.training.optimizer import RATES_OF_SCHEDULERS, is_fused, settings

_NO_SETTINGS = ("last_epoch", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter", "base_lrs")
"""Entries in the states of torch's schedulers: positions, and the learning rate, which is a setting of the optimizer."""

_PRIVATE_SETTINGS = ("_milestones", "_schedulers", "_schedule_phases")
"""The settings of SequentialLR, ChainedScheduler and OneCycleLR that have a private name."""


class Fingerprint:
    """Stateful. `fixed` settings must be the same as in the saved run. For `kept` settings, the saved values are used, and a
    difference is reported.

    A setting that only one of the two runs has is ignored, so that older runs can resume after a later version adds a setting.
    """

    def __init__(self, fixed: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        self.fixed = dict(fixed)
        self._kept = dict(kept)

    @classmethod
    def of(cls, fixed: Mapping[str, Any], optimizer: Optimizer, scheduler: Any) -> Fingerprint:
        """Adds the settings of the optimizer and the type of the scheduler (fixed), and the settings in its state (kept).

        If a training has changed a value, and the script has not changed it since, the setting is the value before it."""
        now = cls._now(fixed, optimizer, scheduler)
        if optimizer not in _trained:
            return now
        before, after = _trained[optimizer]
        return cls(_as_set(now.fixed, before.fixed, after.fixed), _as_set(now._kept, before._kept, after._kept))

    @classmethod
    def _now(cls, fixed: Mapping[str, Any], optimizer: Optimizer, scheduler: Any) -> Fingerprint:
        fixed = {**fixed, **settings(optimizer)}
        kind = type(scheduler).__name__ if scheduler is not None else None
        kept = plain(scheduler.state_dict()) if scheduler is not None else {}
        if fixed["lr_scale"] != "none":  # the rates were multiplied: on other ranks they would always differ
            kept = {name: value for name, value in kept.items() if name.rpartition(".")[2] not in RATES_OF_SCHEDULERS}
        return cls({**fixed, "scheduler": kind}, {f"{kind}'s {name}": value for name, value in kept.items()})

    def trained(self, optimizer: Optimizer, scheduler: Any) -> None:
        """A training with these settings is over: remember which values it has changed."""
        _trained[optimizer] = self, self._now(self.fixed, optimizer, scheduler)

    def state_dict(self) -> dict[str, Any]:
        return {"fixed": self.fixed, "kept": self._kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError if a fixed setting was different."""
        changed = differences(state["fixed"], self.fixed)
        if changed:
            before = ", ".join(f"{name} {_shown(old)}" for name, old, _ in changed)
            now = ", ".join(f"{name} {_shown(new)}" for name, _, new in changed)
            raise ConfigError(
                f"this run started with {before}, and the script now has {now}; set it back, or "
                "start a new run with --fresh or --name NAME"
            )
        for name, old, new in differences(state["kept"], self._kept):
            log.warn(
                f"{name} stays {_shown(old)}, because this run started with it (the script now has {_shown(new)}); in a longer "
                "training, the learning rate may rise again after the end of the schedule. To use "
                f"{_shown(new)}, start a new run with --fresh or --name NAME"
            )
        self._kept.update(state["kept"])


_trained: WeakKeyDictionary[Optimizer, tuple[Fingerprint, Fingerprint]] = WeakKeyDictionary()
"""For each optimizer: the settings of its last training, and the values that this has left."""


def compare(mine: Mapping[str, Any]) -> None:
    """Collective. Raises ConfigError on all ranks for the first setting that differs on some rank."""
    told = comm.all_gather_object({name: repr(value) for name, value in mine.items()})
    for rank, other in enumerate(told):
        for name, value in told[0].items():
            if (theirs := other.get(name, "not set")) != value:
                raise ConfigError(
                    f"the ranks have different settings: {name} is {value} on rank 0 and {theirs} on rank {rank}; "
                    "use the same value on all ranks"
                )


def numerics(precision: str, device: str, optimizer: Optimizer, reduction: str) -> dict[str, Any]:
    """What may change the last bits of results, but is not a setting of the training."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": device,
        "precision": precision,
        "fused": is_fused(optimizer),
        "reduction": reduction,
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, before, now) for each setting that both have and that differs."""
    return [(name, before[name], value) for name, value in now.items() if name in before and before[name] != value]


def _as_set(now: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the script, if a training has made `after` of `before`."""
    return {name: before.get(name, value) if after.get(name) == value else value for name, value in now.items()}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return shown(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the state of a scheduler: `{"gamma": 0.1, "milestones": [10, 20], "schedulers[0].step_size": 3}`."""
    kept = {name: value for name, value in state.items() if name in _PRIVATE_SETTINGS or not name.startswith("_")}
    found: dict[str, Any] = {}
    for name, value in kept.items():
        if name not in _NO_SETTINGS:
            found |= _settings_in(name.lstrip("_"), value)
    return found


def _settings_in(name: str, value: Any) -> dict[str, Any]:
    """The numbers, strings and lists of numbers in a value, by their names. Tensors and functions are ignored."""
    if _is_plain(value):
        return {name: value}
    if isinstance(value, Counter):  # how MultiStepLR keeps its milestones
        value = sorted(value.elements())
    if isinstance(value, Mapping):
        return {f"{name}.{inner}": each for inner, each in plain(value).items()}
    if not isinstance(value, list | tuple):
        return {}
    if all(map(_is_plain, value)):
        return {name: list(value)}
    found: dict[str, Any] = {}
    for place, each in enumerate(value):
        found |= _settings_in(f"{name}[{place}]", each)
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool)
