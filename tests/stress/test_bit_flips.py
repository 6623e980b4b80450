"""Random corruption of every kind: stress/bit_flips."""

from __future__ import annotations

from pathlib import Path

import pytest
from runners import right

pytestmark = pytest.mark.stress

DOSES = {"small": (30, ["--seed", "1"]), "whole": (300, [])}


def test_any_damage_is_found_its_file_and_tensor_named_and_the_checkpoint_before_used(dose: str, tmp_path: Path) -> None:
    draws, words = DOSES[dose]
    text = right("stress/bit_flips/run.py", "--draws", str(draws), "--folder", str(tmp_path), *words)
    ours = [line for line in text.splitlines() if line.startswith("rankwise")]
    assert len(ours) == 3
    assert all(f"{draws} of {draws} found and named, the one before used" in line for line in ours)
    assert list(tmp_path.iterdir()) == []
