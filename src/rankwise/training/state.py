"""The state of a training run, for actions and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from rankwise.errors import ConfigError
from rankwise.host.arguments import Argument, shown, takes

_OF_EACH_LINE = ("life", "step")  # keys of a line of metrics.jsonl


class Stateful(Protocol):
    """An object that can be saved and loaded, by torch's own convention."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass
class TrainState:
    """The state of a training run between two steps; actions get it after each step."""

    model: nn.Module
    optimizer: Optimizer

    parts: dict[str, Stateful] = field(default_factory=dict)
    """Everything that a checkpoint saves, by name: model, optimizer, loader, ..., and `train`, the numbers of this object."""

    step: int = 0
    """Optimizer steps since the start of the run, over all its attempts."""

    epoch: int = 0
    """Complete passes over the data."""

    epoch_ended: bool = False
    """Whether this step was the last of its epoch."""

    steps_left_out: int = 0
    """The number of skipped steps: their gradient was not finite or had no samples, so the optimizer did not step."""

    skipped: bool = False
    """Whether this step was skipped."""

    last: bool = False
    """Whether this step was the last of the run. If the script stops the run, this is known only after the step's actions:
    `every(action, at_end=True)` is called then."""

    stopped: bool = False
    """Whether the script has stopped the run after this step, by `stop`: then the same command does not train again."""

    stop_reason: str = ""
    """The reason that the script gave to `stop`; if several ranks gave one, that of the lowest rank."""

    clock_s: float = 0.0
    """Seconds since the start of this attempt, by the main rank's clock at the last log interval; equal on all ranks."""

    metrics: dict[str, float] = field(default_factory=dict)
    """The newest metrics over all ranks (loss, eval_loss, ...): equal on all ranks."""

    measured: dict[str, int] = field(default_factory=dict)
    """The step at which each metric was measured."""

    _noted: dict[str, float] = field(default_factory=dict, repr=False)
    _noted_at: int = -1
    _measured_at: int = -1

    on_stop: Callable[[], None] | None = field(default=None, repr=False)
    """Set by the Trainer: sends a call of `stop` to the other ranks."""

    @takes(reason=Argument(lambda value: isinstance(value, str), "the reason, a string"))
    def stop(self, reason: str = "") -> None:
        """Call this from an action on any rank: all ranks stop after the same step (after this one if all ranks call it now).
        Everything is saved and `fit` returns. If you run the same command again, it prints the reason and does not train.
        Raises ConfigError if no Trainer is training."""
        if self.on_stop is None:
            raise ConfigError(
                "state.stop() works only in an action of a Trainer while it trains; in your own loop, call stop.ask()"
            )
        self.stop_reason = self.stop_reason or " ".join(reason.split())
        self.on_stop()

    def measure(self, figures: Mapping[str, float]) -> None:
        """Add metrics of this step to `metrics`. Your own actions may call this; `keep_best` can use these metrics."""
        figures = {name: _number(name, value) for name, value in figures.items()}
        self.metrics.update(figures)
        self.measured.update(dict.fromkeys(figures, self.step))
        self._measured_at = self.step

    def note(self, figures: Mapping[str, float]) -> None:
        """Add numbers to `new_metrics` for this step, only for logs (a learning rate, a share of the time). They are not saved
        in checkpoints."""
        if self._noted_at != self.step:
            self._noted = {}
        self._noted.update({name: _number(name, value) for name, value in figures.items()})
        self._noted_at = self.step

    @property
    def measured_now(self) -> dict[str, float]:
        """The metrics that were measured at this step."""
        return {name: self.metrics[name] for name, step in self.measured.items() if step == self.step}

    @property
    def new_metrics(self) -> dict[str, float]:
        """Everything that was measured or noted at this step, for a log: equal on all ranks, except shares of the time. Empty
        in most steps."""
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
        # Of the last `fit` with this object, if there was one:
        self.epoch_ended = self.skipped = self.last = False
        self.clock_s, self.measured, self._measured_at, self._noted_at = 0.0, {}, -1, -1


def _number(name: str, value: Any) -> float:
    """Of a tensor or a number of NumPy, too. Raises ConfigError for anything else."""
    if not isinstance(name, str):
        raise ConfigError(f"the name of the metric {name!r} is not a string; give a name, such as {f'class_{name}'!r}")
    if name in _OF_EACH_LINE:
        raise ConfigError(f"a metric cannot be called {name!r}: each line of metrics.jsonl has this key; give it another name")
    if isinstance(value, int | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"the metric {name!r} is {shown(value)}; give one number") from None
