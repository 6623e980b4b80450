"""The agreed stop, seen from a rank: a signal to anyone stops all ranks after the same step.

    stop = StopSignal(world)
    while not stop.agreed(step): ...          # at the top of each step
    stop.finish()                             # after the loop
    ...                                       # save
    stop.leave()

A step costs one store and one load in a shared page; nothing is sent until somebody was signalled (page.py has the proof). The
page is that of our agent; where another launcher has started the ranks of one node, it is one of theirs, and a thread of the
first rank plays the agent's part.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from types import FrameType

from rankwise import comm
from rankwise.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Stopped
from rankwise.gatekeeper import Keeper, open_gate
from rankwise.world import World, agent_row

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)

LATE_S = 10.0
"""After a stop: how long a signal is still the request that was answered, to a rank that it reaches last."""

_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class StopSignal:
    """Takes over SIGTERM, SIGUSR1, SIGUSR2 and SIGINT of this process from the first `agreed` until `leave`.

    To make one is collective, after `init`.
    """

    def __init__(self, world: World) -> None:
        self._row = agent_row(world)
        self._keeper: Keeper | None = None
        if world.world_size > 1 and not comm.all_agree(self._row is not None):
            self._row, self._keeper = open_gate(world)
        self._alone = world.world_size == 1
        self._pid = os.getpid()
        self._received = 0
        self._left = 0.0
        self._before: dict[int, object] = {}
        self.signum = 0
        """The signal for which all stop; 0 until they do."""
        self._listening = False

    def _listen(self) -> None:
        self._listening = True
        if self._keeper is not None:
            self._keeper.start()
        if (self._row is not None or self._alone) and threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                self._before[signum] = signal.signal(signum, self._on_signal)
        if self._row is not None:
            self._row.join()

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked loader worker: its rank ends it
            return
        if self._row is not None:
            self._row.flag = signum
        elif self._received and signum == signal.SIGINT:  # Slurm sends SIGTERM twice at a limit
            signal.signal(signum, signal.SIG_DFL)
            os.kill(self._pid, signum)  # Ctrl-C again: at once
        self._received = signum

    def agreed(self, step: int) -> bool:
        """True if all ranks stop now, with exactly `step` steps done. Call it with as many done, before each step."""
        if not self._listening:
            self._listen()
        if self._row is not None:
            if self._row.pass_gate(step + 1):
                return False
            self.signum = self._row.reason
            return True
        self.signum = self._received if self._alone else 0
        return bool(self.signum)

    def finish(self) -> None:
        """The loop is over on this rank; a request from now on stops the others after their last step too."""
        if self._row is not None and not self.signum:
            self._row.finish()

    def leave(self) -> None:
        """All is saved: from here on a signal ends this process as ever.

        After a stop only once LATE_S are over: a signal that comes to several ranks one after the other, or that a launcher
        sends to all when the first has ended, finds some of them with nothing left to do but to leave with the stop's status.
        """
        if self._row is not None:
            self._row.leave()
        if self._keeper is not None:
            self._keeper.stop()
        self._left = time.monotonic()
        late = [signum for signum, handler in self._before.items() if self._is_answered(signum) and _is_default(handler)]
        for signum, handler in self._before.items():
            with contextlib.suppress(ValueError):
                signal.signal(signum, self._on_late_signal if signum in late else handler)  # type: ignore[arg-type]
        if late:
            atexit.register(self._end)
        self._before = {}

    def _is_answered(self, signum: int) -> bool:
        return bool(self.signum) and not (self._row is None and signum == signal.SIGINT)

    def _on_late_signal(self, signum: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid or time.monotonic() > self._left + LATE_S:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def _end(self) -> None:
        """Python takes its handlers down before the process is gone; what is ignored stays so."""
        for signum in SIGNALS if os.getpid() == self._pid else ():
            if signal.getsignal(signum) == self._on_late_signal:
                signal.signal(signum, signal.SIG_IGN)

    def stopped(self) -> Stopped:
        """What to raise once everything is saved: ends the script with 75, or 130 after Ctrl-C."""
        stopped = Stopped(EXIT_INTERRUPTED if self.signum == signal.SIGINT else EXIT_PREEMPTED)
        stopped.signum = self.signum
        return stopped


def _is_default(handler: object) -> bool:
    """Python's own, or what an earlier StopSignal has left in its place."""
    return handler in _DEFAULTS or getattr(handler, "__func__", None) is StopSignal._on_late_signal
