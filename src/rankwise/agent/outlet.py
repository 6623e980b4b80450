"""What the agent prints, written by a separate thread.

outlet = Outlet();  outlet.start()
outlet.put(1, b"step 20\\n")          # returns at once
outlet.drain(lambda: events.asked)   # at the end: wait until all is written

A stream that nobody reads for a while (`| less`, Ctrl-S, an ssh connection from a laptop that sleeps) takes no more bytes, and
a write waits. The agent must not wait: it would send no heartbeat and heed no signal, and after some seconds the other nodes
would take it for lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

from rankwise.host.terminal import write_all

_PIECE_BYTES = 1 << 16
_GLANCE_S = 0.1


class Outlet:
    """Streams, each given as its file descriptor. Everything is written in the order in which it was put."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._failed: dict[int, OSError] = {}
        self._thread: threading.Thread | None = None
        self.waiting_bytes = 0
        """How much is not written yet."""

    def start(self) -> None:
        """From now on the thread writes. Does nothing where no more threads may be started (`ulimit -u`): call it only
        after the ranks are started, because it must not take the place of one."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="rankwise-outlet", daemon=True)
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def put(self, fd: int, data: bytes) -> None:
        """Does not wait, once the thread is started. Raises OSError if a write to `fd` has failed."""
        if self._thread is None:
            write_all(fd, data)
            return
        with self._changed:
            if (error := self._failed.get(fd)) is not None:
                raise OSError(error.errno, error.strerror)
            if data:
                self._queue.append((fd, data))
                self.waiting_bytes += len(data)
                self._changed.notify_all()

    def drain(self, give_up: Callable[[], object]) -> None:
        """Wait until all is written, however long the reader takes, or until `give_up()`, asked ten times a second, is true."""
        with self._changed:
            while self.waiting_bytes and not give_up():
                self._changed.wait(_GLANCE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                fd, data = self._queue.popleft()
            for start in range(0, len(data), _PIECE_BYTES):
                piece = data[start : start + _PIECE_BYTES]
                if fd not in self._failed:
                    try:
                        write_all(fd, piece)
                    except OSError as error:
                        self._failed[fd] = error
                with self._changed:
                    self.waiting_bytes -= len(piece)
                    self._changed.notify_all()
