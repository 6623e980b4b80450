"""Runs a command of stress/ or benchmarks/, as typed by somebody who has configured nothing, and checks its exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else "/tmp"


def right(runner: str, *words: str) -> str:
    """What the runner printed. Fails with this text if the runner did not exit with 0.

    The time limit is that of the test: then the runner is interrupted, and ends what it has started. Its ranks are forked,
    unlike those of other tests (conftest.py): they train, and torch is imported once for all of them.
    """
    command = [sys.executable, str(ROOT / runner), *words]
    environ = {**os.environ, "XDG_CONFIG_HOME": os.getcwd()}  # the test's own folder, without a site file
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            text, _ = process.communicate()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=200)
            raise
    print(text)
    assert process.returncode == 0, f"{runner} {' '.join(words)}: status {process.returncode}\n{text}"
    return text
