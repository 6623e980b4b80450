"""torch's ReduceLROnPlateau, stepped on a metric.

Trainer(..., evaluate=valid_set, actions=[Plateau(ReduceLROnPlateau(optimizer), "eval_loss")])
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from rankwise.actions.measured import Measured
from rankwise.host.arguments import TEXT, instance, takes
from rankwise.training import optimizer as optimizers
from rankwise.training.state import TrainState


class Plateau:
    """An action: step the scheduler with each measurement of `metric`. Saved and resumed under `name`, by default that of the
    Trainer's scheduler: beside one (a warm-up), give another name. `Trainer(scheduler=ReduceLROnPlateau(...))` uses one on
    `eval_loss`."""

    @takes(scheduler=instance(ReduceLROnPlateau, "torch's ReduceLROnPlateau"), metric=TEXT, name=TEXT)
    def __init__(self, scheduler: ReduceLROnPlateau, metric: str = "eval_loss", name: str = "scheduler") -> None:
        self.scheduler = scheduler
        self.metric, self.name = metric, name
        self._measured = Measured("Plateau", metric)

    def attach(self, trainer: Any) -> None:
        """Raises ConfigError for the scheduler of another optimizer: it would change nothing."""
        optimizers.check(trainer.state.model, trainer.state.optimizer, self.scheduler)

    def is_due(self, state: TrainState) -> bool:
        """Whether it looks at this step."""
        return self._measured.is_new(state)

    def __call__(self, state: TrainState) -> None:
        if (value := self._measured.newly(state)) is not None:
            self.scheduler.step(value)

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)
