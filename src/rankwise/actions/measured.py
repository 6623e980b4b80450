"""The value of a metric in the step that has measured it.

metric = Measured("Plateau", "eval_loss")
if (value := metric.newly(state)) is not None: ...      # once per step
"""

from __future__ import annotations

from rankwise.dist import log
from rankwise.errors import ConfigError
from rankwise.host.text import listed
from rankwise.training.state import TrainState


class Measured:
    """A metric that the action `what` follows."""

    def __init__(self, what: str, metric: str) -> None:
        self._what, self._metric = what, metric
        self._without: int | None = None
        """The step of the last call, if it had not measured the metric then."""

    def is_new(self, state: TrainState) -> bool:
        """Whether this step has measured anything."""
        return bool(state.measured_now)

    def newly(self, state: TrainState) -> float | None:
        """The value if this step has measured the metric. Raises ConfigError if nothing has measured it so far, and the step
        has other metrics of the same evaluation. Warns if the last step measured it after this call."""
        what, metric = self._what, self._metric
        now, evaluation = state.measured_now, metric.rpartition("_")[0]
        others = [name for name in now if evaluation and name.rpartition("_")[0] == evaluation]
        if metric not in state.metrics and others:
            raise ConfigError(f"{what}: nothing measures {metric!r}; the evaluation has measured {listed(others)}")
        if metric not in state.metrics and (evaluated := [name for name in now if name != "loss" and "/" not in name]):
            log.warning_once(
                f"{what} waits for {metric!r}, which nothing has measured so far; this step measured {listed(evaluated)}. To "
                f"follow one of these, give its name: {what}(..., {evaluated[0]!r})"
            )
        # A save measures the training loss after all actions, on purpose.
        if metric != "loss" and self._without is not None and state.measured.get(metric) == self._without < state.step:
            log.warning_once(
                f"{what} runs before the action that measures {metric!r}, so it does not see the metric; in actions=[...], put "
                f"{what} after that action"
            )
        value = now.get(metric)
        self._without = state.step if value is None else None
        return value
