"""What a training run is made of, as actions see it and checkpoints keep it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from rankwise.errors import ConfigError
from rankwise.host.arguments import Argument, takes


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
    """Optimizer steps done since the beginning of the run, over all its attempts."""

    epoch: int = 0
    """Passes over the data that are complete."""

    epoch_ended: bool = False
    """Whether the step just done was the last of its epoch."""

    steps_left_out: int = 0
    """Steps whose gradient was not finite, or over nothing: the optimizer did not move."""

    left_out: bool = False
    """Whether the step just done was one of them."""

    last: bool = False
    """Whether the step just done was the last of the run."""

    stopped: bool = False
    """Whether the script has stopped the run after this step, by `stop`: the same command does not begin again."""

    stop_reason: str = ""
    """Why the script has stopped it, in its own words; that of the lowest rank that gave one."""

    clock_s: float = 0.0
    """Seconds since this attempt began, as the main rank's clock had it at the last log interval; equal on all ranks."""

    metrics: dict[str, float] = field(default_factory=dict)
    """The newest reduced figures (loss, eval_loss, ...): equal on all ranks."""

    measured: dict[str, int] = field(default_factory=dict)
    """The step of which each of them is."""

    _noted: dict[str, float] = field(default_factory=dict, repr=False)
    _noted_at: int = -1
    _measured_at: int = -1

    on_stop: Callable[[], None] | None = field(default=None, repr=False)
    """Who carries a call of `stop` to the other ranks: the Trainer."""

    @takes(reason=Argument(lambda value: isinstance(value, str), "the reason, a string"))
    def stop(self, reason: str = "") -> None:
        """From an action, on any rank: all ranks stop after the same step, after this one if all call it now. Everything is
        saved, `fit` returns, and the same command prints the reason and does not train again. Raises ConfigError where no
        Trainer is at work.
        """
        if self.on_stop is None:
            raise ConfigError(
                "state.stop() works only in the actions of a Trainer while it trains; in your own loop, call stop.ask()"
            )
        self.stop_reason = self.stop_reason or " ".join(reason.split())
        self.on_stop()

    def measure(self, figures: Mapping[str, float]) -> None:
        """Add figures of this step to `metrics`. An action of yours may: the best checkpoint can be chosen by them."""
        self.metrics.update(figures)
        self.measured.update(dict.fromkeys(figures, self.step))
        self._measured_at = self.step

    def note(self, figures: Mapping[str, float]) -> None:
        """Add figures of the moment to `new_metrics`: for logs alone (a learning rate, a share of the time). No checkpoint has
        them."""
        if self._noted_at != self.step:
            self._noted = {}
        self._noted.update(figures)
        self._noted_at = self.step

    @property
    def measured_now(self) -> dict[str, float]:
        """Those of `metrics` that are of this very step."""
        return {name: self.metrics[name] for name, step in self.measured.items() if step == self.step}

    @property
    def new_metrics(self) -> dict[str, float]:
        """All that was measured or noted in this very step, for a log: equal on all ranks, but for shares of the time. Empty in
        most steps."""
        if self._measured_at != self.step != self._noted_at:
            return {}
        return self.measured_now | (self._noted if self._noted_at == self.step else {})

    def state_dict(self) -> dict[str, Any]:
        figures = {"step": self.step, "epoch": self.epoch, "steps_left_out": self.steps_left_out}
        reason = {"stop_reason": self.stop_reason} if self.stopped and self.stop_reason else {}
        return {**figures, "stopped": self.stopped, **reason, "metrics": dict(self.metrics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.epoch = state["epoch"]
        self.steps_left_out = state["steps_left_out"]
        self.stopped = state.get("stopped", False)
        self.stop_reason = state.get("stop_reason", "")
        self.metrics = dict(state["metrics"])
