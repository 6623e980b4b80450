"""What the steps of a loop have come to, as soon as this is known: at once on a CPU; on a GPU when the next step is prepared.

results = Results(skipped, are_finite, forget, schedule);  results.begin()
results.add(state, sync.step(), micro_batches=2)
results.hear(state)                            # before what depends on it, and before the next step
"""

from __future__ import annotations

from collections.abc import Callable

from rankwise.sync.skipped import SkippedSteps
from rankwise.sync.strategy import LateResult, Shared, StepResult
from rankwise.training.finite import check_rates
from rankwise.training.state import TrainState


class Results:
    """`are_finite`, `forget`: of the losses of `n` micro-batches, before the last `after`. `schedule`: steps the scheduler,
    unless the step was skipped."""

    def __init__(
        self,
        skipped: SkippedSteps,
        are_finite: Callable[[int, int], bool],
        forget: Callable[[int, int], None],
        schedule: Callable[[TrainState], None] | None,
    ) -> None:
        self._skipped, self._are_finite, self._forget, self._schedule = skipped, are_finite, forget, schedule
        self.begin()

    def begin(self) -> None:
        """The loop starts."""
        self._open: tuple[LateResult, int] | None = None
        self._untold: tuple[Shared, bool] | None = None
        self._skipped.begin()

    @property
    def is_open(self) -> bool:
        """Whether it is not known here what the last step has come to."""
        return self._open is not None

    def add(self, state: TrainState, result: StepResult | LateResult, micro_batches: int) -> None:
        """Collective. The step is done; its losses are the last ones."""
        if isinstance(result, LateResult):
            self._open = result, micro_batches
        else:
            self._take(state, result, micro_batches, 0)
            if self._untold is not None:
                self.hear(state)

    def settle(self, state: TrainState, after: int = 0) -> None:
        """Local. Wait for the result of the last step. `after`: the number of losses since."""
        if self._open is not None:
            (result, micro_batches), self._open = self._open, None
            self._take(state, result.read(), micro_batches, after)
            check_rates(state)  # the next step has no action before it that does

    def hear(self, state: TrainState, after: int = 0) -> None:
        """Collective. The same, and report a step that was skipped. Raises StepError on all ranks if too many were."""
        if self._open is not None:
            self.settle(state, after)
        if self._untold is not None:
            (shared, is_finite), self._untold = self._untold, None
            self._skipped.report(state, shared, is_finite)

    def _take(self, state: TrainState, result: StepResult, micro_batches: int, after: int) -> None:
        shared = result.shared
        is_finite = shared is None or shared.finite or self._are_finite(micro_batches, after)
        if not result.mine.stepped:
            self._forget(micro_batches, after)  # the NaN of a skipped step would make the whole interval NaN
        if shared is not None and shared.finite and shared.total > 0:
            self._skipped.in_a_row = 0
        elif shared is not None:
            self._skipped.count(state, shared)
            self._untold = shared, is_finite
        if self._schedule is not None:
            self._schedule(state)
