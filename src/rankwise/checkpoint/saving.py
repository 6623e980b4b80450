"""When a loop saves: now and then, at steps, at the best evaluation so far, at the end; and what becomes of a save that failed.

saving = Saving(checkpoints, say, ready=reduce_meters, info=lambda: {}, ends=lambda state: state.last)
saving.begin(step=0, saved=False)
actions = [every(saving, seconds=300), saving.if_best]       # after each step;  then saving.at_end(state)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rankwise.checkpoint.store import Checkpoints
from rankwise.dist import log
from rankwise.errors import CheckpointError
from rankwise.training.state import TrainState


class Saving:
    """An action that saves; its methods that take a state are actions too. Of one loop, and of all that `state.parts` holds.

    `ready` runs before each save, collective. `info` goes into the checkpoint's manifest. `ends`: whether the loop is over: a
    save that fails then is an error, and a warning before, for older checkpoints stay and the next may succeed.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        say: Callable[[str], None],
        *,
        ready: Callable[[TrainState], None],
        info: Callable[[], Mapping[str, Any]],
        ends: Callable[[TrainState], bool],
    ) -> None:
        self._checkpoints = checkpoints
        self._say = say
        self._ready, self._info, self._ends = ready, info, ends
        self._keep_best, self._at_steps = checkpoints.keep_best, checkpoints.at_steps
        self._saved_step = -1
        self._told: BaseException | None = None
        self.folder: Path | None = None
        """Of the last save since `begin`."""

    def begin(self, step: int, saved: bool) -> None:
        """The loop starts after this step, whose checkpoint is there already if `saved`."""
        self._saved_step = step if saved else -1
        self._told = None
        self.folder = None

    def __call__(self, state: TrainState) -> None:
        """Collective. Save unless this step is saved already."""
        if state.step == self._saved_step:
            return
        self._ready(state)
        try:
            self._checkpoints.wait()  # for the one before
        except CheckpointError as error:
            self._say_not_saved(error)
        try:
            self.folder = self._checkpoints.save(state.parts, state.step, self._info(), state.measured_now)
        except CheckpointError as error:
            if self._ends(state):
                raise
            self._say_not_saved(error)
        else:
            self._saved_step = state.step

    def further(self) -> list[Callable[[TrainState], None]]:
        """What else saves: at the steps that were named, and when the best was measured. The training loss is new each log
        interval: no occasion to save."""
        at_steps = [self.at_named_step] if self._at_steps else []
        return [*at_steps, *([self.if_best] if self._keep_best not in (None, "loss") else [])]

    def at_named_step(self, state: TrainState) -> None:
        """Collective at one of `at_steps`."""
        if state.step in self._at_steps:
            self(state)

    def if_best(self, state: TrainState) -> None:
        """Collective. After an evaluation that is the best so far. The first one must have measured `keep_best`."""
        figures = state.measured_now
        evaluated = any(name.startswith("eval_") for name in figures)
        expected = self._keep_best in figures or (evaluated and self._keep_best not in state.measured)
        if expected and self._checkpoints.is_best(figures):
            self(state)

    def hear(self, state: TrainState) -> None:
        """The main rank reports a background save that failed at the next step; the others get its error at the next save."""
        if self._checkpoints.failure is not None:
            self._say_not_saved(self._checkpoints.failure)

    def at_end(self, state: TrainState, again: bool = False) -> None:
        """Collective. The state as it is now is on the disk when this returns; `again`: though this step may be saved."""
        if again:
            self._saved_step = -1
        try:
            self._checkpoints.wait()
        except CheckpointError as error:
            self._say_not_saved(error, "trying once more")
            self._saved_step = -1  # it may have been this step's
        self(state)
        self._checkpoints.wait()

    def close(self) -> None:
        """What is being written is finished before another process may write here."""
        error = self._checkpoints.close()
        if error is not None and error is not self._told:
            log.warn(str(error))

    def _say_not_saved(self, error: BaseException, then: str = "training continues") -> None:
        if error is not self._told:
            self._told = error
            self._say(f"warning: {error}; {then}")
