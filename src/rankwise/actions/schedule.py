"""A learning rate scheduler, stepped after each step of the optimizer.

Trainer(..., scheduler=StepLR(optimizer, 1000))         # its Schedule is the first of the actions
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import OneCycleLR

from rankwise.dist import log
from rankwise.errors import ConfigError
from rankwise.training.state import TrainState


def check_schedule(scheduler: Any, steps: int) -> None:
    """Raises ConfigError for a scheduler that would raise before `steps` steps (OneCycleLR), so that no step is lost."""
    last = getattr(scheduler, "total_steps", None)
    if isinstance(scheduler, OneCycleLR) and isinstance(last, int) and last < steps:
        raise ConfigError(
            f"OneCycleLR(total_steps={last}) ends before the training, which has {steps} steps: give total_steps={steps}. A "
            f"run that began with {last} steps cannot be made longer: start a new run with --fresh or --name NAME"
        )


class Schedule:
    """An action. It does not step after a skipped step: fp16 starts with some, and a warm-up would lose its first steps. If the
    script also steps the scheduler, this is reported once."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._after: tuple[int, Any] | None = None  # the step and the scheduler's count after the last step of this action

    def __call__(self, state: TrainState) -> None:
        if state.skipped:
            return
        count = getattr(self._scheduler, "last_epoch", None)
        if self._after is not None and self._after[0] == state.step - 1 and self._after[1] != count:
            log.warning_once(
                "the Trainer steps the scheduler after each optimizer step, and the script does too; remove scheduler.step(), "
                "or scheduler=... from the Trainer"
            )
        try:
            self._scheduler.step()
        except ValueError as error:
            rates, groups = len(getattr(self._scheduler, "base_lrs", ())), len(state.optimizer.param_groups)
            if rates == groups:
                raise
            raise ConfigError(
                f"{type(self._scheduler).__name__} was made for {rates} parameter groups, and the optimizer has {groups} now "
                f"({error}): give the optimizer all groups from the start, and freeze them with requires_grad_(False)"
            ) from None
        self._after = state.step, getattr(self._scheduler, "last_epoch", None)
