"""Stopping when a metric no longer improves.

Trainer(..., evaluate=valid_set, actions=[EarlyStopping("eval_loss", patience=5)])
"""

from __future__ import annotations

import math
from typing import Any

from rankwise.actions.measured import Measured
from rankwise.host.arguments import FLAG, FROM_ONE, NOT_NEGATIVE, TEXT, takes
from rankwise.training.metric import is_larger_better
from rankwise.training.state import TrainState


class EarlyStopping:
    """An action: stop the run after `patience` measurements of `metric` in a row that do not improve on the best one by more
    than `min_delta`. Give `larger_is_better` unless the metric is a loss; nan never improves. All ranks stop after the same
    step, everything is saved, and the reason is printed. Saved and resumed under `name`.
    """

    @takes(metric=TEXT, patience=FROM_ONE, larger_is_better=FLAG.or_none, min_delta=NOT_NEGATIVE, name=TEXT)
    def __init__(
        self,
        metric: str,
        patience: int = 5,
        larger_is_better: bool | None = None,
        min_delta: float = 0.0,
        name: str = "early_stopping",
    ) -> None:
        self.metric, self.patience, self.min_delta, self.name = metric, patience, min_delta, name
        self._sign = -1.0 if is_larger_better(f"EarlyStopping({metric!r})", metric, larger_is_better) else 1.0
        self._best = math.inf
        self._worse = 0
        self._measured = Measured("EarlyStopping", metric)

    def is_due(self, state: TrainState) -> bool:
        """Whether it looks at this step."""
        return self._measured.is_new(state)

    def __call__(self, state: TrainState) -> None:
        value = self._measured.newly(state)
        if value is None:
            return
        if self._sign * value < self._best - self.min_delta:
            self._best, self._worse = self._sign * value, 0
            return
        self._worse += 1
        if self._worse >= self.patience:
            best = f"{self._sign * self._best:.4g}" if math.isfinite(self._best) else "none was finite"
            by = f" by more than {self.min_delta:g}" if self.min_delta else ""
            state.stop(f"{self.metric} has not improved{by} in {self.patience} measurements; best {best}")

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "best": self._best, "worse": self._worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["metric"] == self.metric:  # nothing is known yet about another metric
            self._best, self._worse = state["best"], state["worse"]
