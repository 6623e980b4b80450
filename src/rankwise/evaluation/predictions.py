"""Predictions of all ranks: one for each sample, in the order of the dataset.

    scores = predict(predict_fn, model, loader)        # on the main rank; None on the others

For metrics that need all predictions together (a ranking, a corpus score), and for writing them to a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rankwise.data import Loader
from rankwise.data.order import Indices
from rankwise.dist import comm
from rankwise.dist.device import with_values
from rankwise.dist.guards import agreed, run_on_main
from rankwise.errors import ConfigError, StepError
from rankwise.host.arguments import FUNCTION, instance, one_of, takes
from rankwise.training.model import check_divided, evaluating
from rankwise.training.precision import Precision

_LOADER = instance(Loader, "a rankwise.Loader(dataset, global_batch_size=..., max_epochs=1, shuffle=False)")
_ARRAYS = (torch.Tensor, np.ndarray)
_ROUND = 32  # steps whose predictions are sent together

Part = tuple[Sequence[int] | Indices, Any]
"""Indices of samples, and their rows."""


@takes(
    predict_fn=FUNCTION, model=instance(torch.nn.Module, "a torch.nn.Module"), loader=_LOADER,
    on=one_of("main", "all"), into=FUNCTION.or_none, precision=instance(Precision, 'Precision("bf16")').or_none,
)  # fmt: skip
def predict(
    predict_fn: Callable[[Any, Any], Any],
    model: torch.nn.Module,
    loader: Loader,
    *,
    on: str = "main",
    into: Callable[[list[int], Any], object] | None = None,
    precision: Precision | None = None,
) -> Any:
    """Collective. Return the results of `predict_fn(model, batch)` for all samples, in the order of the dataset or stream.

    For a batch of n samples, `predict_fn` returns a tensor or array with n rows, a list with n entries (for rows of uneven
    length), or a mapping or tuple of these. The result has the same form, for all samples, in host memory: on the main rank
    (None on the others), or with `on="all"` on all ranks. `loader` must be for one epoch; its order and batches do not matter.

    `into(indices, rows)`: called on the main rank, again and again, with some samples, and `predict` returns nothing; so only
    the rows of 32 steps are in memory. Without shuffling, and with batches by count, the indices increase from call to call. An
    error in it is raised on all ranks.
    """
    if into is not None and on != "main":
        raise ConfigError("into=... is called only on rank 0; remove on='all'")
    if loader.is_split:
        raise ConfigError(
            "predict() needs one order of all samples, and each rank reads its own stream; give one that all ranks share"
        )
    loader = loader.of_all()
    check_divided(model, lambda: loader.fewest)
    mine: list[Part] = []
    told: list[Part] = []

    def pass_on() -> None:
        ranks = comm.all_gather_object(mine) if on == "all" else comm.gather_object(mine)
        parts = [part for rank in ranks for part in rank]
        mine.clear()
        if into is None:
            told.extend(parts)
        else:
            run_on_main(lambda: _pass_to(into, parts) if parts else None)

    precision = precision or Precision()
    with evaluating(model), torch.no_grad(), precision.autocast():
        for number, micro_batches in enumerate(loader, start=1):
            for batch, indices in zip(micro_batches, loader.samples_read, strict=True):
                mine.append((indices, _rows(predict_fn(model, batch), len(indices))))
            if number % _ROUND == 0:
                pass_on()
    pass_on()
    return None if into is not None else _whole(told)


def _pass_to(into: Callable[[list[int], Any], object], parts: Sequence[Part]) -> None:
    indices, rows = _joined(parts)
    into(indices.tolist(), rows)


def _whole(parts: Sequence[Part]) -> Any:
    """Collective. All predictions together. An error on one rank is raised on all."""
    with agreed():
        return _joined(parts)[1] if parts else None


def _rows(value: Any, n: int, where: str = "") -> Any:
    """The rows in host memory. Raises StepError unless there are `n` rows."""
    found: Any
    if isinstance(value, _ARRAYS) and value.ndim > 0:
        found = value.shape[0]
        value = _copied(value)
    elif isinstance(value, Mapping):
        return {key: _rows(one, n, f"{where}[{key!r}]") for key, one in value.items()}
    elif isinstance(value, tuple):
        return tuple(_rows(one, n, f"{where}[{k}]") for k, one in enumerate(value))
    elif isinstance(value, list):
        found = len(value)
        value = [_copied(one) for one in value]
    else:
        found = f"a {type(value).__name__} without rows"
    if found != n:
        what = f"{found} rows" if isinstance(found, int) else found
        raise StepError(
            f"predict_fn returned {what}{where and f' in {where}'} for a batch of {n}; return a tensor with one row per "
            "sample, a list with one entry per sample, or a mapping or tuple of these"
        )
    return value


def _copied(value: Any) -> Any:
    """In host memory of its own: the function may overwrite its array, or return a small view of a large one."""
    if isinstance(value, torch.Tensor):
        if value.is_cpu:
            return value.clone(memory_format=torch.contiguous_format)  # without a graph: gradients are off here
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return with_values(value, {key: _copied(one) for key, one in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copied, value))
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value


def _joined(parts: Sequence[Part]) -> tuple[Indices, Any]:
    """The indices in order, and their rows in the same order."""
    indices = np.concatenate([np.asarray(some, dtype=np.int64) for some, _ in parts])
    rows = [some for _, some in parts]
    if bool((indices[1:] >= indices[:-1]).all()):  # usual on one rank
        return indices, _put_together(rows, None)
    order = np.argsort(indices, kind="stable")
    return indices[order], _put_together(rows, order)


def _put_together(parts: Sequence[Any], order: Indices | None, where: str = "") -> Any:
    """The rows of several batches together, in `order`; None: as they are."""
    first = parts[0]
    found = {(type(part), _shape(part)) for part in parts}
    if len(found) > 1:
        kinds = sorted(f"{kind.__name__} {tuple(shape) if isinstance(shape, tuple) else shape}" for kind, shape in found)
        raise StepError(
            f"predict_fn returned different shapes or types for different batches{where and f', in {where}'}: "
            f"{' and '.join(kinds[:3])}; return rows of uneven length as a list, one per sample: list(rows), or "
            "[row[:n] for row, n in zip(rows, lengths)]"
        )
    if isinstance(first, dict):
        return {key: _put_together([part[key] for part in parts], order, f"{where}[{key!r}]") for key in first}
    if isinstance(first, tuple):
        return tuple(_put_together([part[k] for part in parts], order, f"{where}[{k}]") for k in range(len(first)))
    if isinstance(first, list):
        joined = [row for part in parts for row in part]
        return joined if order is None else [joined[k] for k in order.tolist()]
    if isinstance(first, torch.Tensor):
        whole = torch.cat(list(parts))
        return whole if order is None else whole[torch.from_numpy(order)]
    rows = np.concatenate(parts)
    return rows if order is None else rows[order]


def _shape(part: Any) -> Any:
    """What must be equal in all batches."""
    if isinstance(part, _ARRAYS):
        return part.shape[1:]
    if isinstance(part, dict):
        return tuple(sorted(map(repr, part)))
    return len(part) if isinstance(part, tuple) else ()
