"""Triggers by time, and stops that the script asks for: they happen on all ranks after the same step.

    moments = Moments(state, actions, stop);  moments.begin()       # before the loop;  `stop.agreed` does the rest

Both use the gate of the agreed stop (shared_page.py), which needs no message per step and works with any strategy. If the nodes
cannot reach each other there is no gate; then the ranks agree by a message at each log interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rankwise.actions.periodic import Action, Every
from rankwise.dist import comm
from rankwise.errors import ConfigError
from rankwise.ipc.shared_page import MOST_ALARMS
from rankwise.stop.signal import StopSignal
from rankwise.training.state import TrainState


class Moments:
    """For one loop. This is also an action, the last one. `meet`: a collective to call before others here."""

    def __init__(self, state: TrainState, actions: Sequence[Action], stop: StopSignal, meet: Callable[[], None]) -> None:
        self._state = state
        self._stop = stop
        self._meet = meet
        self._seen_s = state.clock_s
        self._rung: Sequence[int] = ()
        self._triggers = [action for action in actions if isinstance(action, Every)]
        self._timed = [action for action in self._triggers if action.seconds]
        if len(self._timed) > MOST_ALARMS:
            raise ConfigError(f"{len(self._timed)} actions with every(seconds=...), and at most {MOST_ALARMS} are possible")
        state.on_stop = stop.ask

    def begin(self) -> None:
        """Collective. Open the gate, if this is possible."""
        self._stop.open()
        self._has_gate = self._stop.has_gate
        for action in self._triggers:
            action.begin(by_gate=self._has_gate and action in self._timed)
        self._seen_s, self._rung = self._state.clock_s, ()
        if not self._has_gate:
            return
        self._stop.alarm([action.seconds or 0.0 for action in self._timed], self._ring)

    def _ring(self, which: Sequence[int]) -> None:
        self._rung = [*self._rung, *which]
        for place in which:
            self._timed[place].time_is_over = True  # it runs after this step, where later actions see what it measures

    def __call__(self, state: TrainState) -> None:
        """Collective. After timed actions: their intervals begin again. Without a gate, after a log interval: stop if a rank
        has asked for it."""
        if self._rung:
            self._stop.again(self._rung)
            self._rung = ()
        if self._has_gate or state.clock_s == self._seen_s:
            return
        self._seen_s = state.clock_s
        self._meet()
        if comm.all_reduce(torch.tensor(int(self._stop.asks), device="cpu"), "max").item():
            self._stop.by_script = True

    def end(self) -> bool:
        """Collective. At the end of the loop: whether the script has stopped it. If so, store this and the reason in the
        state."""
        if not self._stop.by_script:
            return False
        self._state.stopped = True
        self._state.stop_reason = next(filter(None, comm.all_gather_object(self._state.stop_reason)), "")
        return True
