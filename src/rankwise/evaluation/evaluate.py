"""Exact evaluation: each sample once, on any number of ranks.

evaluate = Evaluate(eval_fn, make_loader, sync)
evaluate(state)                    # state.metrics["eval_accuracy"]
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from rankwise.dist import comm, log
from rankwise.errors import StepError
from rankwise.evaluation.metrics import Metrics
from rankwise.sync import SyncStrategy
from rankwise.telemetry import Progress
from rankwise.telemetry.meters import mean
from rankwise.telemetry.writers import Writer
from rankwise.training.model import evaluating
from rankwise.training.precision import Precision
from rankwise.training.state import TrainState

Pair = tuple[float | torch.Tensor, float | torch.Tensor]


class Evaluate:
    """Exact evaluation, sharded: every sample once, on whatever number of ranks; nothing is averaged twice.

    `eval_fn(model, batch)` returns {name: (sum, count)}; the figures are `eval_<name>` = sum / count over all samples. Random
    numbers drawn in it do not move the training's streams. `make_loader()` returns a new Loader of one epoch. `metrics`:
    {name: object that `eval_fn` updates}, for figures that are no such mean (metrics.py): each gives `eval_<name>`,
    and then `eval_fn` may return None. The rest is the Trainer's, and can be left out in a loop of your own, but for `sync` if
    the model has buffers (running statistics).
    """

    def __init__(
        self,
        eval_fn: Callable[[Any, Any], Mapping[str, Pair] | None],
        make_loader: Callable[[], Iterable[list[Any]]],
        sync: SyncStrategy | None = None,
        metrics: Any = None,
        precision: Precision | None = None,
        progress: Progress | None = None,
        writers: Sequence[Writer] = (),
    ) -> None:
        self.eval_fn = eval_fn
        self.make_loader = make_loader
        self._sync = sync
        self._metrics = metrics if isinstance(metrics, Metrics) else Metrics(metrics)
        self._precision = precision or Precision.of("fp32", torch.device("cpu"))
        self._say = progress.say if progress is not None else log.say
        self._writers = writers
        self.wait_s = 0.0

    def __call__(self, state: TrainState) -> None:
        began = time.perf_counter()
        figures = self.figures(state)
        state.measure(figures)
        for writer in self._writers:
            writer.write(state.step, figures)
        self._say(f"step {state.step}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
        self.wait_s += time.perf_counter() - began

    def over(self, make_loader: Callable[[], Iterable[list[Any]]]) -> Evaluate:
        """The same figures of other batches."""
        other = copy.copy(self)
        other.make_loader = make_loader
        return other

    def figures(self, state: TrainState) -> dict[str, float]:
        """Collective. `eval_<name>` of each, and nothing else happens."""
        averaged = self._sync.averaged() if self._sync is not None else contextlib.nullcontext()
        with averaged, evaluating(state.model), self._metrics.of_this_rank():
            batches = 0
            totals: dict[str, list[torch.Tensor]] = {}
            with torch.no_grad(), self._precision.autocast():
                for micro_batches in self.make_loader():
                    for batch in micro_batches:
                        batches += 1
                        for name, (total, count) in self._figures_of(state, batch).items():
                            totals.setdefault(name, []).append(_pair(total, count))
            means = {name: mean(*pair) for name, pair in _over_ranks(totals).items()}
            computed = self._metrics.compute(has_batches=batches > 0) if self._metrics else {}
        if twice := means.keys() & computed.keys():
            raise StepError(f"two figures are called {min(twice)!r}: one that eval_fn returns, and one of eval_metrics")
        return {f"eval_{name}": value for name, value in (means | computed).items()}

    def _figures_of(self, state: TrainState, batch: Any) -> Mapping[str, Pair]:
        figures = self.eval_fn(state.model, batch)
        if figures is None and self._metrics:
            return {}
        if not isinstance(figures, Mapping):
            raise _no_figures(type(figures).__name__)
        for name, pair in figures.items():
            if not (isinstance(pair, tuple) and len(pair) == 2):
                raise _no_figures(f"{type(pair).__name__} for {name!r}, which is no pair")
        return figures


def _over_ranks(totals: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, tuple[float, float]]:
    """Collective. (sum, count) of each name over all ranks; a rank without a batch knows no names."""
    names = sorted({name for names in comm.all_gather_object(list(totals)) for name in names})
    if not names:
        return {}
    nothing = torch.zeros(2, dtype=torch.float64)
    rows = [torch.stack(list(totals[n])).sum(0).cpu() if n in totals else nothing for n in names]
    reduced = comm.all_reduce(torch.stack(rows)).tolist()
    return {name: (total, count) for name, (total, count) in zip(names, reduced, strict=True)}


def _no_figures(what: str) -> StepError:
    return StepError(
        f'eval_fn returned {what}; return a mapping of pairs: {{"loss": (loss_sum, count), "accuracy": (correct, count)}}'
    )


def _pair(total: float | torch.Tensor, count: float | torch.Tensor) -> torch.Tensor:
    """Both in float64 on the device where one of them is; nothing waits for it here."""
    device = next((v.device for v in (total, count) if isinstance(v, torch.Tensor)), None)
    return torch.stack([torch.as_tensor(v, device=device).detach().double() for v in (total, count)])
