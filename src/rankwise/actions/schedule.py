"""A learning rate scheduler, stepped after each step of the optimizer.

Trainer(..., scheduler=StepLR(optimizer, 1000))         # its Schedule is the first of the actions
"""

from __future__ import annotations

from typing import Any

from rankwise.dist import log
from rankwise.training.state import TrainState


class Schedule:
    """An action. It does not step for a skipped step: fp16 starts with some, and a warm-up would lose its first steps. If the
    script steps the scheduler too, this is reported once."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._after: Any = None  # the scheduler's count after the last step here

    def __call__(self, state: TrainState) -> None:
        if state.skipped:
            return
        if self._after is not None and getattr(self._scheduler, "last_epoch", None) != self._after:
            log.warning_once(
                "the Trainer steps the scheduler after each optimizer step, and the script does too; remove scheduler.step(), "
                "or scheduler=... from the Trainer"
            )
        self._scheduler.step()
        self._after = getattr(self._scheduler, "last_epoch", None)
