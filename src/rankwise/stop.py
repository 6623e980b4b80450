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

import contextlib
import os
import signal
import threading
import time
from types import FrameType

from rankwise import comm
from rankwise.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Stopped
from rankwise.page import JOIN_S, Page, Row
from rankwise.world import World, agent_row

_BEAT_S = 0.05

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class StopSignal:
    """Takes over SIGTERM, SIGUSR1, SIGUSR2 and SIGINT of this process from the first `agreed` until `leave`.

    To make one is collective, after `init`. Ranks on several nodes without an agent of ours cannot agree by themselves yet:
    there a signal ends a rank as ever.
    """

    def __init__(self, world: World) -> None:
        self._row = agent_row(world)
        self._gatekeeper: _Gatekeeper | None = None
        if self._row is None and 1 < world.world_size == world.local_world_size:
            self._row, self._gatekeeper = _page_of_our_own(world)
        self._alone = world.world_size == 1
        self._pid = os.getpid()
        self._received = 0
        self._before: dict[int, object] = {}
        self.signum = 0
        """The signal for which all stop; 0 until they do."""
        self._listening = False

    def _listen(self) -> None:
        self._listening = True
        if self._gatekeeper is not None:
            self._gatekeeper.start()
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
        elif self._received:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(self._pid, signum)  # asked twice: at once
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
        """All is saved: from here on a signal ends this process as ever."""
        if self._row is not None:
            self._row.leave()
        if self._gatekeeper is not None:
            self._gatekeeper.stop()
        for signum, handler in self._before.items():
            with contextlib.suppress(ValueError):
                signal.signal(signum, handler)  # type: ignore[arg-type]
        self._before = {}

    def stopped(self) -> Stopped:
        """What to raise once everything is saved: ends the script with 75, or 130 after Ctrl-C."""
        stopped = Stopped(EXIT_INTERRUPTED if self.signum == signal.SIGINT else EXIT_PREEMPTED)
        stopped.signum = self.signum
        return stopped


def _page_of_our_own(world: World) -> tuple[Row | None, _Gatekeeper | None]:
    """Collective. (this rank's row in a page that rank 0 has made, its keeper on rank 0); (None, None) on all ranks if one of
    them cannot see it (containers of their own)."""
    page = Page.create(world.world_size) if world.is_main else None
    path = comm.broadcast_object(page.path if page is not None else "")
    row: Row | None = None
    with contextlib.suppress(OSError):
        row = Page.open(path).row(world.local_rank)
    if not comm.all_agree(row is not None):
        return None, None
    return row, _Gatekeeper(page) if page is not None else None


class _Gatekeeper:
    """The agent's part of the gate, in a thread: whoever was signalled first, all stop after the highest step begun."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="rankwise-gate", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        asked = 0.0
        while not self._over.wait(_BEAT_S):
            if not (signum := self._page.flagged()):
                continue
            asked = asked or time.monotonic()
            # Ranks that have not come to their first gate are not in it yet; one that never comes must not hold the others.
            if len(self._page.joined()) == self._page.ranks or time.monotonic() > asked + JOIN_S:
                self._page.stop(signum)
                return
