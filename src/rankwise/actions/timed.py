"""What all ranks do after the same step though no step says when: triggers by time, and a stop that the script asks for.

    moments = Moments(state, actions, stop);  moments.begin()       # before the loop;  `stop.agreed` does the rest

Both pass through the gate of the agreed stop (shared_page.py): no message a step, and under any strategy. Where the nodes
do not reach each other there is no gate: then both are agreed by a message at each log interval.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rankwise.actions.periodic import Action, Every
from rankwise.dist import comm
from rankwise.errors import ConfigError
from rankwise.ipc.shared_page import MOST_ALARMS
from rankwise.stop.signal import StopSignal
from rankwise.training.state import TrainState


class Moments:
    """Of one loop. Without a gate it is an action too, behind the log."""

    def __init__(self, state: TrainState, actions: Sequence[Action], stop: StopSignal) -> None:
        self._state = state
        self._stop = stop
        self._seen_s = state.clock_s
        self._timed = [action for action in actions if isinstance(action, Every) and action.seconds]
        if len(self._timed) > MOST_ALARMS:
            raise ConfigError(f"{len(self._timed)} actions with every(seconds=...), and at most {MOST_ALARMS} are possible")
        state.on_stop = stop.ask

    def begin(self) -> None:
        """Collective. The ranks have a gate from here on, where they can have one."""
        self._stop.open()
        if not self._stop.has_gate:
            return
        for action in self._timed:
            action.by_gate = True
        self._stop.alarm([action.seconds or 0.0 for action in self._timed], self._ring)

    def _ring(self, which: Sequence[int]) -> None:
        for place in which:
            self._timed[place].run(self._state)

    def __call__(self, state: TrainState) -> None:
        """Collective, after a log interval: whether a rank has asked to stop."""
        if self._stop.has_gate or state.clock_s == self._seen_s:
            return
        self._seen_s = state.clock_s
        if comm.all_reduce(torch.tensor(int(self._stop.asks)), "max").item():
            self._stop.by_script = True

    def end(self) -> bool:
        """Collective. The loop is over. Whether the script has ended it, which the state says from now on, and why."""
        if not self._stop.by_script:
            return False
        self._state.stopped = True
        self._state.stop_reason = next(filter(None, comm.all_gather_object(self._state.stop_reason)), "")
        return True
