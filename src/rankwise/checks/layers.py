"""The first layer that mixes the samples of a batch.

mixing = first_mixing(model, run, whole, parts);  mixing.name, mixing.layer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


class Mixing(NamedTuple):
    name: str
    """As in `named_modules`."""

    layer: nn.Module

    def __str__(self) -> str:
        return f"{type(self.layer).__name__} {self.name!r}" if self.name else type(self.layer).__name__


def first_mixing(
    model: nn.Module, run: Callable[[Any], object], whole: Any, parts: Sequence[Any], tolerance: float
) -> Mixing | None:
    """The first layer whose output for `whole` differs from its outputs for `parts`, in the order in which forward passes end.

    `run(batch)` calls the model. None if no output differs (or the batch is not the first dimension).
    """
    at_once = _outputs(model, run, whole)
    pieces = [_outputs(model, run, part) for part in parts]
    for position, (name, layer, output) in enumerate(at_once):
        mine = [outputs[position][2] for outputs in pieces if position < len(outputs) and outputs[position][1] is layer]
        if len(mine) < len(pieces) or output.dim() == 0:
            continue
        if any(piece.dim() == 0 or piece.shape[1:] != output.shape[1:] for piece in mine):
            continue
        joined = torch.cat(mine)
        if joined.shape != output.shape or not output.is_floating_point():
            continue
        scale = float(output.abs().max()) if output.numel() else 0.0
        if scale and not float((joined - output).abs().max()) <= tolerance * scale:
            return Mixing(name, layer)
    return None


def _outputs(model: nn.Module, run: Callable[[Any], object], batch: Any) -> list[tuple[str, nn.Module, torch.Tensor]]:
    """(name, layer, output) of each call of a layer, in the order in which the calls ended."""
    found: list[tuple[str, nn.Module, torch.Tensor]] = []

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                found.append((name, module, output.detach().clone()))

        return hook

    hooks = [module.register_forward_hook(after(name)) for name, module in model.named_modules()]
    try:
        run(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found
