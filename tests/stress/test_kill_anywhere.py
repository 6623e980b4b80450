"""SIGKILL at any moment of a run: stress/kill_anywhere."""

from __future__ import annotations

import pytest
from runners import MEMORY, right

pytestmark = pytest.mark.stress

DOSES = {
    "small": {"behind": ["--kills", "3", "--in-save", "1", "--steps", "150"],
              "blocking": ["--kills", "1", "--in-save", "1", "--steps", "100", "--blocking"]},
    "whole": {"behind": ["--kills", "200", "--in-save", "60", "--seed", "2"], "blocking": ["--blocking"]},
}  # fmt: skip


@pytest.mark.parametrize("saves", ["behind", pytest.param("blocking", marks=pytest.mark.stress(dose="whole"))])
def test_a_training_that_is_killed_again_and_again_is_the_one_that_was_never_killed(saves: str, dose: str) -> None:
    text = right("stress/kill_anywhere/run.py", "--folder", MEMORY, *DOSES[dose][saves])
    assert "bit for bit" in text
