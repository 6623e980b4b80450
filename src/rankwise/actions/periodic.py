"""Actions with triggers: functions of the TrainState, called in the order of a list after each optimizer step.

    actions = [every(my_plot, steps=100), every(my_upload, seconds=600)]

An action is called on all ranks, so it may communicate. It must decide by values that are the same on all ranks (the step, the
agreed clock).
"""

from __future__ import annotations

from collections.abc import Callable

from rankwise.errors import ConfigError
from rankwise.host.arguments import FLAG, FROM_ONE, FUNCTION, NOT_NEGATIVE, takes
from rankwise.training.state import TrainState

Action = Callable[[TrainState], None]


@takes(action=FUNCTION, steps=FROM_ONE.or_none, epochs=FROM_ONE.or_none, seconds=NOT_NEGATIVE.or_none, at_end=FLAG)
def every(
    action: Action,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    seconds: float | None = None,
    at_end: bool = False,
) -> Every:
    """Call `action` when any trigger is due: at an interval in steps, epochs or seconds, and with `at_end` after the last step,
    also if the script stops the run.

    Seconds are measured by the clock of the main rank. In the actions of a Trainer, `action` runs on all ranks after the same
    step, in its place in the list: at the end of the first step that all ranks begin after the time is over. Elsewhere (inside
    another action, or if nodes cannot reach each other) it runs at the next log interval.
    """
    if steps is None and epochs is None and seconds is None and not at_end:
        raise ConfigError("every(action): say when, for example every(action, steps=100)")
    return Every(action, steps, epochs, seconds, at_end)


class Every:
    """An action and its triggers; created by `every`. It runs at most once per step."""

    def __init__(self, action: Action, steps: int | None, epochs: int | None, seconds: float | None, at_end: bool) -> None:
        self.action = action
        self._do: Action = getattr(action, "evaluate_now", action)  # an Evaluate has intervals of its own
        self._steps, self._epochs, self._at_end = steps, epochs, at_end
        self.seconds = seconds
        self.by_gate = False
        """Whether the gate sets `time_is_over`."""

        self.time_is_over = False
        self._last_s = 0.0
        self._ran_at = -1

    def begin(self, by_gate: bool) -> None:
        """A loop begins, and so does the first interval in seconds."""
        self.by_gate, self.time_is_over, self._last_s, self._ran_at = by_gate, False, 0.0, -1

    def is_due(self, state: TrainState) -> bool:
        """Whether a trigger is."""
        return (
            (self._steps is not None and state.step % self._steps == 0)
            or (self._epochs is not None and state.epoch_ended and state.epoch % self._epochs == 0)
            or (self._at_end and state.last)
            or self.time_is_over
            or self._clock_is_due(state)
        )

    def _clock_is_due(self, state: TrainState) -> bool:
        return self.seconds is not None and not self.by_gate and state.clock_s - self._last_s >= self.seconds

    def __call__(self, state: TrainState) -> None:
        if self.is_due(state):
            if self._clock_is_due(state):
                self._last_s = state.clock_s
            self.time_is_over = False
            self._run(state)

    def at_end(self, state: TrainState) -> None:
        """After a loop that the script has stopped: with `at_end`, call the action, unless it was called after this step."""
        if self._at_end and self._ran_at != state.step:
            self._run(state)

    def _run(self, state: TrainState) -> None:
        self._ran_at = state.step
        self._do(state)
