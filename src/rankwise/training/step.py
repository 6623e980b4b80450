"""The result of a step function: a sum of losses, and the number of samples or tokens in the sum.

loss_sum, count = loss_and_count(step_fn(model, batch))
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from rankwise.errors import StepError

_PLAIN = (int, float)  # to ask for a Real takes 3 us


def loss_and_count(result: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
    """Returns `result` if it is such a pair. Otherwise raises StepError, which says what the result is and shows an example."""
    if (
        isinstance(result, tuple)
        and len(result) == 2
        and isinstance(result[0], torch.Tensor)
        and (isinstance(result[1], _PLAIN) or _is_count(result[1]))
    ):
        return result
    raise StepError(
        f"step_fn returned {_described(result)}; return (loss sum, count), for example "
        '(F.cross_entropy(model(x), y, reduction="sum"), len(y))'
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _described(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)} ({', '.join(map(_described, result))})"
    return f"Tensor of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
