"""Linux processes: subreaper, death with the parent, states, limits, and killing a tree of processes.

become_subreaper()              # orphans below this process become its children, not init's
end_tree(exclude={warm_pid})    # kills everything below this process
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import time
from collections.abc import Collection
from pathlib import Path

from rankwise.errors import ConfigError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""For a launcher or an agent each of them is a request to stop the run. A rank handles fewer (stop/signal.py)."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those to handle. After `nohup` SIGHUP is ignored, and stays ignored: the run continues when the terminal closes."""
    return tuple(s for s in STOP_SIGNALS if s is not signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN)


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def check_proc(proc: Path = Path("/proc")) -> None:
    """Raises ConfigError if /proc is missing, or has the numbers of another namespace: we would watch and kill others."""
    try:
        is_own = str((proc / "self").readlink()) == str(os.getpid())
    except OSError:
        is_own = False
    if not is_own:
        raise ConfigError(
            "/proc does not show this process (in a chroot, or in a container that shares the /proc of its host), and without "
            "it rankwise cannot watch ranks; as root, type: mount -t proc proc /proc"
        )


def become_subreaper() -> None:
    """Orphaned descendants become children of this process, which must reap them (prctl(2))."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel send SIGKILL to this process when its parent ends; exit at once if the parent has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks after boot; None if it does not run. Pid and start time identify a process."""
    fields = _stat(pid)
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def state(pid: int) -> str:
    """The kernel's letter for the state of `pid` (R, S, D, T, Z, ...); empty if it is gone."""
    fields = _stat(pid)
    return fields[0].decode() if fields else ""


def blocked_in(pid: int) -> str | None:
    """The kernel's function in which a thread of `pid` sleeps uninterruptibly (state D); None if no thread does.

    Looks at all threads: the first may be a zombie while another waits for a disk.
    """
    for thread in _listdir(f"/proc/{pid}/task"):
        fields = _stat(int(thread))
        if fields and fields[0] == b"D":
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/task/{thread}/wchan").read_text().strip()
                return name if name not in ("", "0") else "the kernel"
    return None


def cpu_s(pid: int) -> float:
    """Processor seconds that `pid` has used; 0 if it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def used_s(pid: int) -> float:
    """Processor seconds that `pid` and its children have used, those that it has waited for included; 0 if it is gone."""
    fields = _stat(pid)
    if not fields:
        return 0.0
    ticks = sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK") + sum(map(cpu_s, children(pid)))


def queued_s(pid: int) -> float:
    """How long the first thread of `pid` was ready to run and had no processor; 0 if it is gone, or if the kernel does not
    count it. https://docs.kernel.org/scheduler/sched-stats.html"""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def command(pid: int) -> str:
    """The program that `pid` runs, as `ps` shows it; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def ancestors(pid: int) -> list[list[str]]:
    """The command lines of the ancestors of `pid`, its parent first, as far as they can be read."""
    found = []
    while (fields := _stat(pid)) and (pid := int(fields[1])) > 0:
        with contextlib.suppress(OSError):
            found.append(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).removesuffix("\0").split("\0"))
    return found


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat after the command, which may contain any character."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return stat[stat.rindex(b")") + 2 :].split()


def shortage(error: OSError) -> str | None:
    """The limit of this user that has caused the error, and how near it is; None if the error has another cause."""
    if error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"at most {limit} open files per process (ulimit -n)"
    if error.errno == errno.EAGAIN:
        limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if 0 < limit < 2 * (tasks := _tasks()) + 64:
            return f"at most {limit} processes and threads of this user (ulimit -u), {tasks} now"
        return "a limit on processes, perhaps of this container (pids.max)"
    if error.errno == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return f"at most {limit // 1024} kB per file (ulimit -f)" if limit != resource.RLIM_INFINITY else None
    return None


def _tasks() -> int:
    """Processes and threads of this user; the limit counts both."""
    count = 0
    for name in _listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def boot_id() -> str:
    """The kernel's identifier of this boot: it distinguishes a pid from before a reboot from a current one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine_id() -> str:
    """The identifier of this installation, the same after a reboot; empty if there is none, as in some containers."""
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """Direct children of `pid`, including zombies; empty if it is gone."""
    found: list[int] = []
    for thread in _listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents before their children."""
    found = children(pid)
    for child in found:  # the list grows in this loop: breadth first
        found += children(child)
    return found


def send(pid: int, signum: int) -> bool:
    """Send a signal; it is not an error if the process is gone already. False if it belongs to another user (sudo)."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True


def send_if_handled(pid: int, signum: int) -> bool:
    """As `send`, but only if the process handles or ignores this signal by now, so that it cannot end the process. Returns
    whether it was sent."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigIgn:", "SigCgt:"))]
        if any(mask >> (signum - 1) & 1 for mask in masks):
            return send(pid, signum)
    return False


def end_tree(exclude: Collection[int] = (), bound_s: float = 5.0, others_s: float = 0.0) -> bool:
    """SIGKILL and reap every process below this one, except `exclude` and what is below those, and except other users'.

    This process must be a subreaper: it inherits processes that are orphaned while the tree is killed, and kills them in the
    next round. Returns whether nothing is left. A process in uninterruptible sleep (state D) can outlive `bound_s`. Others need
    longer if there are thousands, or to free much memory: this waits up to `others_s` for them.
    """
    began = time.monotonic()
    of_others: set[int] = set()
    while True:
        below = [child for child in children(os.getpid()) if child not in exclude and child not in of_others]
        if not below:
            return True
        for pid in below:
            for victim in (pid, *descendants(pid)):
                if not send(victim, signal.SIGKILL):
                    of_others.add(victim)
        for pid in below:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        since_s = time.monotonic() - began
        if since_s > max(bound_s, others_s) or (since_s > bound_s and all(map(blocked_in, below))):
            return False
        time.sleep(0.002)
