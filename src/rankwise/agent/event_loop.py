"""Everything that an agent waits for, in one selector, and the signals that it gets.

events = EventLoop(parent_pid);  events.register(link);  events.wait(0.05);  events.asked
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from types import FrameType
from typing import Any

from rankwise.host.processes import STOP_SIGNALS, start_time, stop_signals


class EventLoop:
    """`asked`: the stop signals received, in order. `parent_pid`: the process whose exit also ends this agent; 0 for none.

    `guard`: a pipe on which this agent's guard process passes on the signals that it gets, one byte per signal. Hydra and Grid
    Engine signal a whole process group, so both this process and its guard: the same signal from both is one request, however
    much later the second comes. `taken_as`: the signal that came is the key, the one that was meant is the value.
    """

    def __init__(self, parent_pid: int, guard: int | None = None, taken_as: Mapping[int, int] | None = None) -> None:
        self.asked: list[int] = []
        self._taken_as = taken_as or {}
        self._own: Counter[int] = Counter()
        self._passed_on: Counter[int] = Counter()
        self._guard = guard
        self.ready: set[int] = set()
        """File descriptors that were ready when `wait` last returned."""

        self.pause_s = 0.0
        """The least time between two returns: messages from many nodes are then handled together."""

        self._returned = 0.0
        self._selector = selectors.DefaultSelector()
        self._wakeup, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # open until this process ends
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for signum in stop_signals():
            signal.signal(signum, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the launcher blocked them until now
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        if guard is not None:
            os.set_blocking(guard, False)
            self._selector.register(guard, selectors.EVENT_READ)
        self._parent: int | None = None
        self._parent_pid, self._parent_began = parent_pid, start_time(parent_pid)
        if parent_pid:
            try:
                self._parent = os.pidfd_open(parent_pid)
                self._selector.register(self._parent, selectors.EVENT_READ)
            except ProcessLookupError:
                sys.exit(1)  # the launcher has exited already: give up the run
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.EPERM):  # of Linux before 5.3, and of some containers
                    raise

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        self._count(self._own, signum)

    def _count(self, source: Counter[int], signum: int) -> None:
        signum = self._taken_as.get(signum, signum)
        source[signum] += 1
        if source[signum] > self.asked.count(signum):
            self.asked.append(signum)

    def register(self, source: Any) -> None:
        """`source`, a file descriptor or an object with one: `wait` returns when it is ready. Registering twice is harmless."""
        self.unregister(source)  # its number may have belonged to a descriptor that is now closed
        self._selector.register(source, selectors.EVENT_READ)

    def unregister(self, source: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def wait(self, most_s: float) -> None:
        self.ready = {key.fd for key, _ in self._selector.select(most_s)}
        if (rest_s := self._returned + self.pause_s - time.monotonic()) > 0:
            time.sleep(rest_s)
            self.ready |= {key.fd for key, _ in self._selector.select(0)}
        self._returned = time.monotonic()
        if self._wakeup in self.ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup, 4096)
        if self._guard is not None and self._guard in self.ready:
            passed_on = os.read(self._guard, 4096)
            if not passed_on:  # the guard was killed, and this process is about to be
                self._selector.unregister(self._guard)
            for signum in passed_on:
                self._count(self._passed_on, signum)

    @property
    def parent_ended(self) -> bool:
        if self._parent is None:
            return bool(self._parent_pid) and start_time(self._parent_pid) != self._parent_began
        return bool(select.select([self._parent], [], [], 0)[0])
