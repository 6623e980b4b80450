"""What a training run is made of, as actions see it and checkpoints keep it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from rankwise.errors import ConfigError


class Stateful(Protocol):
    """Whatever can be saved and loaded; torch's own convention."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass
class TrainState:
    """One training run between two steps."""

    model: nn.Module
    optimizer: Optimizer

    parts: dict[str, Stateful] = field(default_factory=dict)
    """All that a checkpoint keeps, by name: model, optimizer, loader, ... and `train`, this object's own figures."""

    step: int = 0
    """Optimizer steps done since the beginning of the run, over all its lives."""

    epoch: int = 0
    """Passes over the data that are complete."""

    epoch_ended: bool = False
    """Whether the step just done was the last of its epoch."""

    steps_left_out: int = 0
    """Steps whose gradient was not finite, or over nothing: the optimizer did not move."""

    last: bool = False
    """Whether the step just done was the last of the run."""

    stopped: bool = False
    """Whether the script has stopped the run after this step, by `stop`: the same command does not begin again."""

    clock_s: float = 0.0
    """Seconds since this life began, as the main rank's clock had it at the last log interval; equal on all ranks."""

    metrics: dict[str, float] = field(default_factory=dict)
    """The newest reduced figures (loss, eval_loss, ...): equal on all ranks."""

    measured: dict[str, int] = field(default_factory=dict)
    """The step of which each of them is."""

    on_stop: Callable[[], None] | None = field(default=None, repr=False)
    """Who carries a call of `stop` to the other ranks: the Trainer."""

    def stop(self) -> None:
        """From an action, on any rank: all ranks stop after the same step, after this one if all call it now. Everything is
        saved, `fit` returns, and the same command does not train again. Raises ConfigError where no Trainer is at work.
        """
        if self.on_stop is None:
            raise ConfigError("state.stop() is for the actions of a Trainer while it trains; in your own loop: stop.ask()")
        self.on_stop()

    def measure(self, figures: Mapping[str, float]) -> None:
        """Add figures of this step to `metrics`. An action of yours may: the best checkpoint can be chosen by them."""
        self.metrics.update(figures)
        self.measured.update(dict.fromkeys(figures, self.step))

    def metrics_now(self) -> dict[str, float]:
        """Those of `metrics` that are of this very step."""
        return {name: self.metrics[name] for name, step in self.measured.items() if step == self.step}

    def state_dict(self) -> dict[str, Any]:
        figures = {"step": self.step, "epoch": self.epoch, "steps_left_out": self.steps_left_out}
        return {**figures, "stopped": self.stopped, "metrics": dict(self.metrics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.epoch = state["epoch"]
        self.steps_left_out = state["steps_left_out"]
        self.stopped = state.get("stopped", False)
        self.metrics = dict(state["metrics"])
