"""What happens between two steps: callables of the TrainState, called in the order of a list after each optimizer step.

    actions = [every(my_plot, steps=100), every(my_upload, seconds=600)]

An action is called on all ranks, so it may communicate. It decides by what all ranks hold alike (the step, the agreed clock).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rankwise.dist import comm
from rankwise.errors import ConfigError
from rankwise.telemetry import Meters, Progress, TimeBreakdown
from rankwise.telemetry.meters import mean
from rankwise.telemetry.writers import Writer
from rankwise.training.state import TrainState

Action = Callable[[TrainState], None]

_SLOW_LINE_S = 60.0  # a log interval that takes longer than this is not waited for


def every(
    action: Action,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    seconds: float | None = None,
    at_end: bool = False,
) -> Every:
    """`action`, when any of the triggers is due: every so many steps, epochs or seconds, and after the last step.

    Seconds are those of the main rank's clock. Among the actions of a Trainer: at the end of the step in which they are over,
    on all ranks after the same step. Elsewhere (within another action, or where nodes do not reach each other): at the next log
    interval.
    """
    given = [n for n in (steps, epochs, seconds) if n is not None]
    if not given and not at_end:
        raise ConfigError("every(action): say when, for example every(action, steps=100)")
    if any(n < 0 for n in given) or steps == 0 or epochs == 0:
        raise ConfigError(f"every(steps={steps}, epochs={epochs}, seconds={seconds}): give numbers above 0")
    return Every(action, steps, epochs, seconds, at_end)


class Every:
    """An action and its triggers; made by `every`. It runs once a step at most."""

    def __init__(self, action: Action, steps: int | None, epochs: int | None, seconds: float | None, at_end: bool) -> None:
        self._action = action
        self._steps, self._epochs, self._at_end = steps, epochs, at_end
        self.seconds = seconds
        self.by_gate = False
        """Whether somebody calls `run` when the seconds are over."""

        self._last_s = 0.0
        self._ran_at = -1

    def __call__(self, state: TrainState) -> None:
        due = (
            (self._steps is not None and state.step % self._steps == 0)
            or (self._epochs is not None and state.epoch_ended and state.epoch % self._epochs == 0)
            or (self._at_end and state.last)
        )
        if self.seconds is not None and not self.by_gate and state.clock_s - self._last_s >= self.seconds:
            self._last_s = state.clock_s
            due = True
        if due:
            self._ran_at = state.step
            self._action(state)

    def run(self, state: TrainState) -> None:
        """The seconds are over."""
        if self._ran_at != state.step:
            self._ran_at = state.step
            self._action(state)


class Log:
    """Reduces the meters each log interval and tells what they say: figures to the writers, lines and progress to people."""

    def __init__(
        self,
        meters: Meters,
        breakdown: TimeBreakdown,
        progress: Progress,
        writers: Sequence[Writer],
        *,
        every_steps: int,
        line_every_s: float = 15.0,
        samples: Callable[[], int] | None = None,
    ) -> None:
        """`samples`: how many all ranks have taken so far."""
        self._samples = samples
        self._samples_before = 0
        self._meters = meters
        self._breakdown = breakdown
        self._epoch_time = TimeBreakdown(breakdown.sources)
        self._progress = progress
        self._writers = writers
        self._every_steps = every_steps
        self._line_every_s = line_every_s
        self._began = self._last_line = time.monotonic()
        self._epoch: dict[str, tuple[float, float]] = {}
        self._epoch_steps = 0
        self._last_step = -1
        self._text = ""

    def begin(self) -> None:
        """The loop starts now: what was before is not its time."""
        self._breakdown.restart()
        self._epoch_time.restart()
        self._began = self._last_line = time.monotonic()
        self._samples_before = self._samples() if self._samples is not None else 0

    def __call__(self, state: TrainState) -> None:
        self._epoch_steps += 1
        if state.step % self._every_steps == 0 or state.epoch_ended or state.last:
            self.reduce(state)
        if comm.rank() == 0:
            self._progress.show(state.step, f"epoch {state.epoch + 1}", self._text)
        if state.epoch_ended:
            self._end_epoch(state)
        elif time.monotonic() - self._last_line >= max(self._line_every_s, _SLOW_LINE_S):
            self._say_line(state, "")  # without metrics: they are reduced together with the other ranks, at a log interval

    def reduce(self, state: TrainState) -> None:
        """Collective. Bring the figures up to this step; nothing is pending afterwards."""
        if state.step == self._last_step:
            return
        self._last_step = state.step
        sums, state.clock_s = self._meters.reduce(time.monotonic() - self._began)
        for name, (total, count) in sums.items():
            before = self._epoch.get(name, (0.0, 0.0))
            self._epoch[name] = (before[0] + total, before[1] + count)
            state.measure({name: mean(total, count)})
        span = self._breakdown.since_last()
        figures = {**{name: state.metrics[name] for name in sums}, "lr": _rate_of(state)}
        if self._samples is not None and span.elapsed_s:
            taken = self._samples()
            figures["samples_per_s"] = (taken - self._samples_before) / span.elapsed_s
            self._samples_before = taken
        shares = {f"share/{name}": s / span.elapsed_s for name, s in span.parts_s.items() if span.elapsed_s}
        for writer in self._writers:
            writer.write(state.step, {"epoch": state.epoch, "clock_s": state.clock_s, **figures, **shares})
        self._text = ", ".join(f"{name} {state.metrics[name]:.4g}" for name in sums)
        if "samples_per_s" in figures:
            self._text += f", {figures['samples_per_s']:.4g} samples/s"
        if time.monotonic() - self._last_line >= self._line_every_s and not state.epoch_ended:
            self._say_line(state, f"{self._text}, ")

    def _say_line(self, state: TrainState, metrics: str) -> None:
        self._last_line = time.monotonic()
        self._progress.say(f"{self._progress.place(state.step)}: {metrics}{self._pace(state)}")

    def _pace(self, state: TrainState) -> str:
        return f"lr {_rate_of(state):.4g}, {self._progress.pace(state.step)}"

    def _end_epoch(self, state: TrainState) -> None:
        means = ", ".join(f"{name} {mean(*pair):.4g}" for name, pair in self._epoch.items())
        span = self._epoch_time.since_last()
        self._progress.say(
            f"epoch {state.epoch}: {self._epoch_steps} steps, {means}, {span.text()}; "
            f"{self._progress.place(state.step)}, {self._pace(state)}"
        )
        self._last_line = time.monotonic()
        self._epoch = {}
        self._epoch_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": {name: list(pair) for name, pair in self._epoch.items()}, "epoch_steps": self._epoch_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch = {name: (pair[0], pair[1]) for name, pair in state["epoch"].items()}
        self._epoch_steps = state["epoch_steps"]


def _rate_of(state: TrainState) -> float:
    """The learning rate of the first parameter group."""
    return float(state.optimizer.param_groups[0]["lr"])
