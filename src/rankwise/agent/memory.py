"""What the kernel says of memory: a rank killed by SIGKILL may have been killed for it.

before = oom_kills();  ...;  if oom_kills() > before: the kernel killed something of this job for memory
"""

from __future__ import annotations

import os
from pathlib import Path


def oom_kills(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes the kernel has killed for memory in this process's cgroup (v2 or v1); 0 where it cannot be read."""
    return max((_counter(path) for path in _files(proc, root, "memory.events", "memory.oom_control")), default=0)


def limit_bytes(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The cgroup's memory limit; None if there is none or it cannot be read."""
    for path in _files(proc, root, "memory.max", "memory.limit_in_bytes"):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < 1 << 60:
            return int(text)
    return None


def _files(proc: Path, root: Path, v2: str, v1: str) -> list[Path]:
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append(root / path.lstrip("/") / v2)
        elif "memory" in controllers.split(","):
            found.append(root / "memory" / path.lstrip("/") / v1)
    return found


def _counter(path: Path) -> int:
    try:
        words = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(words.get("oom_kill", 0))


def resident_bytes(pid: int) -> int:
    """What a process holds in memory now; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
