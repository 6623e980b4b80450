"""What a run reports of collectives in memory that its ranks share: as of those of torch."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launched import launch, wait_for

import rankwise

__all__ = ["launch"]  # a fixture

TOGETHER = """
import sys, time, torch, rankwise
world = rankwise.init()
for step in range(5):
    rankwise.all_reduce(torch.ones(4))
if world.rank == 1:
    FAULT
rankwise.all_reduce(torch.ones(4))
"""


def test_the_late_rank_is_named_and_those_that_wait_for_it(launch) -> None:
    run = launch(TOGETHER.replace("FAULT", "time.sleep(600)"), options=("--nproc", "3", "--stall-warn", "1"))
    line = wait_for(lambda: [line for line in run.output().splitlines() if "no progress for" in line], "a verdict")[0]
    assert "rank 1 is at script.py:7 (idle" in line
    assert "rank 0 waits in all_reduce at script.py:8" in line
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130


def test_names_that_are_not_ascii_are_told_as_they_are(launch, tmp_path: Path) -> None:
    """Of a folder, a module and a function."""
    folder = tmp_path / "mes dépôts"
    folder.mkdir()
    (folder / "rankwise").symlink_to(Path(rankwise.__file__).parent)  # its own frames must be found as well
    (tmp_path / "entraînement.py").write_text("import time\ndef préparer():\n    time.sleep(600)\n")
    run = launch(
        TOGETHER.replace("FAULT", "import entraînement; entraînement.préparer()"),
        options=("--nproc", "3", "--stall-warn", "1"),
        env={**os.environ, "PYTHONPATH": f"{folder}"},
    )
    line = wait_for(lambda: [line for line in run.output().splitlines() if "no progress for" in line], "a verdict")[0]
    assert "rank 1 is at entraînement.py:3 in préparer (idle" in line
    assert "rank 0 waits in all_reduce at script.py:8" in line
    os.kill(run.run.attempts()[-1].pids[1], signal.SIGSEGV)
    assert run.wait() == 139
    assert "rank 1 was killed by SIGSEGV (entraînement.py:3)" in run.output()


def test_a_rank_that_exits_early_is_named_with_the_collective_in_which_another_waited(launch) -> None:
    run = launch(TOGETHER.replace("FAULT", "sys.exit(0)"), options=("--nproc", "2"))
    assert run.wait() == 1
    assert "rank 1 exited with status 0 while rank 0 waited for it in all_reduce (script.py:8), on" in run.output()


@pytest.mark.stress
def test_collectives_of_a_script_that_prints_nothing_are_progress(launch) -> None:
    steps = TOGETHER.replace("range(5)", "range(20)").replace(
        "    rankwise", "    time.sleep(0.3 * (world.rank == 0)); rankwise"
    )
    run = launch(steps.replace("FAULT", "pass"), options=("--nproc", "2", "--stall-warn", "1.5"))
    assert run.process.wait(timeout=120) == 0
    assert "no progress" not in run.output()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("torch.distributed.barrier()", "rank 1 calls barrier() at script.py:7, but ranks 0, 2 call"),
        ("rankwise.all_reduce(torch.ones(5))", "rank 1 calls all_reduce(sum, float32[5]) at script.py:7, but ranks 0, 2 call"),
    ],
    ids=["one of torch", "another shape"],
)
@pytest.mark.one_in(2)
def test_a_collective_that_differs_from_the_others_is_found_by_check_collectives(launch, fault: str, said: str) -> None:
    run = launch(TOGETHER.replace("FAULT", fault), options=("--nproc", "3", "--check-collectives"))
    assert run.wait() == 1
    assert f"the ranks do not match in collective 6: {said} all_reduce(sum, float32[4]) at script.py:8, on" in run.output()


@pytest.mark.stress
def test_without_the_check_tensors_of_different_size_end_the_run_with_what_each_rank_calls(launch) -> None:
    run = launch(TOGETHER.replace("FAULT", "rankwise.all_reduce(torch.ones(5))"), options=("--nproc", "3"))
    assert run.wait() == 1
    called = "ranks 0, 2 call all_reduce(sum, float32[4]), rank 1 calls all_reduce(sum, float32[5])"
    assert f"all 3 ranks raised MismatchError: the ranks do not match in this collective: {called}; call the" in run.output()
