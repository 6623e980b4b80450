"""Preemptions of a training with each launcher, and kills between changing numbers of ranks: stress/preemptions."""

from __future__ import annotations

import pytest
from clusters import Start, openmpi, slurm_elsewhere
from runners import right

__all__ = ["openmpi", "slurm_elsewhere"]  # fixtures

pytestmark = pytest.mark.stress

BUSY = ["--steps", "60", "--within-s", "20"]  # a machine of CI may be busy


def preempted(launcher: str, stops: int, *words: str) -> None:
    text = right("stress/preemptions/run.py", launcher, "--stops", str(stops), *words)
    assert f"{launcher}: {stops} preemptions, 0 wrong" in text


def test_preemptions_leave_every_step_every_sample_and_every_bit_as_they_were(dose: str) -> None:
    preempted("rankwise", *{"small": (1, *BUSY), "whole": (50,)}[dose])


@pytest.mark.stress(dose="whole")  # tests/stop/test_signal.py has one stop and resume
def test_preemptions_under_torchrun_leave_every_step_every_sample_and_every_bit_as_they_were() -> None:
    preempted("torchrun", 50)


@pytest.mark.stress(dose="whole")  # similar to torchrun, and tests/cluster stops mpirun
@pytest.mark.cluster
def test_a_preemption_under_mpirun_leaves_every_step_every_sample_and_every_bit_as_they_were(openmpi: Start, dose: str) -> None:
    preempted("mpirun", *{"small": (1, *BUSY), "whole": (50,)}[dose])


@pytest.mark.stress(dose="whole")  # for most of its two minutes, Slurm waits to restart it; tests/cluster has each part of it
@pytest.mark.cluster
def test_a_preemption_in_a_queue_leaves_every_step_every_sample_and_every_bit_as_they_were(
    slurm_elsewhere: None, dose: str
) -> None:
    stops, *words = {"small": ("1", "--steps", "100"), "whole": ("10",)}[dose]
    text = right("stress/preemptions/slurm.py", "--stops", stops, *words)
    assert f"slurm: {stops} preemptions, 0 wrong" in text


def test_all_ranks_stop_after_the_same_step_when_no_collective_keeps_them_together(dose: str) -> None:
    words = {"small": ["none", "--stops", "2"], "whole": []}[dose]
    text = right("stress/preemptions/loops.py", *words)
    assert "rankwise run, none: " in text
    assert "torchrun, 2 nodes, none: " in text


@pytest.mark.stress(dose="whole")  # tests/test_chain.py has a shorter chain
def test_a_training_killed_on_changing_numbers_of_ranks_is_the_one_that_stopped_cleanly(dose: str) -> None:
    words = {"small": ["--attempts", "3", "--steps", "90"], "whole": []}[dose]
    text = right("stress/preemptions/chain.py", *words)
    assert "parameters bit for bit those of the clean chain" in text
