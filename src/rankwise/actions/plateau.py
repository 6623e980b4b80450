"""torch's ReduceLROnPlateau, stepped after each evaluation on a metric.

check_metric(scheduler, metric, evaluates=True, by_eval_fn=False, acts=False)
actions.append(step_plateau(scheduler, "eval_loss"))
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from rankwise.actions.periodic import Action
from rankwise.errors import ConfigError
from rankwise.training.state import TrainState


def step_plateau(scheduler: ReduceLROnPlateau, metric: str) -> Action:
    """An action."""

    def step(state: TrainState) -> None:
        if (value := state.metrics_now().get(metric)) is not None:
            scheduler.step(value)

    return step


def check_metric(scheduler: Any, metric: str | None, evaluates: bool, by_eval_fn: bool, acts: bool) -> None:
    """Raises ConfigError for a metric that steps nothing, or that nothing will measure."""
    if isinstance(scheduler, ReduceLROnPlateau):
        check_plateau(metric, evaluates, by_eval_fn, acts)
    elif metric is not None:
        raise ConfigError("scheduler_metric is what a ReduceLROnPlateau is stepped on; leave it out for another scheduler")


def check_plateau(metric: str | None, evaluates: bool, by_eval_fn: bool, acts: bool) -> None:
    """Raises ConfigError for a metric that nothing will measure."""
    name = metric or "eval_loss"
    if acts:  # an action may measure anything
        return
    if not evaluates or not name.startswith("eval_"):
        raise ConfigError(
            f"ReduceLROnPlateau is stepped on {name} after each evaluation; give eval_data=..., and a scheduler_metric that it "
            "measures: eval_loss, or eval_ and a name that eval_fn returns"
        )
    if by_eval_fn and metric is None:
        raise ConfigError("which metric steps ReduceLROnPlateau? Give scheduler_metric='eval_...', as eval_fn names it")
