"""Whether the ranks are still equal, if their strategy promises it: rankwise compares digests from time to time.

check = CheckReplicas("warn");  check.attach(trainer);  check(state)       # an action: at most 1 % of the time
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from rankwise.dist import comm, log
from rankwise.errors import StepError
from rankwise.host.arguments import one_of, takes
from rankwise.sync import SyncStrategy
from rankwise.training.digest import digest
from rankwise.training.optimizer import named_parameters, named_state
from rankwise.training.state import TrainState

_SHARE = 0.01  # of the time of training
_FEWEST = 50  # steps between two checks, at least


class CheckReplicas:
    """An action: check from time to time that all ranks still hold the same parameters, buffers, optimizer state and learning
    rates (those that the strategy keeps equal: `sync.held`). If they differ, print one warning, or raise an error if
    `on_divergence="error"`. The Trainer runs one that warns, unless `actions` has another. Takes at most 1 % of the time."""

    @takes(on_divergence=one_of("warn", "error"))
    def __init__(self, on_divergence: str = "warn") -> None:
        self._raises = on_divergence == "error"
        self._alike = self._looked = 0
        self._earliest: float = 0
        self._next: float = 0
        self._since = time.perf_counter()
        self._exchange_s = math.inf
        self._found = False

    def attach(self, trainer: Any) -> None:
        self._sync: SyncStrategy = trainer.sync

    def begin(self, state: TrainState) -> None:
        self._alike = self._looked = state.step
        self._next = state.step + _FEWEST
        self._since = time.perf_counter()

    def __call__(self, state: TrainState) -> None:
        if state.step >= self._next:
            began = time.perf_counter()
            self._sync.meet()
            self._check(state, began)

    def before_save(self, state: TrainState) -> None:
        """Collective. Skipped if saves follow each other so soon that the check would take more than its share of the time."""
        if state.step >= self._earliest:
            self._check(state, time.perf_counter())

    def _check(self, state: TrainState, began: float) -> None:
        """Collective. Warn, or raise StepError on all ranks: the first difference, its size, the rank, and since when. `began`:
        when this check started."""
        if self._found or comm.is_alone():
            self._next = self._earliest = math.inf
            return
        mine = {
            name: digest(value) if isinstance(value, torch.Tensor) else repr(value)
            for name, value in self._promised(state).items()
        }
        whole = xxhash.xxh3_128_hexdigest(repr(mine).encode())
        ready = time.perf_counter()
        # The time of this exchange is known only after it. The fastest exchange so far is used: it has waited least for other
        # ranks.
        cost_s = ready - began + (self._exchange_s if math.isfinite(self._exchange_s) else 0.0)
        step_s = (began - self._since) / max(state.step - self._looked, 1)
        steps = math.ceil(cost_s / (_SHARE * step_s)) if step_s > 0 else _FEWEST
        told = comm.all_gather_object((whole, steps))
        self._exchange_s = min(self._exchange_s, time.perf_counter() - ready)
        self._looked, self._earliest = state.step, state.step + told[0][1]  # all ranks use the clock of the main rank
        self._next = max(self._earliest, state.step + _FEWEST)
        self._since = time.perf_counter()
        if len({whole for whole, _ in told}) == 1:
            self._alike = state.step
            return
        self._found = True
        self._tell(state, mine)

    def _tell(self, state: TrainState, mine: Mapping[str, str]) -> None:
        # Only those of the main rank are sent: the digests of a large model, from hundreds of ranks, would fill the memory.
        first = comm.broadcast_object(dict(mine))
        places = {name: place for place, name in enumerate({**first, **mine})}
        differs = next((name for name in places if mine.get(name) != first.get(name)), None)
        told = comm.all_gather_object((places[differs], differs) if differs is not None else None)
        (_, name), rank = min((found, rank) for rank, found in enumerate(told) if found is not None)
        far = max(comm.all_gather_object(self._distance(state, name)))
        text = (
            f"the ranks have diverged: {name} differs between rank 0 and rank {rank} by at most {far:.3g} after step "
            f"{state.step}; they were equal after step {self._alike}; look for code that runs only on some ranks"
        )
        if self._raises:
            raise StepError(text)
        log.warn(text)

    def _distance(self, state: TrainState, name: str) -> float:
        """Collective. The largest difference between this rank's value and the main rank's; infinite if the shapes differ."""
        value = self._promised(state).get(name)
        kind = comm.broadcast_object(_kind(value))
        if any(each != kind for each in comm.all_gather_object(_kind(value))):
            return math.inf
        if not isinstance(value, torch.Tensor):
            first: Any = comm.broadcast_object(value)
            return abs(float(value) - float(first)) if isinstance(value, int | float) and value != first else 0.0
        theirs = value.detach().clone()
        comm.broadcast([theirs])
        apart = (value.detach().to(torch.float64) - theirs.to(torch.float64)).abs()
        return float(apart.max()) if apart.numel() else 0.0

    def _promised(self, state: TrainState) -> dict[str, Any]:
        held = self._sync.held
        found: dict[str, Any] = {}
        for number, group in enumerate(state.optimizer.param_groups):
            found[f"the learning rate of group {number}"] = group.get("lr")
        if held.parameters == "same":
            found |= named_parameters(state.model, state.optimizer)
        if held.buffers == "same":
            found |= dict(state.model.named_buffers())
        if held.optimizer == "same":
            found |= named_state(state.model, state.optimizer)
        return found


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
