"""Metric objects over all ranks: F1, AUROC, perplexity, word errors, and others that are not a sum over a count.

metrics = Metrics({"f1": torchmetrics.F1Score("multiclass", num_classes=10)})
with metrics.of_this_rank():
    ...                                             # f1.update(scores, y), on ranks with batches
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
    """An object that is updated batch by batch and then computes a number, as in torchmetrics.

    The objects of several ranks are combined in one of these ways:
    - states with a reduction (torchmetrics: `metric_state`) are gathered and reduced;
    - `merge_state(others)` (torcheval, or your own) gets the objects of the other ranks;
    - otherwise `compute` is called on all ranks, and must communicate itself.
    """

    def update(self, *args: Any, **kwargs: Any) -> Any: ...

    def compute(self) -> Any: ...

    def reset(self) -> Any: ...


class Metrics:
    """Named metric objects. A MetricCollection of torchmetrics may be one of them, or be used instead of the mapping."""

    def __init__(self, metrics: Any = None) -> None:
        if metrics is not None and not isinstance(metrics, Mapping) and not _is_collection(metrics):
            raise ConfigError(f'metrics is a {type(metrics).__name__}; give metric objects by name: {{"f1": f1}}')
        self._metrics: Any = metrics if metrics is not None else {}
        for name, metric in self._named():
            if isinstance(metric, type):
                kind = metric.__name__
                raise ConfigError(f"metrics: {name!r} is the class {kind}; create an object: {kind}(...)")
            lacking = [method for method in ("update", "compute", "reset") if not callable(getattr(metric, method, None))]
            if lacking:
                raise ConfigError(
                    f"metrics: {name!r} ({type(metric).__name__}) has no {' and no '.join(lacking)}; a metric object must "
                    "have update(...), compute() and reset(), like those of torchmetrics"
                )

    def __bool__(self) -> bool:
        return any(True for _ in self._named())

    def to(self, device: torch.device) -> None:
        """Move the objects that have `to`."""
        for metric in self._whole():
            if hasattr(metric, "to"):
                metric.to(device)

    @contextlib.contextmanager
    def of_this_rank(self) -> Iterator[None]:
        """Updates inside belong to one evaluation: the objects are reset before and after. No object waits for other ranks
        inside, because these may have fewer batches, or none."""
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
        """Collective. The metrics over all batches of all ranks, on every rank. `has_batches`: whether this rank had a batch.

        Computed on the first rank that had a batch; an error there is raised on all ranks.
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
        """Collective. Compute the metric on one rank, after `take` has given it the values of all `ranks`."""
        home = ranks[0] if ranks else 0
        told = comm.gather_object(mine, home)
        figures: dict[str, float] = {}
        with agreed():  # computing may take long
            if told and (ranks or comm.is_alone()):
                take(metric, told if comm.is_alone() else [told[rank] for rank in ranks])
            if told:
                figures = _figures(name, _quietly(metric.compute))
        return comm.broadcast_object(figures, home)

    def _whole(self) -> Iterable[Any]:
        return [self._metrics] if _is_collection(self._metrics) else list(self._metrics.values())

    def _named(self) -> Iterator[tuple[str, Any]]:
        """(name, metric), those of a collection one by one: its `items()` also updates their states."""
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
    """All parts of the metric: a metric of torchmetrics may consist of others, and all of them are modules."""
    return metric.modules() if isinstance(metric, torch.nn.Module) else [metric]


# --- by states


def _has_states(metric: Any) -> bool:
    return hasattr(metric, "metric_state") and hasattr(metric, "_reductions")


def _states(metric: Any) -> list[dict[str, Any]]:
    """The states of each part, in host memory."""
    return [{name: _on_cpu(value) for name, value in part.metric_state.items()} for part in _parts(metric) if _has_states(part)]


def _take_states(metric: Any, told: Sequence[list[dict[str, Any]]]) -> None:
    """As torchmetrics reduces them, but without ranks that had no batch: their empty lists have another dtype and shape, and
    their default values would change a mean."""
    metric.reset()  # also discards a cached result
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
    """Compute without torchmetrics' warning that this object was never updated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        return compute()


# --- by objects


def _travelling(metric: Any) -> Any:
    if not hasattr(metric, "to"):
        return metric
    copied = copy.deepcopy(metric)
    moved = copied.to("cpu")
    return moved if moved is not None else copied  # a `to` that moves the object itself may return nothing


def _merge(metric: Any, told: Sequence[Any]) -> None:
    """`told` starts with the object of this rank."""
    if len(told) > 1:
        metric.merge_state(told[1:])


# --- values


def _figures(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {key: number for inner, one in value.items() for key, number in _figures(f"{name}_{inner}", one).items()}
    if isinstance(value, int | float):
        return {name: float(value)}
    if getattr(value, "size", None) == 1 or (isinstance(value, torch.Tensor) and value.numel() == 1):  # also one of numpy
        return {name: float(value.item())}
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise StepError(
        f"compute() of {name!r} returned {type(value).__name__}{shape}; a metric is one number, or a mapping of them by name"
    )


def _agreed(name: str, figures: dict[str, float]) -> dict[str, float]:
    """Collective. Raises StepError if the ranks have different results: then `compute` has not communicated."""
    told = comm.all_gather_object(figures)
    if any(repr(other) != repr(told[0]) for other in told):
        raise StepError(
            f"compute() of {name!r} gave {told[0]} on rank 0 and {next(o for o in told if repr(o) != repr(told[0]))} on "
            "another rank; it must combine all ranks itself (rankwise.all_reduce), or the metric must have a method "
            "merge_state(others), which adds the other ranks' objects"
        )
    return figures
