"""What the terminal shows of the ranks: the log of rank 0 as it grows, or all logs line by line, and the progress line.

Ranks write into files, never into a pipe: no rank waits for a slow console, and nothing is lost when the agent exits.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from rankwise.host.terminal import CHUNK, Prefixed
from rankwise.ipc.shared_page import Row


class LogFollower:
    """Reads one log file from its current end on: complete lines, each with `prefix`; without a prefix, bytes as they come."""

    def __init__(self, log: Path, exception: Path, prefix: str = "") -> None:
        self._fd = os.open(log, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._position = os.lseek(self._fd, 0, os.SEEK_END)
        self._exception = exception
        self._prefixed = Prefixed(prefix)

    def read(self) -> bytes:
        """At most one chunk of new output.

        The traceback of a rank that raised is kept back: it is printed once at the end, if that rank is the cause.
        """
        try:
            data = os.pread(self._fd, CHUNK, self._position)
        except OSError:  # of a file server: the log was removed on another host, or the server does not answer
            data = b""
        # Asked after the read: the traceback may have been written just before it.
        data = data[: max(self._raised_at() - self._position, 0)]
        self._position += len(data)
        return self._prefixed.lines(data)

    def _raised_at(self) -> int:
        """Where in the log an exception begins; the rank records this before it prints the traceback."""
        try:
            return int(json.loads(self._exception.read_text())["log_bytes"])
        except (OSError, ValueError):  # it has raised nothing, or a file server does not answer: its output is still shown
            return 1 << 62

    def close(self) -> bytes:
        """Returns the last line if it has no line end."""
        os.close(self._fd)
        return self._prefixed.rest()


class Shown(Protocol):
    """A terminal, or a link to the agent that has one."""

    def write(self, data: bytes) -> None: ...
    def progress(self, text: str) -> None: ...
    def end_line(self) -> None: ...
    @property
    def busy(self) -> bool:
        """Whether the output of ranks should wait, in their logs."""
        ...


class Console:
    """Shows the logs of `followers`, and the progress line of the rank of `row` (None: no rank of this node)."""

    def __init__(self, followers: Sequence[LogFollower], row: Row | None, terminal: Shown) -> None:
        self._followers = deque(followers)
        self._row = row
        self._seen = 0
        self._terminal = terminal

    def show(self) -> None:
        """Show new output, until the terminal is busy."""
        for _ in self._pieces():
            if self._terminal.busy:
                return
        if self._row is not None:
            self._seen, text = self._row.heard(self._seen)
            if text is not None:
                self._terminal.progress(text)

    def _pieces(self) -> Iterator[None]:
        """Show a piece of one log each time; ranks take turns, so that one that prints much does not hide the others."""
        silent = 0
        while silent < len(self._followers):
            data = self._followers[0].read()
            self._followers.rotate(-1)
            self._terminal.write(data)
            silent = 0 if data else silent + 1
            yield

    def close(self) -> None:
        """Show the rest."""
        for _ in self._pieces():
            pass
        self._terminal.progress("")
        for follower in self._followers:
            self._terminal.write(follower.close())
        self._terminal.end_line()
