"""How ranks are started: forked from the warm process if possible, otherwise each as a new process.

starter = Starter(plan);  starter.start(specs)       # asks; the pids come later
started = starter.receive()                          # {"pids": [...]}, or None while nothing has come
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from rankwise.agent.root_cause import signal_name
from rankwise.run.plan import Plan

_KILL_S = 3.0
_FORK_SERVER = str(Path(__file__).with_name("fork_server.py"))

Spec = dict[str, Any]
"""What fork_server.py must know of one rank; its docstring lists it."""


class Starter:
    """Owns the warm process and the channel to it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._specs: list[Spec] = []
        self._inbox: list[dict[str, Any]] = []
        self._partial = b""
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
        # Python's own start, and ours, would print their tracebacks at a Ctrl-C; it is the script's (unblocked by fork_server).
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return subprocess.Popen(command, env=environment, cwd=self._plan.cwd, pass_fds=[fd])
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    @property
    def warm_pid(self) -> int | None:
        return self._warm.pid if self._warm is not None else None

    def start(self, specs: list[Spec]) -> None:
        """Ask for one rank a spec. What comes of it is received later."""
        self._specs = specs
        if self.channel is None:
            self._inbox.append({"pids": [self._start_once(spec) for spec in specs]})
            return
        message = json.dumps({"ranks": specs}).encode() + b"\n"
        self.channel.setblocking(True)
        with contextlib.suppress(OSError):  # a dead warm process shows as end of file below
            self.channel.sendall(message)
        self.channel.setblocking(False)

    def _start_once(self, spec: Spec) -> int:
        reader, writer = os.pipe()
        try:
            _fill(writer, json.dumps(spec).encode())
            os.close(writer)
            process = self._python("once" if self._plan.interpreter else "exec", reader, spec["environment"])
        finally:
            os.close(reader)
        process.returncode = 0  # the agent reaps it itself: Popen must not wait for it
        return process.pid

    def receive(self) -> dict[str, Any] | None:
        """The next message of the warm process; {"failed": why} when it is gone, after which it is to be closed. Never waits
        for a running one.
        """
        if not self._inbox and self.channel is not None:
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
        """How the warm process ended, which has closed its end of the channel."""
        status = None
        if self._warm is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._warm.wait(timeout=_KILL_S)
        return f"was killed by {signal_name(-status)}" if status is not None and status < 0 else "ended"

    def fall_back(self) -> None:
        """Give up the warm process and start the ranks asked for by themselves."""
        self.close()
        self.start(self._specs)

    def close(self) -> None:
        """End the warm process, if it is there."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self._warm is not None:
            self._warm.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # state D: it waits for a disk, nobody waits for it
                self._warm.wait(timeout=_KILL_S)
            self._warm = None


def _fill(fd: int, data: bytes) -> None:
    """Into a pipe before anyone reads it; it is made as large as it must be."""
    with contextlib.suppress(OSError):  # above the system's limit for users: then 64 KiB is what there is
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, max(65536, len(data)))
    os.set_blocking(fd, False)
    if os.write(fd, data) < len(data):
        raise OSError(f"the environment is too large: {len(data)} bytes do not fit into a pipe")
