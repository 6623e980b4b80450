"""One piece of work behind the loop's back, in a thread; what it raises is heard by whoever waits for it.

    background.start(write);  ...;  background.wait()

The work must not communicate: of two threads of a rank that call collectives, each may get the other's answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Holds at most one piece of work, and its exception until somebody was told."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """The one before is waited for; what it raised is raised here, and the work not begun."""
        self.wait()
        # No daemon: at the end of the program what was begun is finished.
        self._thread = threading.Thread(target=self._run, args=(work,), name="rankwise-checkpoint")
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending, or there may be no more threads
            self._thread = None
            work()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What the work raised, as far as it has come; not waited for."""
        return self._error

    def join(self) -> None:
        """Wait, and keep what it raised for `wait`."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait, and raise what it raised, once."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
