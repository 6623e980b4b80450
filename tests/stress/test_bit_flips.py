"""Random damage of every kind: a short version of benchmarks/bit_flips."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "benchmarks" / "bit_flips" / "bench.py"


def test_any_damage_is_found_its_file_and_tensor_named_and_the_checkpoint_before_used(tmp_path: Path) -> None:
    words = ["--draws", "40", "--seed", "1", "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, str(BENCH), *words], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = [line for line in done.stdout.splitlines() if line.startswith("rankwise")]
    assert len(ours) == 3
    assert all("40 of 40 found and named, the one before used" in line for line in ours)
    assert list(tmp_path.iterdir()) == []
