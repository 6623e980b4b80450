"""Exact evaluation: each sample counts once, on any number of ranks.

Trainer(..., evaluate=Evaluate(data, accuracy, every_steps=500))      # state.metrics["eval_accuracy"]
figures = Evaluate(loader, accuracy).figures(model)                   # in your own loop
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rankwise.actions.periodic import every
from rankwise.data import Loader
from rankwise.dist import comm, log
from rankwise.errors import ConfigError, StepError
from rankwise.evaluation.metrics import Metrics
from rankwise.host.arguments import ANYTHING, DATA, FROM_ONE, FUNCTION, Argument, takes
from rankwise.sync import SyncStrategy
from rankwise.telemetry.meters import Total
from rankwise.telemetry.progress import Progress
from rankwise.training.model import check_divided, evaluating
from rankwise.training.precision import Precision
from rankwise.training.state import TrainState

_MODEL = Argument(
    lambda value: isinstance(value, nn.Module) or isinstance(getattr(value, "model", None), nn.Module),
    "a torch.nn.Module, or an object with one as .model, such as EMA(model)",
)
_NAME = Argument(lambda value: isinstance(value, str) and value.isidentifier(), "a word: eval, ema, test")

_MOST_KEPT = 1024
"""The values of so many batches are kept one by one: of each, a GPU needs 512 bytes, and Python as much."""

Pair = tuple[float | torch.Tensor, float | torch.Tensor]


_MOVED = {
    "eval_fn": "write Evaluate(data, fn): the data first, then the function",
    "make_loader": "write Evaluate(data, fn), the data a Loader or a dataset",
    "sync": "give it to figures(model, sync)",
}


class Evaluate:
    """Exact evaluation on all ranks: every sample counts once, on any number of ranks, and no mean of means is computed.

    `data`: a dataset, which is divided like the training data, or a Loader, of which one epoch is used. `fn(model, batch)`
    returns {name: (sum, count)}; the metrics are `eval_<name>` = sum / count over all samples. Without `fn`, the loss of the
    Trainer's step_fn is used. `metrics`: {name: object that `fn` updates}, for metrics that are not such a mean; each gives
    `eval_<name>`, and `fn` may then return None. `name`: a word instead of `eval`. `model`: another module than the trained
    one, or an object that has one as `.model` (EMA).

    This is an action: it runs every `every_steps` steps or `every_epochs` epochs (by default after each epoch), and at the end.
    In your own loop, call `evaluate.figures(model, sync)`. It does not change the random streams of the training, and restores
    weights and buffers of each rank, and modes.
    """

    @takes(
        data=DATA, fn=FUNCTION.or_none, metrics=ANYTHING, every_steps=FROM_ONE.or_none, every_epochs=FROM_ONE.or_none,
        model=_MODEL.or_none, name=_NAME, moved=_MOVED,
    )  # fmt: skip
    def __init__(
        self,
        data: Any,
        fn: Callable[[Any, Any], Mapping[str, Pair] | None] | None = None,
        *,
        metrics: Any = None,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        model: Any = None,
        name: str = "eval",
    ) -> None:
        if fn is None and metrics is not None:
            raise ConfigError(
                "Evaluate(metrics=...) needs a function that updates them: fn=lambda model, batch: f1.update(...)"
            )
        self.data, self.fn, self.name = data, fn, name
        self.names_by_user = fn is not None
        self.every_steps, self.every_epochs = every_steps, every_epochs
        self._model = model
        self._metrics = metrics if isinstance(metrics, Metrics) else Metrics(metrics)
        self._precision = Precision()
        self._sync: SyncStrategy | None = None
        self._progress: Progress | None = None
        epochs = every_epochs if every_epochs is not None or every_steps is not None else 1
        self._trigger = every(self.evaluate_now, steps=every_steps, epochs=epochs, at_end=True)
        self._loader = data if isinstance(data, Loader) else None
        self.wait_s = 0.0

    def attach(self, trainer: Any) -> None:
        """Use the Trainer's way of dividing data, its strategy, precision and loss."""
        if not isinstance(self.data, Loader):
            self._loader = trainer.loader.over(self.data)
        self._metrics.to(trainer.device)
        self._sync, self._precision, self._progress = trainer.sync, trainer.precision, trainer.progress
        if not self.names_by_user:
            self.fn = lambda model, batch: {"loss": trainer.forward(model, batch)}
        if isinstance(self._model, nn.Module):
            self._model.to(trainer.device)

    def begin(self, _state: TrainState) -> None:
        """A loop begins."""
        self._trigger.begin(by_gate=False)

    def is_due(self, state: TrainState) -> bool:
        """Whether it evaluates after this step."""
        return self._trigger.is_due(state)

    def __call__(self, state: TrainState) -> None:
        """Collective. Evaluate if it is due."""
        self._trigger(state)

    def at_end(self, state: TrainState) -> None:
        """Collective. The script has stopped the run: evaluate, unless this was done after this step."""
        self._trigger.at_end(state)

    def evaluate_now(self, state: TrainState) -> None:
        """Collective. Evaluate, whether or not it is due: `every(Evaluate(...), ...)` decides that itself."""
        began = time.perf_counter()
        if state.step > 1 and getattr(self._model, "is_empty", False):
            log.warning_once(
                f"Evaluate(name={self.name!r}): its {type(self._model).__name__} has averaged no step so far, so this measures "
                "the initial model; add it to actions=[...]"
            )
        figures = self.figures(state.model if self._model is None else None)
        state.measure(figures)
        text = f"step {state.step}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        if self._progress is None:
            log.say(text)
        elif self._progress.tells("epoch" if state.epoch_ended else "evaluation", state.step):
            self._progress.say(text)
        self.wait_s += time.perf_counter() - began

    @property
    def loader(self) -> Loader:
        """One epoch of the data. Raises ConfigError for a dataset without a Trainer: only a Trainer knows how to divide it."""
        if self._loader is None:
            raise ConfigError(
                f"Evaluate({type(self.data).__name__}): in your own loop, give it a Loader: "
                "rankwise.Loader(dataset, global_batch_size=..., shuffle=False)"
            )
        return self._loader.of_all()

    def figures(
        self, model: nn.Module | None = None, sync: SyncStrategy | None = None, batches: Iterable[list[Any]] | None = None
    ) -> dict[str, float]:
        """Collective. Return `{"eval_<name>": value, ...}`. `model`: by default the one given to Evaluate. `sync`: the strategy
        of your own loop; needed if something differs between ranks (for example running statistics). `batches`: used instead of
        the data."""
        own = self._model.model if hasattr(self._model, "model") and not isinstance(self._model, nn.Module) else self._model
        looked_at = model if model is not None else own
        if looked_at is None:
            raise ConfigError("evaluate.figures() needs a model: evaluate.figures(model)")
        if batches is None:
            batches = loader = self.loader
            check_divided(looked_at, lambda: loader.fewest)
        strategy = sync if sync is not None else self._sync
        averaged = strategy.averaged(None if own is None else looked_at) if strategy is not None else contextlib.nullcontext()
        with averaged, evaluating(looked_at), self._metrics.of_this_rank():
            number = 0
            totals: dict[str, list[Pair]] = {}
            with torch.no_grad(), self._precision.autocast():
                for micro_batches in batches:
                    for batch in micro_batches:
                        number += 1
                        for name, pair in self._figures_of(looked_at, batch).items():
                            kept = totals.setdefault(name, [])
                            kept.append(_kept_pair(pair, name))
                            if len(kept) == _MOST_KEPT:
                                kept[:] = [_as_one(kept)]
            means = {name: total.mean for name, total in _over_ranks(totals).items()}
            computed = self._metrics.compute(has_batches=number > 0) if self._metrics else {}
        if twice := means.keys() & computed.keys():
            raise StepError(
                f"two metrics have the name {min(twice)!r}: one from the function, and one from metrics=...; rename one"
            )
        return {f"{self.name}_{name}": value for name, value in (means | computed).items()}

    def _figures_of(self, model: nn.Module, batch: Any) -> Mapping[str, Pair]:
        if self.fn is None:
            raise ConfigError("Evaluate in your own loop needs a function: Evaluate(loader, fn)")
        figures = self.fn(model, batch)
        if figures is None and self._metrics:
            return {}
        if not isinstance(figures, Mapping):
            raise _no_figures(type(figures).__name__)
        return figures


def _over_ranks(totals: Mapping[str, Sequence[Pair]]) -> dict[str, Total]:
    """Collective. The total of each name over all ranks. A rank without a batch has no names."""
    mine = {name: Total(*map(float, _as_one(pairs))) for name, pairs in totals.items()}  # waits for a device
    if comm.is_alone():
        return dict(sorted(mine.items()))
    names = sorted({name for names in comm.all_gather_object(list(totals)) for name in names})
    if not names:
        return {}
    rows = [mine.get(name, Total(0.0, 0.0)) for name in names]
    sums = torch.tensor([[row.sum, row.count] for row in rows], dtype=torch.float64, device="cpu")
    reduced = comm.all_reduce(sums).tolist()
    return {name: Total(*pair) for name, pair in zip(names, reduced, strict=True)}


def _no_figures(what: str) -> StepError:
    return StepError(
        f"the function of Evaluate returned {what}; return a mapping of pairs: "
        '{"loss": (loss_sum, count), "accuracy": (correct, count)}'
    )


def _kept_pair(pair: Any, name: str) -> Pair:
    if not (isinstance(pair, tuple) and len(pair) == 2):
        raise _no_figures(f"{type(pair).__name__} for {name!r}, which is not a pair")
    total, count = pair
    return _kept(total, name), _kept(count, name)


def _kept(value: Any, name: str) -> float | torch.Tensor:
    """A number, or a copy in float64 on the tensor's device, because the function may overwrite its tensor in the next batch.
    Does not wait for a device."""
    if type(value) is int or type(value) is float:
        return value
    if not isinstance(value, torch.Tensor):
        try:
            if isinstance(value, str | bytes) or np.iscomplexobj(value):
                raise TypeError
            return float(value)
        except (TypeError, ValueError):
            raise _no_figures(f"{type(value).__name__} for {name!r}, which is not a number") from None
    if value.numel() != 1 or value.is_complex():
        what = f"a tensor of shape {tuple(value.shape)}" if value.numel() != 1 else "a complex number"
        raise _no_figures(f"{what} for {name!r}")
    return value.item() if value.is_cpu else value.detach().to(torch.float64, copy=True).reshape(())


def _as_one(pairs: Sequence[Pair]) -> Pair:
    """The pairs of many batches added up, in float64. Does not wait for a device if all sums, or all counts, are tensors."""
    total, count = (
        torch.stack(list(values)).sum() if all(isinstance(value, torch.Tensor) for value in values) else float(sum(values))
        for values in zip(*pairs, strict=True)
    )
    return total, count
