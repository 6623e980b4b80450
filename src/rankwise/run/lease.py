"""One writer for a run directory: a file that names the writer, which touches the file as long as it runs.

    lease = take(path, say=print);  ...;  lease.release()
    fence = Fence(path);  ...;  fence.check()         # in another process of that run, before it writes something final

On the holder's own machine, its process shows whether it is alive. On another machine, only the touches do: a process that sees
one is refused; a process that sees none for `GONE_S`, by its own clock, takes over (clocks of different hosts are never
compared). A holder that was frozen for that long finds out at its next fence that it is no longer the writer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rankwise.errors import RunDirError
from rankwise.host import network, processes
from rankwise.host.patience import Patience
from rankwise.host.terminal import typed
from rankwise.host.text import short, stamp

BEAT_S = 0.75
GONE_S = 30.0

_LOOK_S = 0.05
_PATIENCE_S = 3 * BEAT_S
"""After this time the wait is reported."""

_PIDS = "/proc/self/ns/pid"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EACCES)
"""What file systems answer that have no locks, or none for this user."""


@dataclass(frozen=True)
class Holder:
    """The process that writes in a run directory."""

    host: str
    boot: str
    pid: int
    start_time: int
    since: float
    """Seconds since 1970."""

    token: str
    machine: str = ""
    pids: int = 0
    """The namespace of its pid: a container may have its own."""

    @classmethod
    def this_process(cls) -> Holder:
        pid = os.getpid()
        return cls(
            socket.gethostname(),
            processes.boot_id(),
            pid,
            processes.start_time(pid) or 0,
            time.time(),
            uuid.uuid4().hex,
            processes.machine_id(),
            network.inode(_PIDS),
        )

    def is_here(self) -> bool:
        """Whether this process can look for the holder's pid: not if it is in another container, or on another host of that
        name."""
        same_machine = self.boot == processes.boot_id() or (bool(self.machine) and self.machine == processes.machine_id())
        return same_machine and self.host == socket.gethostname() and self.pids == network.inode(_PIDS)

    def is_gone(self) -> bool:
        """True only if this is certain without waiting: it ran on this machine, and its process has ended or the machine was
        rebooted."""
        return self.is_here() and (self.boot != processes.boot_id() or processes.start_time(self.pid) != self.start_time)


def read(path: Path) -> Holder | None:
    """The process that writes there now; None if there is none. Raises RunDirError if the file is not such a record."""
    try:
        record = json.loads(_text(path))
        known = {field.name for field in fields(Holder)}
        return Holder(**{key: value for key, value in record.items() if key in known})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunDirError(f"{path} cannot be read ({error}); if no run is active there, remove it") from None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return path.read_text()  # on NFS, another host has replaced the file after this one opened it


def in_use(path: Path, holder: Holder) -> RunDirError:
    """The error for the lease of a run directory."""
    return RunDirError(
        f"the run in {short(path.parent)} is still running: pid {holder.pid} on {holder.host} since {stamp(holder.since)}; "
        f"wait for it, start another run with --name NAME, or stop it: {typed('cancel', short(path.parent))}"
    )


def take(path: Path, say: Callable[[str], None], refused: Callable[[Path, Holder], RunDirError] = in_use) -> Lease:
    """Become the only writer. Raises the error of `refused`, which names the present one: at once if its process is on this
    machine, else with its next heartbeat, within a second. A holder that is gone is replaced: at once on this machine, else
    after `GONE_S` without a heartbeat."""
    mine = Holder.this_process()
    silent: Holder | None = None
    while True:
        with alone_in(path.parent):
            # Reading the holder and replacing it are one step under the lock: otherwise, of two processes that find a dead
            # holder, one would replace the other's new lease.
            other = read(path)
            if other is None or other.is_gone() or other == silent:
                fd = _write(path, mine, is_first=other is None)
                if fd is not None:
                    break
                continue  # another process was first: this file system has no locks
        if other.is_here() or not lasts(path, other, say):
            raise refused(path, read(path) or other)
        silent = other if read(path) is not None else None  # None: it was released meanwhile
    lease = Lease(path, mine, fd)
    if silent is not None:
        # Another host may have waited too, and locks may not work between hosts: the last one to write holds the lease.
        time.sleep(2 * BEAT_S)
        if (now := read(path)) != mine:
            lease.release()
            raise refused(path, now or silent)
        say(f"taken over from pid {silent.pid} on {silent.host}, which sent no heartbeat for {GONE_S:.0f} s")
    return lease


def is_alive(path: Path, holder: Holder, say: Callable[[str], None]) -> bool:
    """Whether the holder runs, by its process or its heartbeats; takes up to `GONE_S`."""
    return not holder.is_gone() and (holder.is_here() or not lasts(path, holder, say))


def lasts(path: Path, holder: Holder, say: Callable[[str], None]) -> bool:
    """Whether the holder is silent for `GONE_S`. Returns False at its first heartbeat, or if another process has become the
    writer; True if the lease was released."""
    patience, touched = Patience(GONE_S, say_after_s=_PATIENCE_S), _touched(path)
    while not patience.is_over:
        if _touched(path) != touched:
            return read(path) is None  # released meanwhile: the same as silent
        if patience.due():
            say(
                f"waiting {GONE_S:.0f} s for a heartbeat from pid {holder.pid} on {holder.host}, "
                f"which has written in {path.parent} since {stamp(holder.since)}"
            )
        time.sleep(_LOOK_S)
    return True


def _touched(path: Path) -> tuple[int, int] | None:
    """A value that changes with each heartbeat, and with each writer. Opens the file: only then does a network file system ask
    its server."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        found = os.fstat(file.fileno())
        return found.st_ino, found.st_mtime_ns
    return None


def silent_s(path: Path) -> float:
    """Seconds since the last heartbeat, computed from the clocks of two hosts: to show, not to decide with."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder, if its file system supports locks."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(fd)


def _write(path: Path, holder: Holder, is_first: bool) -> int | None:
    """Write the lease file atomically; returns it open, or None if another process was first."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, (json.dumps(asdict(holder), indent=1) + "\n").encode())
            os.fsync(fd)
            _name(temporary, path, is_first)
        except BaseException:
            os.close(fd)
            raise
        return fd
    except FileExistsError:
        return None
    except OSError as error:
        raise RunDirError(f"cannot write {path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _name(temporary: Path, path: Path, is_first: bool) -> None:
    """Give the file its final name. Raises FileExistsError if `is_first` and another process was first."""
    if is_first:
        try:
            os.link(temporary, path)
            return
        except FileExistsError:
            raise
        except OSError:  # this file system has no hard links: only the lock keeps others out
            pass
    os.replace(temporary, path)


class Lease:
    """The right to write in a run directory; ends with `release`, or with its process."""

    def __init__(self, path: Path, holder: Holder, fd: int) -> None:
        self._path = path
        self._holder = holder
        self._fd = fd  # the file that this process wrote, even if another has its name later
        self._over = threading.Event()
        self._beat = threading.Thread(target=self._touch, name="rankwise-lease", daemon=True)
        # If no thread can be started, no agent can be either, and that error is reported.
        with contextlib.suppress(RuntimeError):
            self._beat.start()

    def _touch(self) -> None:
        while not self._over.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a file server that does not answer may come back
                os.utime(self._fd)

    def release(self) -> None:
        """Does nothing in a process that was forked from the holder; keeps the file if another process has taken over."""
        if os.getpid() != self._holder.pid or self._over.is_set():
            return
        self._over.set()
        if self._beat.is_alive():
            self._beat.join()
        os.close(self._fd)
        with contextlib.suppress(RunDirError):
            current = read(self._path)
            if current is not None and current.token == self._holder.token:
                self._path.unlink(missing_ok=True)


class Fence:
    """Checks that a run directory still has the writer that it had when this object was made; passes if it had none, or has
    none now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._holder = read(path)

    def check(self) -> None:
        """Raises RunDirError if another run has become the writer."""
        now = read(self._path)
        if self._holder is not None and now is not None and now.token != self._holder.token:
            raise RunDirError(
                f"the run in {self._path.parent} was taken over by pid {now.pid} on {now.host} at {stamp(now.since)}, "
                f"because this process ({self._holder.host}) sent no heartbeat for {GONE_S:.0f} s; this process stops"
            )
