"""SIGKILL at any moment of a run: a short version of benchmarks/kill_anywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks" / "kill_anywhere" / "bench.py"


@pytest.mark.parametrize(("how", "kills"), [([], 6), (["--blocking"], 3)], ids=["behind the loop", "blocking"])
def test_a_training_that_is_killed_again_and_again_is_the_one_that_was_never_killed(
    how: list[str], kills: int, tmp_path: Path
) -> None:
    memory = Path("/dev/shm")  # a kill is no power cut: what is written is there, flushed to a disk or not
    folder = memory if memory.is_dir() else tmp_path
    words = ["--kills", str(kills), "--in-save", str(kills // 3), "--steps", "200", "--folder", str(folder), *how]
    done = subprocess.run([sys.executable, str(BENCH), *words], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout
