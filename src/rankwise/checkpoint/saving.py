"""When a loop saves: by time, at steps, at the best evaluation so far, at the end; and what happens if a save fails.

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
    """An action that saves all of `state.parts`, for one loop. Its methods that take a state are actions too.

    `ready` runs before each save (collective). `info` is stored in the manifest. `ends`: whether the loop is over. A failed
    save is an error if the loop is over, and a warning before, because older checkpoints remain and the next save may succeed.
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
        """The folder of the last save since `begin`."""

    def begin(self, step: int, saved: bool) -> None:
        """The loop starts after step `step`. `saved`: the checkpoint of this step already exists."""
        self._saved_step = step if saved else -1
        self._told = None
        self.folder = None

    def __call__(self, state: TrainState) -> None:
        """Collective. Save, unless this step is already saved."""
        if state.step == self._saved_step:
            return
        self._ready(state)
        try:
            self._checkpoints.wait()  # for the previous save
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
        """The other actions that save: at named steps, and after the best evaluation. The training loss changes at each log
        interval, so it does not cause a save."""
        at_steps = [self.at_named_step] if self._at_steps else []
        return [*at_steps, *([self.if_best] if self._keep_best not in (None, "loss") else [])]

    def at_named_step(self, state: TrainState) -> None:
        """Collective at a step in `at_steps`. Save."""
        if state.step in self._at_steps:
            self(state)

    def if_best(self, state: TrainState) -> None:
        """Collective. Save after an evaluation that is the best so far. The first evaluation of the run must have measured
        `keep_best`."""
        figures = state.measured_now
        evaluated = any(name.startswith("eval_") for name in figures)
        expected = self._keep_best in figures or (evaluated and self._keep_best not in state.metrics)
        if expected and self._checkpoints.is_best(figures):
            self(state)

    def hear(self, state: TrainState) -> None:
        """The main rank reports a failed background save at the next step; the other ranks get its error at the next save."""
        if self._checkpoints.failure is not None:
            self._say_not_saved(self._checkpoints.failure)

    def at_end(self, state: TrainState, again: bool = False) -> None:
        """Collective. When this returns, the current state is on disk. `again`: save even if this step is already saved."""
        if again:
            self._saved_step = -1
        try:
            self._checkpoints.wait()
        except CheckpointError as error:
            self._say_not_saved(error, "trying once more")
            self._saved_step = -1  # the failed save may be the save of this step
        self(state)
        self._checkpoints.wait()

    def close(self) -> None:
        """Wait for the current write, before another process may write here."""
        error = self._checkpoints.close()
        if error is not None and error is not self._told:
            log.warn(str(error))

    def _say_not_saved(self, error: BaseException, then: str = "training continues") -> None:
        if error is not self._told:
            self._told = error
            self._say(f"warning: {error}; {then}")
