"""Metric objects over all ranks: F1, AUROC, perplexity, word errors, whatever is no mean of a sum and a count.

metrics = Metrics({"f1": torchmetrics.F1Score("multiclass", num_classes=10)})
with metrics.of_this_rank():
    ...                                             # f1.update(scores, y), on the ranks that have batches
    figures = metrics.compute(has_batches=True)     # {"f1": 0.93}, on every rank
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from rankwise.dist import comm
from rankwise.dist.guards import agreed
from rankwise.errors import ConfigError, StepError


class Metric(Protocol):
    """An object that is told batch after batch, and knows a number in the end; torchmetrics' own convention.

    How those of several ranks become one:
    - with states that have a reduction (torchmetrics: `metric_state`), these are gathered and reduced;
    - with `merge_state(others)` (torcheval; your own), the other ranks' objects are handed to it;
    - without either, `compute` is called on all ranks at once, and communicates itself.
    """

    def update(self, *args: Any, **kwargs: Any) -> Any: ...

    def compute(self) -> Any: ...

    def reset(self) -> Any: ...


class Metrics:
    """Named metric objects; torchmetrics' MetricCollection may be one of them, or stand for all."""

    def __init__(self, metrics: Any = None) -> None:
        if metrics is not None and not isinstance(metrics, Mapping) and not _is_collection(metrics):
            raise ConfigError(f'metrics is a {type(metrics).__name__}; give metric objects by name: {{"f1": f1}}')
        self._metrics: Any = metrics if metrics is not None else {}
        for name, metric in self._named():
            lacking = [method for method in ("update", "compute", "reset") if not callable(getattr(metric, method, None))]
            if lacking:
                raise ConfigError(
                    f"metrics: {name!r} ({type(metric).__name__}) has no {' and no '.join(lacking)}; a metric object must "
                    "have update(...), compute() and reset(), like those of torchmetrics"
                )

    def __bool__(self) -> bool:
        return any(True for _ in self._named())

    def to(self, device: torch.device) -> None:
        """Move those that can be moved."""
        for metric in self._whole():
            if hasattr(metric, "to"):
                metric.to(device)

    @contextlib.contextmanager
    def of_this_rank(self) -> Iterator[None]:
        """What is told inside belongs to one evaluation: nothing of before is in it, and nothing stays. No object waits for
        other ranks inside, which may have fewer batches, or none."""
        before = [(part, part.distributed_available_fn) for part in self._parts() if hasattr(part, "distributed_available_fn")]
        for part, _ in before:
            part.distributed_available_fn = _nobody
        for metric in self._whole():
            metric.reset()
        try:
            yield
        finally:
            for metric in self._whole():
                metric.reset()
            for part, available in before:
                part.distributed_available_fn = available

    def compute(self, has_batches: bool) -> dict[str, float]:
        """Collective. The figures over all batches of all ranks, on every rank; `has_batches`: whether this rank had one.

        Computed on one rank, the first that had a batch; what is raised there is raised on all.
        """
        ranks = [rank for rank, had in enumerate(comm.all_gather_object(has_batches)) if had]
        figures: dict[str, float] = {}
        for name, metric in list(self._named()):
            if _has_states(metric):
                figures |= self._on_one(ranks, name, metric, _states(metric), _take_states)
            elif hasattr(metric, "merge_state"):
                figures |= self._on_one(ranks, name, metric, _travelling(metric), _merge)
            else:
                figures |= _agreed(name, _figures(name, metric.compute()))
        return figures

    def _on_one(
        self, ranks: Sequence[int], name: str, metric: Any, mine: Any, take: Callable[[Any, Sequence[Any]], None]
    ) -> dict[str, float]:
        """Collective. Compute it where `take` has given it what all `ranks` hold."""
        home = ranks[0] if ranks else 0
        told = comm.gather_object(mine, home)
        figures: dict[str, float] = {}
        with agreed():  # it may compute for long
            if told:
                take(metric, told if comm.is_alone() else [told[rank] for rank in ranks])
                figures = _figures(name, _quietly(metric.compute))
        return comm.broadcast_object(figures, home)

    def _whole(self) -> Iterable[Any]:
        return [self._metrics] if _is_collection(self._metrics) else list(self._metrics.values())

    def _named(self) -> Iterator[tuple[str, Any]]:
        """(name, metric), those of a collection one by one: it brings their states up to date when it is asked for them."""
        for name, metric in self._metrics.items():
            if _is_collection(metric):
                yield from ((f"{name}_{inner}", one) for inner, one in metric.items())
            else:
                yield name, metric

    def _parts(self) -> Iterator[Any]:
        for _, metric in self._named():
            yield from _parts(metric)


def _nobody() -> bool:
    return False


def _is_collection(metric: Any) -> bool:
    return hasattr(metric, "items") and hasattr(metric, "compute")


def _parts(metric: Any) -> Iterable[Any]:
    """A metric of torchmetrics may be made of others; all of them are modules."""
    return metric.modules() if isinstance(metric, torch.nn.Module) else [metric]


# --- by states


def _has_states(metric: Any) -> bool:
    return hasattr(metric, "metric_state") and hasattr(metric, "_reductions")


def _states(metric: Any) -> list[dict[str, Any]]:
    """Of each part, in host memory."""
    return [{name: _on_cpu(value) for name, value in part.metric_state.items()} for part in _parts(metric) if _has_states(part)]


def _take_states(metric: Any, told: Sequence[list[dict[str, Any]]]) -> None:
    """As torchmetrics reduces them, but for ranks without a batch, which are left out: their empty lists have neither the
    dtype nor the shape of the others', and their defaults would weigh in a mean."""
    metric.reset()  # which forgets a number that was computed meanwhile, too
    for number, part in enumerate(part for part in _parts(metric) if _has_states(part)):
        device = getattr(part, "device", torch.device("cpu"))
        for name, reduction in part._reductions.items():
            setattr(part, name, _on(device, _reduced([states[number][name] for states in told], reduction)))


def _reduced(values: Sequence[Any], reduction: Callable[[Any], Any] | None) -> Any:
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], torch.Tensor):
        stacked = torch.stack(list(values))
        return reduction(stacked) if reduction is not None else stacked
    joined = [item for value in values for item in value]
    return joined if reduction is None or not joined else [reduction(joined)]


def _on_cpu(value: Any) -> Any:
    return _on(torch.device("cpu"), value)


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    return [_on(device, item) for item in value] if isinstance(value, list) else value


def _quietly(compute: Callable[[], Any]) -> Any:
    """Without torchmetrics' warning that this very object was told nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        return compute()


# --- by objects


def _travelling(metric: Any) -> Any:
    return copy.deepcopy(metric).to("cpu") if hasattr(metric, "to") else metric


def _merge(metric: Any, told: Sequence[Any]) -> None:
    """`told` begins with this rank's own."""
    if len(told) > 1:
        metric.merge_state(told[1:])


# --- figures


def _figures(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {key: number for inner, one in value.items() for key, number in _figures(f"{name}_{inner}", one).items()}
    if isinstance(value, int | float) or getattr(value, "size", None) == 1:  # numpy's
        return {name: float(value)}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {name: float(value.item())}
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise StepError(
        f"compute() of {name!r} returned {type(value).__name__}{shape}; a metric is one number, or a mapping of them by name"
    )


def _agreed(name: str, figures: dict[str, float]) -> dict[str, float]:
    """Collective. Raises StepError unless all ranks have come to the same: `compute` has not communicated."""
    told = comm.all_gather_object(figures)
    if any(repr(other) != repr(told[0]) for other in told):
        raise StepError(
            f"compute() of {name!r} gave {told[0]} on rank 0 and {next(o for o in told if repr(o) != repr(told[0]))} on "
            "another rank; it must combine all ranks itself (rankwise.all_reduce), or the metric must have a method "
            "merge_state(others), which adds the other ranks' objects"
        )
    return figures
