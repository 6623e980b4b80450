"""The value of a metric in the step that has measured it.

if (value := newly_measured("Plateau", "eval_loss", state)) is not None: ...
"""

from __future__ import annotations

from rankwise.dist import log
from rankwise.errors import ConfigError
from rankwise.host.text import listed
from rankwise.training.state import TrainState


def newly_measured(what: str, metric: str, state: TrainState) -> float | None:
    """The value if this step has measured the metric. Raises ConfigError if nothing has measured it so far, and the step has
    other metrics of the same evaluation."""
    now, evaluation = state.measured_now, metric.rpartition("_")[0]
    others = [name for name in now if evaluation and name.rpartition("_")[0] == evaluation]
    if metric not in state.metrics and others:
        raise ConfigError(f"{what}: nothing measures {metric!r}; the evaluation has measured {listed(others)}")
    if metric not in state.metrics and (evaluated := [name for name in now if name != "loss" and "/" not in name]):
        log.warning_once(
            f"{what} waits for {metric!r}, which nothing has measured so far; this step measured {listed(evaluated)}. To "
            f"follow one of these, give its name: {what}(..., {evaluated[0]!r})"
        )
    return now.get(metric)
