"""The same script started by mpirun alone, of Open MPI and of MPICH, without mpi4py."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clusters import PYTHON, ROOT, Start, at_once, mpich, nothing_is_left, openmpi, ranks, script

__all__ = ["mpich", "openmpi", "script"]  # fixtures

pytestmark = pytest.mark.cluster


def numbers(n: int, job: int = 0) -> list[list[int]]:
    """What `script` prints on n ranks of which each has this $JOB."""
    return [[rank, n, rank, n, 0, n * (n + 1) // 2 + n * job] for rank in range(n)]


@pytest.fixture(params=["openmpi", "mpich"])
def mpirun(request: pytest.FixtureRequest) -> Start:
    start: Start = request.getfixturevalue(request.param)
    return start


def test_three_ranks_meet_and_end_well_and_nothing_is_left(mpirun: Start, script: str) -> None:
    done = mpirun("-np", "3", PYTHON, script)
    assert ranks(done) == numbers(3)
    assert nothing_is_left()


def test_jobs_at_once_in_one_folder_do_not_meet_each_other(mpirun: Start, script: str) -> None:
    at_once(script, 4)
    with ThreadPoolExecutor() as pool:
        jobs = {job: pool.submit(mpirun, "-np", "2", PYTHON, script, JOB=str(job)) for job in (100, 200)}
    for job, done in jobs.items():
        assert ranks(done.result()) == numbers(2, job)
    assert nothing_is_left()


@pytest.mark.stress(dose="whole")  # the small dose has it with srun
def test_the_trainer_example_trains_on_four_ranks(openmpi: Start) -> None:
    done = openmpi("-np", "4", PYTHON, str(ROOT / "examples" / "03_trainer_digits.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "global batch 64 = 16 x 4 ranks" in done.stdout
    assert done.stdout.count("done: 480 steps") == 1


def test_the_line_of_returnns_documentation_works_as_it_stands(openmpi: Start, script: str) -> None:
    line = (
        "-np 4 -bind-to none -map-by slot -x NCCL_DEBUG=INFO -x LD_LIBRARY_PATH -x PATH -x HOROVOD_TIMELINE -x DEBUG "
        "-mca pml ob1 -mca btl ^openib"
    )
    done = openmpi(*line.split(), PYTHON, script)
    assert ranks(done) == numbers(4)
    assert "one core" not in done.stderr


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: there is nothing to bind away")
def test_ranks_that_open_mpi_binds_to_one_core_are_told_once_with_the_cure(openmpi: Start, script: str) -> None:
    line = "Open MPI has bound each rank and its loader workers to one core"
    bound = openmpi("-np", "2", PYTHON, script, OMPI_MCA_rmaps_base_oversubscribe="0")
    assert bound.stderr.count(line) == 1, bound.stderr
    assert "mpirun --bind-to none" in bound.stderr
    assert line not in openmpi("-np", "1", "--bind-to", "none", PYTHON, script).stderr


def test_a_rank_that_never_comes_is_named(mpich: Start) -> None:
    Path("late.py").write_text(
        """
import os, pathlib, sys, time, rankwise
rank, init = os.environ["PMI_RANK"], rankwise.init
if rank == "1":
    sys.exit(0)
pathlib.Path(f"here-{rank}").touch()
while not all(os.path.exists(f"here-{other}") for other in (0, 2)):  # one may import much longer than the other
    time.sleep(0.01)
try:
    init(join_timeout_s=6)
except rankwise.RankwiseError as error:
    sys.exit(str(error))
"""
    )
    done = mpich("-np", "3", PYTHON, "late.py")
    assert done.returncode != 0
    assert done.stderr.count("rank 1 of 3 (mpich) did not connect to rank 0 within 6 s; rank 0 listens on ") == 2, done.stderr
    assert nothing_is_left()
