"""The same script started by srun alone over two hosts, and by mpirun inside a Slurm job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster_runs import LISTENS, write
from clusters import PYTHON, ROOT, Start, at_once, mpich, nothing_is_left, openmpi, ranks, script, slurm

__all__ = ["mpich", "openmpi", "script", "slurm"]  # fixtures

pytestmark = pytest.mark.cluster

THREE = [[0, 3, 0, 2, 0, 6], [1, 3, 1, 2, 0, 6], [2, 3, 0, 1, 1, 6]]
"""Two ranks on the first host, and one on the second. The truth table has two on each."""


def test_tasks_on_two_hosts_meet_though_each_hosts_own_name_is_a_loopback_address(slurm: Start, script: str) -> None:
    assert ranks(slurm("srun", "-N2", "-n3", PYTHON, script)) == THREE
    assert nothing_is_left()


def test_rank_0_on_the_second_host_announces_that_hosts_address(slurm: Start, script: str) -> None:
    Path("hosts").write_text("node2\nnode2\nnode1\n")
    done = slurm("srun", "-m", "arbitrary", "-N2", "-n3", PYTHON, script, SLURM_HOSTFILE="hosts")
    assert ranks(done) == [[0, 3, 0, 2, 1, 6], [1, 3, 1, 2, 1, 6], [2, 3, 0, 1, 0, 6]]


def test_the_store_of_tasks_that_meet_by_a_file_listens_at_the_address_by_which_they_come(slurm: Start) -> None:
    done = slurm("srun", "-N2", "--ntasks-per-node=2", PYTHON, write(LISTENS))
    assert sorted(done.stdout.splitlines()) == ["0 10.88.0.1", "1", "2", "3"], done.stderr


def test_steps_at_once_in_one_folder_do_not_meet_each_other(slurm: Start, script: str) -> None:
    at_once(script, 4)
    with ThreadPoolExecutor() as pool:
        words = "srun", "-N2", "--ntasks-per-node=1", PYTHON, script
        steps = {job: pool.submit(slurm, *words, JOB=str(job)) for job in (100, 200)}
    for job, step in steps.items():
        total = 1 + 2 + 2 * job
        assert ranks(step.result()) == [[0, 2, 0, 1, 0, total], [1, 2, 0, 1, 1, total]]
    assert nothing_is_left()


@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_mpirun_in_a_slurm_job_starts_one_world_over_its_hosts(
    slurm: Start, request: pytest.FixtureRequest, launcher: str, script: str
) -> None:
    request.getfixturevalue(launcher)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = slurm("salloc", "-N2", "-n3", f"mpirun.{launcher}", PYTHON, script, **root)
    assert ranks(done) == THREE
    assert nothing_is_left()


def test_a_folder_that_the_hosts_do_not_share_is_an_error_that_says_so_and_what_to_type(slurm: Start) -> None:
    Path("here.py").write_text(
        "import os, sys, rankwise\n"
        "os.makedirs('/run/scratch/here', exist_ok=True)\n"  # each host has its own
        "os.chdir('/run/scratch/here'); os.environ['HOME'] = '/run/scratch'\n"
        "try: rankwise.init(join_timeout_s=7)\n"
        "except rankwise.RankwiseError as error: sys.exit(str(error))\n"
    )
    done = slurm("srun", "-N2", "--ntasks-per-node=1", PYTHON, "here.py")
    assert done.returncode != 0
    assert "rank 1 of 2 (slurm) did not connect to rank 0 within 7 s; rank 0 listens on node1" in done.stderr
    assert "rankwise: rank 0 has waited 5 s for rank 1 of 2 (slurm)" in done.stderr
    assert "rank 1 of 2 (slurm) has not found rank 0 within 7 s: /run/scratch/here/.rankwise/slurm-tc-" in done.stderr
    assert "no such file or directory (as seen on node2)" in done.stderr
    assert 'rankwise.init(rdzv="HOST:PORT")' in done.stderr
    there = "import rankwise\nprint(rankwise.init(rdzv='node1:29511', join_timeout_s=30).world_size)"
    Path("there.py").write_text(f"import os; os.chdir('/run/scratch')\n{there}")
    cured = slurm("srun", "-N2", "--ntasks-per-node=1", PYTHON, "there.py")
    assert cured.stdout.split() == ["2", "2"], cured.stderr


def test_the_trainer_example_trains_over_two_hosts(slurm: Start) -> None:
    Path("digits.py").write_text(
        (ROOT / "examples" / "03_trainer_digits.py").read_text().replace("max_epochs=20", "max_epochs=2")
    )
    done = slurm("srun", "-N2", "--ntasks-per-node=1", PYTHON, "digits.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "global batch 64 = 32 x 2 ranks" in done.stdout
    assert done.stdout.count("done: 48 steps") == 1
