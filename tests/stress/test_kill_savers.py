"""SIGKILL inside a save, corruption, a full disk, a read-only folder: stress/kill_savers."""

from __future__ import annotations

import pytest
from runners import MEMORY, right

pytestmark = pytest.mark.stress

DOSES = {"small": ["--kills", "5", "--draws", "3", "--savers", "rankwise", "one file"], "whole": []}


def test_what_rankwise_resumes_after_a_kill_or_damage_is_a_complete_save(dose: str) -> None:
    text = right("stress/kill_savers/run.py", "--folder", MEMORY, *DOSES[dose])
    lines = text.splitlines()
    for saver in ("rankwise, blocking", "rankwise, background"):
        assert sum(line.startswith(saver) for line in lines) >= 4  # and a fifth, the full disk, if a tmpfs can be mounted
    # The runner finds what a plain file does not notice: a flipped bit.
    flipped = next(line for line in lines if line.startswith("torch.save, one file") and "bit flip" in line)
    assert "load something else, silently" in flipped
