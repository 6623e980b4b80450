"""Runs of `rankwise run` for tests: in the background, watched through the files that they write, and without leftovers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankwise.host import processes
from rankwise.run.directory import RunDir

DEADLINE_S = 120.0

FORKED = ("--nproc", "2", "--start-method", "fork")
"""Options of a run that tests the warm process. In other runs it exists only if their script imports torch (conftest.py)."""


def wait_for(condition: Callable[[], Any], what: str, instead: Callable[[], str] = str) -> Any:
    """The first true value of `condition`. Fails after a deadline, with the text of `instead`."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}: {instead()}"
        time.sleep(0.01)
    return value


def with_name_servers() -> dict[str, str]:
    """The environment for the few processes that ask a name server: conftest.py sets RES_OPTIONS, so that tests do not."""
    return {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}


def left_over(folder: Path) -> list[str]:
    """Processes that have this folder in their command line or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.environ().get("RANKWISE_RUN_DIR", "")]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(folder) in word for word in words):
            found.append(f"{process.pid} {words}")
    return found


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Launched:
    """A `rankwise run` in the background."""

    def __init__(self, folder: Path, *words: str, **options: object) -> None:
        self.folder = folder
        self.run = RunDir(folder / "runs" / "script")
        self.out = open(folder / "out.txt", "w+")  # noqa: SIM115  # closed by end()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rankwise", "run", *words], cwd=folder, stdout=self.out, stderr=subprocess.STDOUT,
            start_new_session=True, **options,
        )  # type: ignore[call-overload]  # fmt: skip

    def pids(self) -> list[int]:
        """The pids of the ranks, when they exist."""
        wait_for(lambda: self.run.world.exists() and self.run.attempts()[-1].pids, "the ranks")
        return list(self.run.attempts()[-1].pids)

    def agent(self) -> int:
        """Its pid, when it exists. The launcher also has other children, because it asks git for the code."""
        return wait_for(
            lambda: [pid for pid in processes.children(self.process.pid) if b"rankwise.agent" in _words(pid)], "an agent"
        )[0]

    def steps(self) -> int:
        """The last step in metrics.jsonl."""
        return max((record["step"] for record in self.run.read_metrics()), default=0)

    def wait(self) -> int:
        return self.process.wait(timeout=DEADLINE_S)

    def output(self) -> str:
        return (self.folder / "out.txt").read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.out.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(source: str, *words: str, options: tuple[str, ...] = ("--nproc", "2"), **popen: object) -> Launched:
        script = tmp_path / "script.py"
        script.write_text(source)
        if "--start-method" not in options and re.search(r"import .*(torch|rankwise)", source):
            options = (*options, "--start-method", "fork")  # all ranks use one import
        started.append(Launched(tmp_path, *options, str(script), *words, **popen))
        return started[-1]

    yield start
    for run in started:
        run.end()
    wait_for(lambda: not left_over(tmp_path), "nothing left in ps", lambda: "\n".join(left_over(tmp_path)))
