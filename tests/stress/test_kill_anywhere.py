"""SIGKILL at any moment of a run: stress/kill_anywhere."""

from __future__ import annotations

import pytest
from runners import MEMORY, right

pytestmark = pytest.mark.stress

DOSES = {
    "small": {"behind": ["--kills", "2", "--in-save", "1", "--steps", "150"],
              "blocking": ["--kills", "1", "--in-save", "1", "--steps", "100", "--blocking"]},
    "whole": {"behind": ["--kills", "200", "--in-save", "60", "--seed", "2"], "blocking": ["--blocking"]},
}  # fmt: skip
OF_STRATEGIES = {"small": ["--kills", "2", "--in-save", "1", "--steps", "100"], "whole": ["--kills", "50", "--in-save", "15"]}


@pytest.mark.parametrize("saves", ["behind", pytest.param("blocking", marks=pytest.mark.stress(dose="whole"))])
def test_a_training_that_is_killed_again_and_again_is_the_one_that_was_never_killed(saves: str, dose: str) -> None:
    text = right("stress/kill_anywhere/run.py", "--folder", MEMORY, *DOSES[dose][saves])
    assert "bit for bit" in text


@pytest.mark.parametrize(
    "name",
    [
        "diloco:5:int8",
        *(pytest.param(name, marks=pytest.mark.stress(dose="whole")) for name in (
            "all-reduce:bf16", "all-reduce:fp16", "all-reduce:int8", "all-reduce:powersgd:2", "local-sgd:7",
            "post-local-sgd:40:7", "diloco:7",
        )),
    ],
)  # fmt: skip
def test_so_it_is_by_every_strategy(name: str, dose: str) -> None:
    text = right("stress/kill_anywhere/run.py", "--folder", MEMORY, "--sync", name, *OF_STRATEGIES[dose])
    assert "bit for bit" in text
