"""What the kernel reports about memory: SIGKILL may mean that it killed a rank because memory was full.

before = oom_kills();  ...;  if oom_kills() > before: the kernel killed a process of this job because memory was full
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 1 << 60  # v1 has no word for "no limit": the file has the largest page-aligned number


def oom_kills(proc: Path = Path("/proc")) -> int:
    """How many processes the kernel has killed in this process's cgroup (v1 or v2) because memory was full.

    Outside any memory cgroup, those of the whole machine; 0 if nothing can be read. The kernel counts a kill in the cgroup of
    the killed process, also if the limit of a cgroup above it was the reason.
    """
    for folder in cgroups(proc):
        for name in ("memory.events", "memory.oom_control"):
            if (count := _field(folder / name, "oom_kill")) is not None:
                return count
        break
    return _field(proc / "vmstat", "oom_kill") or 0


def limit_bytes(proc: Path = Path("/proc")) -> int | None:
    """The memory that this process's cgroup may use: the lowest limit of it and its parents; None if there is no limit."""
    found = []
    for folder in cgroups(proc):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name).strip()
            if text.isdecimal() and int(text) < _NO_LIMIT:
                found.append(int(text))
    return min(found, default=None)


def cgroups(proc: Path) -> Iterator[Path]:
    """The folder of this process's memory cgroup, then those of its parents, as far up as they are mounted."""
    paths: dict[str, str] = {}
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    # If both versions are mounted, v1 manages memory if it lists the controller.
    kind, controller = ("cgroup", "memory") if "memory" in paths else ("cgroup2", "")
    if controller not in paths:
        return
    for line in _read(proc / "self/mountinfo").splitlines():
        place, _, what = line.partition(" - ")
        root, mount = place.split()[3:5]
        file_system, _, options = what.split(" ", 2)
        if file_system == kind and (kind == "cgroup2" or "memory" in options.split(",")):
            top = Path(mount)
            yield from _upwards(top / _below(paths[controller], root), top)
            return


def _below(path: str, root: str) -> str:
    """`path` as seen from where the hierarchy's `root` is mounted; a container may see less than its whole path."""
    if path == root:
        return ""
    prefix = root.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else ""


def _upwards(folder: Path, top: Path) -> Iterator[Path]:
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder


def _field(path: Path, name: str) -> int | None:
    """The number after `name`, in a file of lines `name number`; None if it is missing."""
    for line in _read(path).splitlines():
        word, _, number = line.partition(" ")
        if word == name and number.isdecimal():
            return int(number)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
