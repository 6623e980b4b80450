"""How ranks are started: forked from the warm process if possible, otherwise each as a new process.

starter = Starter(plan);  starter.start(specs)       # asks for them; the pids come later
started = starter.receive()                          # {"pids": [...]}, or None while nothing has come
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from rankwise.agent.root_cause import signal_name
from rankwise.errors import ConfigError
from rankwise.host import processes
from rankwise.run.plan import Plan

_KILL_S = 3.0
_FORK_SERVER = str(Path(__file__).with_name("fork_server.py"))

Spec = dict[str, Any]
"""What fork_server.py must know of one rank; the docstring there lists the fields."""


class Starter:
    """Owns the warm process and the channel to it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._specs: list[Spec] = []
        self._inbox: list[dict[str, Any]] = []
        self._partial = self._outbox = b""
        self._warm: subprocess.Popen[bytes] | None = None
        self.channel: socket.socket | None = None
        if plan.fork:
            self.channel, theirs = socket.socketpair()
            self.channel.setblocking(False)
            with theirs:
                self._warm = self._python("fork", theirs.fileno(), {**os.environ, "OMP_NUM_THREADS": "1"})

    def _python(self, mode: str, fd: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        interpreter = self._plan.interpreter or (sys.executable,)
        command = [*interpreter, _FORK_SERVER, mode, str(fd), str(os.getpid()), *self._plan.argv]
        # Until the script runs, a Ctrl-C would print tracebacks of Python's start and of rankwise; fork_server unblocks it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return subprocess.Popen(command, env=environment, cwd=self._plan.cwd, pass_fds=[fd])
        except OSError as error:
            if processes.shortage(error) is not None:
                raise
            is_there = error.errno == errno.ENOENT and Path(interpreter[0]).exists()
            why = "its first line names a program that is not there" if is_there else error.strerror
            raise ConfigError(
                f"{platform.node()} cannot start {interpreter[0]}, which is to run the script: {why}; repair or replace it"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    @property
    def warm_pid(self) -> int | None:
        return self._warm.pid if self._warm is not None else None

    def start(self, specs: list[Spec]) -> None:
        """Ask for one rank per spec; `receive` returns the answer later."""
        self._specs = specs
        if self.channel is None:
            self._inbox.append({"pids": [self._start_once(spec) for spec in specs]})
            return
        self._outbox = json.dumps({"ranks": specs}).encode() + b"\n"
        self._send()

    def _send(self) -> None:
        """Send what fits. The warm process reads only once it has imported torch, and the agent must not wait for that."""
        assert self.channel is not None
        with contextlib.suppress(OSError):  # no more fits; or the warm process is dead: _read sees the end of the file
            while self._outbox:
                self._outbox = self._outbox[self.channel.send(self._outbox) :]

    def _start_once(self, spec: Spec) -> int:
        mode = "once" if self._plan.interpreter else "exec"
        reader = _readable(json.dumps(spec).encode())
        try:
            process = self._python(mode, reader, spec["environment"])
        finally:
            os.close(reader)
        process.returncode = 0  # the agent reaps the process: Popen must not wait for it
        return process.pid

    def receive(self) -> dict[str, Any] | None:
        """The next message of the warm process; {"failed": why} if it has exited, after which the caller closes the starter.
        Never waits for a running process.
        """
        if not self._inbox and self.channel is not None:
            self._send()
            self._read()
        return self._inbox.pop(0) if self._inbox else None

    def _read(self) -> None:
        assert self.channel is not None
        try:
            data = self.channel.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._inbox.append({"failed": f"the warm process {self._end()}"})
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._inbox += [json.loads(line) for line in lines]

    def _end(self) -> str:
        """How the warm process ended, once it has closed its end of the channel."""
        status = None
        if self._warm is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._warm.wait(timeout=_KILL_S)
        return f"was killed by {signal_name(-status)}" if status is not None and status < 0 else "ended"

    def fall_back(self) -> None:
        """Give up the warm process and start each requested rank as a new process."""
        self.close()
        self.start(self._specs)

    def close(self) -> None:
        """End the warm process, if there is one."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self._warm is not None:
            self._warm.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # state D: it waits for a disk, so we do not wait for it
                self._warm.wait(timeout=_KILL_S)
            self._warm = None


def _readable(data: bytes) -> int:
    """A file descriptor from which `data` can be read."""
    reader, writer = os.pipe()
    with contextlib.suppress(OSError):  # above the system's limit for users: then it stays at 64 KiB
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, max(65536, len(data)))
    os.set_blocking(writer, False)
    fits = os.write(writer, data) == len(data)
    os.close(writer)
    if fits:
        return reader
    os.close(reader)
    file = os.memfd_create("spec")  # not always: a limit for the size of files (`ulimit -f`) holds for it too
    with open(file, "wb", closefd=False) as stream:
        stream.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    return file
