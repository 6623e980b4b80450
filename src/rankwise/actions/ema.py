"""An exponential moving average of the weights, which is often better than the weights of the last step.

ema = EMA(model, decay=0.999)
Trainer(..., actions=[ema, Evaluate(data, model=ema, name="ema")])
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rankwise.errors import ConfigError
from rankwise.host.arguments import TEXT, Argument, instance, is_number, takes
from rankwise.training.model import give_own_elements
from rankwise.training.state import TrainState

_DECAY = Argument(lambda value: is_number(value) and 0 < value < 1, "a number between 0 and 1, near 1: 0.999")


class EMA:
    """An action: after each step `average = decay * average + (1 - decay) * parameter`; the first step copies. Buffers are
    copied. A skipped step changes nothing. Saved and resumed under `name`.

    torch.optim.swa_utils computes the average. All ranks have the same average, except with a strategy whose replicas differ
    for a while (local SGD): then each rank averages its own replica, an evaluation uses the mean over the ranks, and a resumed
    run starts with the average of rank 0.
    """

    @takes(model=instance(nn.Module, "a torch.nn.Module"), decay=_DECAY, name=TEXT)
    def __init__(self, model: nn.Module, decay: float = 0.999, name: str = "ema") -> None:
        self.name = name
        give_own_elements(model)
        self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]
        self._shapes = [p.shape for p in model.parameters()]

    @property
    def model(self) -> nn.Module:
        """The averaged module: a copy of the model."""
        return self._averaged.module

    @property
    def is_empty(self) -> bool:
        """Whether it has averaged no step so far."""
        return not int(self._averaged.n_averaged)

    def attach(self, trainer: Any) -> None:
        self._averaged.to(trainer.device)

    def __call__(self, state: TrainState) -> None:
        if state.skipped:
            return
        if [p.shape for p in state.model.parameters()] != self._shapes:
            raise ConfigError(
                f"the action {self.name}: the model's parameters have changed since EMA(model) was created; create it after "
                "the last layer is replaced"
            )
        if [b.shape for b in self.model.buffers()] != [b.shape for b in state.model.buffers()]:
            self._reshape_buffers(state.model)
        self._averaged.update_parameters(state.model)

    def _reshape_buffers(self, model: nn.Module) -> None:
        """A table may grow with the longest sequence, and may be None before the first pass."""
        own = dict(self.model.named_modules())
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if prefix in own and getattr(getattr(own[prefix], name, None), "shape", None) != buffer.shape:
                    setattr(own[prefix], name, buffer.detach().clone())

    def state_dict(self) -> dict[str, Any]:
        return self._averaged.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averaged.load_state_dict(state)
