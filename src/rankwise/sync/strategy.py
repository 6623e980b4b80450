"""The protocol of a synchronisation strategy. A new strategy is one new file; the loop does not change.

sync = AllReduce().attach(model, optimizer, clip_norm=1.0)
sync.backward(loss_sum, count)               # for each micro-batch
result = sync.step()
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Protocol, Self

import torch
from torch import nn
from torch.optim import Optimizer

from rankwise.errors import NotAttachedError, StepError
from rankwise.training.fingerprint import compare
from rankwise.training.precision import LossScale

Promise = Literal["exact", "summed", "rounded", "averaged"]
Holding = Literal["same", "own", "shard"]


class Held(NamedTuple):
    """What each rank holds between two steps: the same as the others, its own, or a share of one state."""

    parameters: Holding
    buffers: Holding
    optimizer: Holding


class Shared(NamedTuple):
    """The result of a step over all ranks; equal on all ranks."""

    total: float
    """The count of the step's loss over all ranks (samples, frames, tokens)."""

    grad_norm: float
    """The norm of the mean gradient, before clipping."""

    finite: bool
    """False: the gradient was not finite, and the step was skipped."""

    skipped: int
    """Steps that were skipped since the last such result; the sum over ranks if each rank steps alone."""

    steps: int = 1
    """The number of steps since the last such result."""


class Mine(NamedTuple):
    """The result of a step on this rank. Use it only for logs, because it may differ between ranks."""

    total: float
    grad_norm: float
    stepped: bool


class StepResult(NamedTuple):
    mine: Mine
    shared: Shared | None
    """None: nothing was sent in this step, so no decision may depend on it."""


class LateResult:
    """A StepResult that the device still computes: reading it waits. The step is done, or skipped, there. The same strategy
    returns one for each step, on all ranks, whether or not the numbers are here already."""

    def __init__(self, read: Callable[[], StepResult]) -> None:
        self._read: Callable[[], StepResult] | None = read
        self._known: StepResult | None = None

    def __reduce__(self) -> tuple[type[StepResult], StepResult]:
        return StepResult, self.read()

    def read(self) -> StepResult:
        if self._read is not None:
            read, self._read = self._read, None
            self._known = read()
        if self._known is None:
            raise StepError("the result of this step is not known: the ranks do not train the same any more")
        return self._known

    @property
    def mine(self) -> Mine:
        return self.read().mine

    @property
    def shared(self) -> Shared | None:
        return self.read().shared


def check_alike(strategy: SyncStrategy, **attached: Any) -> None:
    """Collective. Raises ConfigError on all ranks if one rank has another strategy, or another setting. A setting is an
    argument of the class that the object keeps under the same name, or under that name after an underscore; `attached`: those
    of `attach`."""
    kind, held = type(strategy).__name__, vars(strategy)
    settings = {name: held.get(name, held.get(f"_{name}")) for name in inspect.signature(type(strategy)).parameters}
    compare({"the strategy": kind, **{f"{kind}'s {name}": value for name, value in (settings | attached).items()}})


class NeedsAttach:
    """A base of strategies whose other methods need what `attach` makes. Before it they raise NotAttachedError."""

    if not TYPE_CHECKING:  # with this method, a type checker accepts any name

        def __getattr__(self, name: str) -> NoReturn:
            """Called if there is no such attribute, or if a property has raised AttributeError."""
            if "_optimizer" not in vars(self) and not name.startswith("__") and (name[0] == "_" or hasattr(type(self), name)):
                raise NotAttachedError(
                    "this strategy has no model yet; call attach before its other methods: "
                    "sync = rankwise.AllReduce().attach(model, optimizer)"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class SyncStrategy(Protocol):
    """Each rank passes a loss sum and its count, and the optimizer steps.

    `state_dict` is the part of the state that is equal on all ranks, `rank_state_dict` this rank's own part. Decisions about
    what ranks do next depend only on values that are equal on all ranks.
    """

    promise: Promise
    """exact: the mean gradient of the whole global batch, to the last digits; summed: this times the number of ranks; rounded:
    exact except for what compression loses, which is added later; averaged: replicas that differ between two averages."""

    held: Held

    @property
    def wait_s(self) -> float:
        """Seconds that the loop has spent in communication so far, including the wait for other ranks."""

    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip_norm: float | None = None,
        loss_scale: LossScale | None = None,
        typical_count: float = 1.0,
    ) -> Self:
        """Collective, once. All ranks get rank 0's parameters (also frozen ones) and buffers. Afterwards only `step` calls the
        optimizer.

        `model`: a module that holds all that the optimizer trains. `clip_norm`: largest norm of the mean gradient; None or <= 0
        does not clip. `typical_count`: about the count of a step; the same on all ranks. Raises ConfigError if this cannot be
        trained.
        """

    def check_length(self, steps: int) -> None:
        """Local, before the first step of a training of `steps` steps. Warns of settings that make little sense for so many
        steps, and raises ConfigError for settings that make none."""

    def follow(self) -> None:
        """Collective if the model or the optimizer has changed what is trained (unfrozen or new parameters, a new group): call
        it when all ranks have made the change. Afterwards new parameters have the values of rank 0.

        `step` does this too, but sends no values: it raises StepError if the values of new parameters differ between ranks.
        """

    def meet(self) -> None:
        """Collective, between two steps, before other collectives of the loop (a save). A rank that alone has changed what is
        trained waits in `follow`: the other ranks meet it here, and all raise StepError."""

    def backward(self, loss_sum: torch.Tensor, count: float | torch.Tensor, *, last: bool = False) -> None:
        """Add the gradient of this micro-batch. `loss_sum`: a scalar; `count`: the number of samples or tokens that it sums.
        `last`: it is the last of this step on this rank, so that sending may start. Never waits."""

    def step(self) -> StepResult | LateResult:
        """Collective. Reduce the gradient, check and clip it, and step. Afterwards gradients are zero. Raises on all ranks or
        on none."""

    def averaged(self, module: nn.Module | None = None) -> contextlib.AbstractContextManager[None]:
        """Collective. Inside, `module` (None: the model) is what evaluation, prediction and saves use, the same on all ranks.
        Afterwards it is again what it was on each rank, bit for bit."""

    def finish(self) -> Shared | None:
        """Collective, once, after the last step: the replicas become one. Returns the result of steps that had none yet."""

    def describe(self) -> str:
        """The strategy in a few words, printed at the start; may be empty."""

    def figures(self) -> dict[str, float]:
        """Local. For the log: `sent_bytes`, the bytes that this rank has sent so far, and other metrics."""

    def state_dict(self) -> dict[str, Any]:
        """Local."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Local. Call this before the model and the optimizer load their states."""

    def rank_state_dict(self) -> dict[str, Any] | None:
        """Local, inside `averaged`. This rank's own state; None if it has none."""

    def load_rank_state_dict(self, state: dict[str, Any] | None, /) -> None:
        """Local. Call this after the model and the optimizer have loaded their states. None: no such state was saved, or it was
        saved on another number of ranks; then the rank starts with the common state."""
