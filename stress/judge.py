"""What the runners in this folder share: the error that says what is wrong, the processes of a run, and the exit status.

sys.exit(judged(lambda folder: print(trial(folder)), Path("/dev/shm")))
"""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

from rankwise.errors import CheckpointError


class WrongError(Exception):
    """Something that must not happen has happened."""


def processes(folder: Path) -> list[psutil.Process]:
    """All processes, except this one, that name the folder in their command line or have their run directory below it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = [*process.cmdline(), process.environ().get("RANKWISE_RUN_DIR", "")]
            if process.pid != os.getpid() and any(f"{folder}/" in f"{word}/" for word in words):
                found.append(process)
    return found


def judged(trial: Callable[[Path], None], where: Path | None = None) -> int:
    """0 if the trial found nothing wrong; 1 if it raised WrongError or CheckpointError, which is printed.

    The trial gets a new folder in `where` (default: the folder for temporary files). Processes that it has started are ended.
    """
    with tempfile.TemporaryDirectory(dir=where) as name:
        try:
            trial(Path(name))
        except (WrongError, CheckpointError) as problem:
            print(f"WRONG: {problem}")
            return 1
        finally:
            for process in processes(Path(name)):
                process.kill()
    return 0
