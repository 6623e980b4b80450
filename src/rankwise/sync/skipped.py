"""Steps that are skipped on all ranks: counted, the first ones printed; too many in a row stop the run.

skipped = SkippedSteps(weights, progress.say);  skipped.begin();  skipped.add(state, result.shared)
"""

from __future__ import annotations

from collections.abc import Callable

from rankwise.dist import comm
from rankwise.errors import StepError
from rankwise.host.text import numbered
from rankwise.sync.strategy import Shared
from rankwise.training.finite import Weights
from rankwise.training.state import TrainState

_MOST_IN_A_ROW = 100  # more than this is not an accident
_MOST_RANKS = 8
_PRINTED = 3  # the first ones are printed one by one


class SkippedSteps:
    """`in_a_row`: how many of the last steps were skipped. The caller sets it to 0 after a step that was not skipped."""

    def __init__(self, weights: Weights, say: Callable[[str], None]) -> None:
        self.in_a_row = 0
        self._results = 0  # in a row; each may be of several steps
        self._weights = weights
        self._say = say

    def begin(self) -> None:
        """The loop starts."""
        self.in_a_row = 0

    def add(self, state: TrainState, result: Shared, loss_is_finite: bool = True) -> None:
        """Collective. The steps of this result were skipped: count and report them."""
        self.count(state, result)
        self.report(state, result, loss_is_finite)

    def count(self, state: TrainState, result: Shared) -> None:
        """Local."""
        state.steps_left_out += result.steps
        state.skipped = True
        self._results = self._results + 1 if self.in_a_row else 1
        self.in_a_row += result.steps

    def report(self, state: TrainState, result: Shared, loss_is_finite: bool = True) -> None:
        """Collective, after `count`. All ranks see the same result, so either all raise StepError or none does.
        `loss_is_finite`: on this rank."""
        if not result.finite:
            self._weights.check(state, f"since step {state.step - 1}")
        why = "the gradient is not finite" if not result.finite else f"the counts of all ranks add up to {result.total:g}"
        is_reported = self._results <= _PRINTED or self.in_a_row >= _MOST_IN_A_ROW or state.last
        loss = _of_losses(loss_is_finite) if is_reported and not result.finite else ""
        if self.in_a_row >= _MOST_IN_A_ROW:
            raise StepError(f"{why}, for {_MOST_IN_A_ROW} steps in a row{loss}; check the loss, the learning rate and the data")
        if state.last and state.steps_left_out == state.step:
            raise StepError(f"{why}, in each of the {state.step} steps{loss}: nothing was trained")
        if self._results <= _PRINTED:
            more = f"; later ones are only counted; {_MOST_IN_A_ROW} in a row stop the run" if self._results == _PRINTED else ""
            first = state.step - result.steps + 1
            which = f"step {first} is" if result.steps == 1 else f"steps {first} to {state.step} are"
            self._say(f"warning: {which} skipped on all ranks: {why}{loss} ({state.steps_left_out} so far){more}")


def _of_losses(is_finite: bool) -> str:
    """Collective. The ranks whose loss is not finite, as the end of a sentence about the gradient; empty if there are none."""
    losses = comm.all_gather_object(is_finite)
    bad = [rank for rank, each in enumerate(losses) if not each]
    of = f" of {numbered('rank', bad, _MOST_RANKS, ranges=True)}" if len(losses) > 1 else ""
    return f", and neither is the loss{of}" if bad else ""
