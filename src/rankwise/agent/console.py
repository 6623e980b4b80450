"""What a person sees of the ranks: rank 0's log as it grows, and its progress line.

Ranks write into files, never into a pipe: none waits for a slow console, and nothing is lost when the agent ends.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from rankwise.page import Row
from rankwise.terminal import Terminal, progress_line

_CHUNK = 1 << 16


class Console:
    """Follows one log file from where it ends now."""

    def __init__(self, log: Path, row: Row, terminal: Terminal) -> None:
        self._fd = os.open(log, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.lseek(self._fd, 0, os.SEEK_END)
        self._row = row
        self._seen = 0
        self._terminal = terminal

    def show(self) -> None:
        """All that is new."""
        while data := os.read(self._fd, _CHUNK):
            self._terminal.write(data)
        self._seen, text = self._row.heard(self._seen)
        if text is not None:
            self._terminal.status(progress_line(json.loads(text), self._terminal.columns) if text else "")

    def close(self) -> None:
        self.show()
        self._terminal.status("")
        os.close(self._fd)
