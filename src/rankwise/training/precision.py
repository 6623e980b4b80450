"""The precision of the forward pass, and the loss scale for fp16.

precision = Precision.of("bf16", device)
with precision.autocast(): ...
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from rankwise.errors import ConfigError

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """`dtype` is the type for autocast; None leaves the model as it is."""

    name: str
    dtype: torch.dtype | None
    device_type: str

    @classmethod
    def of(cls, name: str, device: torch.device) -> Precision:
        """`name`: fp32, bf16, or fp16 (with a loss scale)."""
        if name not in _DTYPES:
            raise ConfigError(f"precision={name!r} is unknown; choose one of {', '.join(_DTYPES)}")
        return cls(name, _DTYPES[name], device.type)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """For the forward pass and the loss."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, self.dtype)


class LossScale:
    """The factor on the loss that keeps small fp16 gradients above zero (Micikevicius et al. 2018, arXiv:1710.03740).

    It is halved when the reduced gradient of a step is not finite, and doubled after `growth_interval` finite ones in a row.
    Every rank has the same reduced gradient, so all ranks have the same scale without a message.
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
