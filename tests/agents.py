"""Agents of several nodes on one machine, for tests: the ssh to each host stays on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from launched import DEADLINE_S, left_over, wait_for
from plans import plan

from rankwise.run.directory import Failure, RunDir, write_json
from rankwise.run.plan import Host
from rankwise.schedulers.job import AGENT

PLAN = plan(
    argv=("script.py",), on="ssh", nproc=0, tee="none", join_timeout_s=20.0, node_wait_s=4.0, grace_s=20.0, stall_warn_s=0.0,
    fork=False,  # nothing here needs torch, and a rank without a warm process starts at once
)  # fmt: skip

_SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
echo "$$" > "$HOSTS/$2.pid"
if [ -e "$HOSTS/$2.refuses" ]; then cat "$HOSTS/$2.refuses" >&2; exit 255; fi
exec sh -c "$3"
"""


class Agents:
    """A run on hosts a, b, ... which are all this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = RunDir(folder / "runs" / "train")
        self.hosts = folder / "hosts"
        self.hosts.mkdir()
        ssh = folder / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(_SSH)
        ssh.chmod(0o755)
        self.process: subprocess.Popen[str] | None = None

    def start(self, source: str, *hosts: Host, **changes: object) -> Agents:
        self.run.prepare(fresh=False)
        (self.folder / "script.py").write_text(source)
        changes = {"nodes": len(hosts), "min_nodes": len(hosts), **changes}
        planned = replace(PLAN, run_dir=str(self.run.path), cwd=str(self.folder), hosts=hosts, **changes)  # type: ignore[arg-type]
        write_json(self.run.plan, planned.record())
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "HOSTS": str(self.hosts)}
        self.process = subprocess.Popen(
            [*AGENT, str(self.run.path)], env=environment, cwd=self.folder,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        return self

    def refuse(self, host: str, words: str) -> None:
        """From now on, ssh to this host fails with these words."""
        (self.hosts / f"{host}.refuses").write_text(words)

    def lose(self, host: str) -> None:
        """Kill the ssh to this host."""
        os.kill(int(wait_for(lambda: (self.hosts / f"{host}.pid").read_text(), "its ssh")), signal.SIGKILL)

    def pids(self) -> list[int]:
        """The pids of the ranks of the newest attempt, when all have started."""
        return list(wait_for(lambda: self.run.world.exists() and self.run.attempts()[-1].pids, "the ranks"))

    def log(self, rank: int) -> str:
        return self.run.log(rank).read_text() if self.run.log(rank).exists() else ""

    def signal(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def has_ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def wait(self) -> tuple[int, str]:
        """(exit status, what was printed)."""
        assert self.process is not None
        out, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out

    def failure(self) -> Failure:
        found = self.run.read_failure()
        assert found is not None
        return found

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., Agents]]:
    started: list[Agents] = []

    def make() -> Agents:
        started.append(Agents(tmp_path))
        return started[-1]

    yield make
    for run in started:
        run.end()
    assert wait_for(lambda: not left_over(tmp_path), "nothing left in ps")
