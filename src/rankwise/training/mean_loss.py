"""Finds a mean loss where a sum is needed: that of a step function, by comparing the first micro-batch with its halves, and
that of a loop without a Trainer, by its last operation.

warn_of_means(forward, model, micro_batches)          # before the first step; changes nothing
warn_of_mean(loss, count)                             # before the first backward pass
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankwise.dist import comm, log, private_names
from rankwise.dist.device import each_tensor, tensors_in, with_values
from rankwise.errors import StepError
from rankwise.training.model import attributes_kept, buffers_kept, is_synced, unmoved

Forward = Callable[[nn.Module, Any], tuple[torch.Tensor, float | torch.Tensor]]

_NEAR = 0.1  # dropout makes passes differ

_has_warned = False  # one of the two warnings is enough


def warn_of_mean(loss: torch.Tensor, count: float | torch.Tensor) -> None:
    """Local. A mean of several samples is as large as one of them, so the gradient would be too small by the count."""
    global _has_warned
    if not _has_warned and private_names.is_mean(loss) and (n := float(count)) > 1:
        _has_warned = True
        log.warn(
            f"the loss for backward() is a mean, and its count is {n:g}, so the gradient is {n:g} times too small; give the "
            'sum (reduction="sum") with that count'
        )


def warn_of_means(forward: Forward, model: nn.Module, micro_batches: Sequence[Any]) -> None:
    """Collective, because `forward` may be. Only if each rank has a micro-batch that can be cut in two along its samples.
    Raises StepError for a step function that calls backward()."""
    global _has_warned
    parts: list[Any] = []
    with contextlib.suppress(Exception):  # what cannot be cut, such as a sparse tensor, is not checked
        # Copies: step functions often remove the labels from a batch, or scale its tensors in place.
        parts = [_copy(micro_batches[0]), *halves(_copy(micro_batches[0]))] if micro_batches else []
    if is_synced(model) or not comm.all_agree(len(parts) == 3):
        return
    found = []
    try:
        with unmoved(model), buffers_kept(model), attributes_kept(model), torch.no_grad():
            for part in parts:
                total, count = forward(model, part)
                found.append((float(total), float(count)))
    except Exception as error:  # a function that does not accept half a batch is not checked
        if _is_of_backward(error):
            raise StepError(
                "step_fn calls backward(); remove the call, and return (loss sum, count): the Trainer computes the gradients "
                "(for those of an input, torch.autograd.grad(loss, x))"
            ) from None
    if len(found) == 3 and comm.is_main() and is_mean(*found):
        _has_warned = True
        (whole, n), (first, _), (second, _) = found
        log.warn(
            f"the loss of step_fn seems to be a mean, and its count is {n:g}: the loss is {whole:.4g} for the first "
            f"micro-batch, and {first:.4g} and {second:.4g} for its halves; return the sum over the samples "
            '(reduction="sum") with that count'
        )
    elif len(found) == 3 and comm.is_main() and found[0][1] != 0 and len({count for _, count in found}) == 1:
        log.warn(
            f"step_fn returns the count {found[0][1]:g} for a micro-batch and for each half of it, so the losses of ranks "
            "with unequal parts do not add up to the mean; return the sum over the samples, "
            'reduction="sum", and the number of samples'
        )


def _copy(batch: Any) -> Any:
    return each_tensor(batch, torch.clone)


def _is_of_backward(error: Exception) -> bool:
    """Whether `loss.backward()` has raised this error, because this pass computes no gradients."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name == "backward" and Path(frame.filename).name == "_tensor.py" for frame in frames)


def is_mean(whole: tuple[float, float], first: tuple[float, float], second: tuple[float, float]) -> bool:
    """Each argument is (loss, count). Whether the counts add up, but the losses are averaged."""
    (loss, n), (a, k), (b, m) = whole, first, second
    if n != k + m or not n:
        return False
    mean = (a * k + b * m) / n
    return abs(loss - mean) <= _NEAR * abs(mean) and abs(loss - (a + b)) > 3 * _NEAR * abs(loss)


def halves(batch: Any) -> list[Any]:
    """Two halves; empty if a batch has fewer than two samples, no tensor with one row per sample, or other tensors too: which
    rows belong to which sample is not known then."""
    sizes = {len(tensor) for tensor in tensors_in(batch) if tensor.dim() > 0}
    if len(sizes) != 1 or (n := sizes.pop()) < 2:
        return []
    return [_cut(batch, n, slice(None, n // 2)), _cut(batch, n, slice(n // 2, None))]


def _cut(value: Any, n: int, part: slice) -> Any:
    if isinstance(value, torch.Tensor):
        return value[part] if value.dim() > 0 and len(value) == n else value
    if isinstance(value, Mapping):
        return with_values(value, {key: _cut(each, n, part) for key, each in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(each, n, part) for each in value))
    if isinstance(value, list | tuple):
        if len(value) == n and not any(isinstance(each, torch.Tensor | Mapping | list | tuple) for each in value):
            return value[part]
        return type(value)(_cut(each, n, part) for each in value)
    return value
