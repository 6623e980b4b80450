"""Requests to loader workers, and the batches that come back. torch's DataLoader only starts and watches the workers.

    context = WorkerContext(multiprocessing.get_context(), work=work, failed=lambda error: error)
    watch = iter(DataLoader(dataset, batch_sampler=[], num_workers=2, multiprocessing_context=context))
    context.started()
    context.links[1].ask([(0, indices)])      # the worker calls work([(0, indices)], empty)
    made = context.links[1].take()            # what it returned

For each batch torch makes some 100 calls in the training process, and all workers write to one queue. Here each worker has its
own socket, and answers in order. torch's loop in the worker waits for its first request: `WorkerLink.get`, which does all
work.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

from rankwise.data.kinds import Empty
from rankwise.data.ring import LONGEST_FRAME, File, Ring

_LOOKS_EVERY_S = 1.0
"""How often a wait for a worker looks whether the process is there. Its socket says so at once, unless others have a copy."""

_EXITS_S = 5.0
"""How long a process may need from the end of its sockets to its exit status."""


class WorkerContext(BaseContext):
    """A context of multiprocessing for one iterator of a DataLoader.

    `work(message, empty)`: called in a worker with each message. `failed`: if its result cannot be pickled, turns the exception
    into what `take` returns.
    """

    def __init__(self, actual: BaseContext, work: Callable[[Any, Empty], Any], failed: Callable[[Exception], Any]) -> None:
        self._actual: Any = actual
        self._work = work
        self.ring = Ring(failed)
        self.links: list[WorkerLink] = []
        """One for each worker."""
        self._sockets: list[socket.socket] = []

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802 - multiprocessing's name, as the next two
        self._newest = WorkerLink(self.ring, self._work)
        return self._newest

    def Event(self) -> Any:  # noqa: N802
        self.ring.over = _Flag()
        return self.ring.over

    def Process(self, *args: Any, **settings: Any) -> Any:  # noqa: N802
        process = self._actual.Process(*args, **settings)
        self._newest.open(process, self._sockets)  # torch makes a worker's queue just before the worker
        self.links.append(self._newest)
        return process

    def started(self) -> None:
        """Call this when the workers are there."""
        for link in self.links:
            link.started()

    @property
    def is_alive(self) -> bool:
        """Whether no worker has ended."""
        return all(link.is_alive for link in self.links)


class _Flag:
    """Replaces multiprocessing's Event, which is read under a lock: a worker that is killed while it reads (out of memory, for
    example) would keep the lock, and the training process would wait for it for ever."""

    def __init__(self) -> None:
        file = File("rankwise-flag")
        os.pwrite(file.fd, b"\0", 0)
        self.__setstate__(file)
        self._owner = os.getpid()

    def __getstate__(self) -> File:
        return self._file

    def __setstate__(self, file: File) -> None:
        self._file, self._memory, self._owner = file, mmap.mmap(file.fd, 1), 0

    def set(self) -> None:
        if os.getpid() == self._owner:  # not in a process that the script has forked
            self._memory[0] = 1

    def is_set(self) -> bool:
        return self._memory[0] != 0


class WorkerLink:
    """Between the training process and one worker. torch takes it for a queue."""

    # Each frame is written and read in one piece, so there is no lock that a killed process could hold.
    _here: socket.socket
    _there: socket.socket

    def __init__(self, ring: Ring, work: Callable[[Any, Empty], Any]) -> None:
        self._ring, self._work = ring, work
        self._process: Any = None
        self._sockets: list[socket.socket] = []
        self._is_working = False
        self.late: deque[bytes] = deque()
        """Frames for which the socket had no room."""
        self._lock = threading.Lock()
        self.outstanding = 0
        """The number of messages that the worker has not answered."""

    def __getstate__(self) -> tuple[Any, ...]:
        return self._ring, self._work, getattr(self, "_there", None)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        ring, work, there = state
        self.__init__(ring, work)  # type: ignore[misc]  # the lock cannot be pickled
        if there is not None:
            self._there = there

    # --- in the training process

    def open(self, process: Any, sockets: list[socket.socket]) -> None:
        """Connect with a worker before its start. `sockets`: those of all workers."""
        self._process, self._sockets = process, sockets
        self._here, self._there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sockets += [self._here, self._there]
        _limit(self._here, _LOOKS_EVERY_S)

    def started(self) -> None:
        """If the worker's end is open in no other process, its exit closes the connection."""
        self._there.close()

    @property
    def is_alive(self) -> bool:
        return bool(self._process.is_alive())

    def ask(self, message: Any) -> None:
        """Does not wait: the worker may wait for this process."""
        self.outstanding += 1
        self.late.append(self._ring.request(message))
        self.send_late()

    def send_late(self) -> None:
        """Send as much as there is room for."""
        with self._lock:  # a thread that pins memory also sends
            while self.late:
                try:
                    self._here.send(self.late[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    return
                except (BrokenPipeError, ConnectionResetError):  # `take` says how the worker has died
                    self.late.clear()
                    return
                self.late.popleft()

    def take(self, timeout_s: float = 0) -> Any:
        """Wait for the answer to the oldest message. Raises RuntimeError, in the words of torch, if the worker has died;
        TimeoutError after `timeout_s` (0: none)."""
        until = time.monotonic() + timeout_s if timeout_s else None
        while True:
            if self.late:
                self.send_late()
            if until is not None:
                _limit(self._here, min(max(until - time.monotonic(), 1e-3), _LOOKS_EVERY_S))
            try:
                frame = self._here.recv(LONGEST_FRAME)
            except BlockingIOError:
                frame = None
            except ConnectionResetError:
                frame = b""
            if frame:
                break
            if self._ring.over.is_set():
                raise EOFError
            if frame is not None or not self.is_alive:
                raise self._death()
            if until is not None and time.monotonic() >= until:
                raise TimeoutError
        self.outstanding -= 1
        try:
            return self._ring.answered(frame)
        except (ConnectionError, EOFError, FileNotFoundError):  # a tensor that torch's own way sends has a connection
            self._process.join(1.0)  # a worker's connections break a moment before its exit can be seen
            if self.is_alive:
                raise
            raise self._death() from None

    def _death(self) -> RuntimeError:
        self._process.join(_EXITS_S)  # in the main thread torch's handler of SIGCHLD may raise its own error meanwhile
        code, who = self._process.exitcode, f"DataLoader worker (pid {self._process.pid})"
        if code is None:
            return RuntimeError(f"{who} has closed its connection to the training process")
        if code < 0:
            return RuntimeError(f"{who} is killed by signal: {signal.strsignal(-code)}. ")
        return RuntimeError(f"{who} exited unexpectedly with exit code {code}; num_workers=0 shows where")

    # --- in a worker

    def get(self, timeout: float) -> None:
        """For torch's loop: does all work until the loader ends. Raises queue.Empty after `timeout` seconds without a message;
        then torch looks whether the training process is there."""
        if not self._is_working:
            self._is_working = True
            for other in self._sockets:  # of a forked worker: those of the training process, and of workers before it
                if other is not self._there:
                    other.close()
            _limit(self._there, timeout)
        ring, work = self._ring, self._work
        while True:
            try:
                frame = self._there.recv(LONGEST_FRAME)
            except BlockingIOError:
                ring.check_owner()
                raise queue.Empty from None
            if ring.over.is_set():
                return
            if not frame:
                raise SystemExit(0)  # the training process has died
            answer = ring.answer(work(ring.asked(frame), ring.empty))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the next `recv` says why
                self._there.send(answer, socket.MSG_NOSIGNAL)

    # --- for torch's iterator, at its end

    def put(self, message: Any) -> None:
        """The end of the loader, which wakes a worker that waits."""
        if self._ring.is_mine:
            self.late.clear()
            with contextlib.suppress(OSError):
                self._here.shutdown(socket.SHUT_RDWR)

    def cancel_join_thread(self) -> None:
        """Nothing to do: there is no thread."""

    def close(self) -> None:
        for end in ("_here", "_there"):
            if hasattr(self, end):
                getattr(self, end).close()

    __del__ = close


def _limit(end: socket.socket, seconds: float) -> None:
    """How long `recv` waits before BlockingIOError. Unlike a timeout of Python's, it costs no second system call."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
