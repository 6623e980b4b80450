"""A training that is preempted at random goes on as if it never was: benchmarks/preemptions does it fifty times a launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from clusters import Start, openmpi

__all__ = ["openmpi"]  # a fixture

BENCH = Path(__file__).parents[1] / "benchmarks" / "preemptions" / "bench.py"


def preempted(launcher: str, stops: int) -> None:
    words = [BENCH, launcher, "--stops", str(stops), "--steps", "60", "--within-s", "20"]  # a machine of CI may be busy
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{launcher}: {stops} preemptions, 0 wrong" in done.stdout


@pytest.mark.parametrize("launcher", ["rankwise", "torchrun"])
def test_two_preemptions_leave_every_step_every_sample_and_every_bit_as_they_were(launcher: str) -> None:
    preempted(launcher, 2)


@pytest.mark.cluster
def test_a_preemption_under_mpirun_leaves_every_step_every_sample_and_every_bit_as_they_were(openmpi: Start) -> None:
    preempted("mpirun", 1)
