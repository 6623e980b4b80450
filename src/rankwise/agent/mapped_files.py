"""The files that a rank has mapped. They are recorded while it runs: once SIGBUS has killed it, its maps are gone.

files = MappedFiles();  files.look([4711, 4712])      # now and then
files.cut(4711)                                        # "/data/train.h5 was truncated to 1 MB while it was mapped"
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from rankwise.host.text import size

_FIRST_S, _LAST_S = 1.0, 30.0
"""The time between two looks. It doubles, because most files are mapped soon after the start. A look takes 1 to 5 ms per
process."""


class MappedFiles:
    """`clock`: a monotonic clock, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = _FIRST_S
        self._next = -math.inf
        self._ends: dict[int, dict[str, int]] = {}

    def look(self, pids: Collection[int]) -> None:
        """Record the files of these processes; does nothing until the next look is due."""
        now = self._clock()
        if now < self._next:
            return
        self._next, self._pause_s = now + self._pause_s, min(2 * self._pause_s, _LAST_S)
        for pid in pids:
            if ends := _ends(pid):
                self._ends[pid] = ends

    def cut(self, pid: int) -> str | None:
        """Which mapped file of this process is now shorter than its mapped part; None if there is none."""
        for path, end in self._ends.get(pid, {}).items():
            try:
                found = os.stat(path).st_size
            except OSError:
                continue  # a deleted file keeps its bytes as long as it is mapped
            if found <= end - mmap.PAGESIZE:
                return f"{path} was truncated to {size(found)} while it was mapped"
        return None


def _ends(pid: int) -> dict[str, int]:
    """By path of each mapped file: the end of its mapped part, in complete pages."""
    found: dict[str, int] = {}
    libraries = set()
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except OSError:
        return found
    for line in lines:  # addresses, rights, offset, device, inode, path
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(b"/") and not fields[5].endswith(b" (deleted)"):
            start, stop = (int(part, 16) for part in fields[0].split(b"-"))
            path = os.fsdecode(fields[5])
            found[path] = max(found.get(path, 0), int(fields[2], 16) + stop - start)
            if b"x" in fields[1]:
                libraries.add(path)
    return {path: end for path, end in found.items() if path not in libraries}  # libraries may be mapped beyond their ends
