"""The precision of the forward pass, and the loss scale for fp16.

precision = Precision("fp16")
sync.attach(model, optimizer, loss_scale=precision.new_loss_scale())
with precision.autocast(): ...
"""

from __future__ import annotations

import contextlib
import functools
import os

import torch

from rankwise.dist import accelerator
from rankwise.host.arguments import ABOVE_ZERO, FROM_ONE, one_of, takes

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISION = one_of(*_DTYPES)


class Precision:
    """What the forward pass and the loss compute in: "fp32" leaves the model as it is; "bf16" and "fp16" are torch's autocast.

    fp16 needs a loss scale, which keeps small gradients above zero: it starts with `loss_scale`, is halved when a gradient is
    not finite, and doubled after `growth_interval` finite steps. In your own loop: `sync.attach(model, optimizer,
    loss_scale=precision.new_loss_scale())`, and `with precision.autocast():` around the forward pass and the loss.
    `Trainer(precision=...)` and `predict(precision=...)` accept one.
    """

    @takes(name=PRECISION, loss_scale=ABOVE_ZERO, growth_interval=FROM_ONE)
    def __init__(self, name: str = "fp32", *, loss_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.name = name
        self.dtype = _DTYPES[name]
        self._loss_scale, self._growth_interval = loss_scale, growth_interval

    @functools.cached_property
    def _device_type(self) -> str:
        found = accelerator.current(os.environ)
        return found.type if found is not None else "cpu"

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """For the forward pass and the loss, on this rank's kind of device."""
        return contextlib.nullcontext() if self.dtype is None else torch.autocast(self._device_type, self.dtype)

    def new_loss_scale(self) -> LossScale | None:
        """For `attach`; None if no loss scale is needed."""
        return LossScale(self._loss_scale, self._growth_interval) if self.dtype is torch.float16 else None


class LossScale:
    """The factor on the loss that keeps small fp16 gradients above zero (Micikevicius et al. 2018, arXiv:1710.03740).

    It is halved when the reduced gradient of a step is not finite, and doubled after `growth_interval` finite gradients in a
    row. Every rank has the same reduced gradient, so all ranks have the same scale without a message.
    """

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale = scale
        self._growth_interval = growth_interval
        self._finite_steps = 0

    def update(self, finite: bool) -> None:
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
            self._finite_steps = 0
            return
        self._finite_steps += 1
        if self._finite_steps == self._growth_interval:
            self.scale *= 2
            self._finite_steps = 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "finite_steps": self._finite_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]
        self._finite_steps = int(state["finite_steps"])
