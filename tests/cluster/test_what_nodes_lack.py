"""What the nodes of a real cluster do not see of a run: each is reported, with the node and what to type."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_runs import RUN, Launched, batch, launch, write
from clusters import Start, hosts, mpich, openmpi, sge, slurm

from rankwise.run.directory import RunDir
from rankwise.schedulers.sge import GridEngine

grid_engine = GridEngine()

__all__ = ["hosts", "launch", "mpich", "openmpi", "sge", "slurm"]  # fixtures

pytestmark = pytest.mark.cluster

Launch = Callable[..., Launched]
SAYS = "import os\nos.environ['X'] = '1'\nprint('rank', os.environ['RANK'], flush=True)\n"
SHARE = "use --run-dir PATH with a folder that"


@pytest.fixture
def own() -> Iterator[Path]:
    """A folder that only this host sees."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rankwise-test-") as folder:
        yield Path(folder)


@pytest.fixture
def own_python(own: Path) -> str:
    """This Python with its packages, in a folder that no other host sees."""
    (own / "bin").mkdir()
    python = own / "bin" / "python"
    python.symlink_to(os.path.realpath(sys.executable))
    shutil.copy(Path(sys.prefix, "pyvenv.cfg"), own)
    (own / "lib").symlink_to(Path(sys.prefix, "lib"))
    return str(python)


def test_a_run_directory_that_no_node_of_slurm_sees_is_named(slurm: Start, launch: Launch, own: Path) -> None:
    words = ["--on", "slurm", "--nproc", "1", "--wait", "--run-dir", str(own / "run"), write(SAYS)]
    status, said = launch(*RUN, *words).wait()
    assert status not in (0, None)
    assert f"{SHARE} all nodes share" in said.splitlines()[-1]
    assert "could not start the job: it does not see the run directory" in said.splitlines()[-1]
    assert "its output is in" not in said


def test_a_folder_of_the_script_that_no_node_sees_is_named(slurm: Start, launch: Launch, own: Path) -> None:
    shared = str(Path("run").absolute())
    (own / "train.py").write_text(SAYS)
    inside = ["sh", "-c", f'cd {own} && exec "$@"', "sh", *RUN]
    status, said = launch(*inside, "--on", "slurm", "--nproc", "1", "--wait", "--run-dir", shared, "train.py").wait()
    assert status == 2
    assert "rankwise: node1 does not see the script's folder; use one on a file system that all nodes share" in said


def test_a_python_that_the_nodes_of_slurm_do_not_have_is_named(slurm: Start, launch: Launch, own_python: str) -> None:
    # On one node: on two, srun ends the other task and loses the message of this one in 2 of 60 tries.
    words = ["-m", "rankwise", *RUN[3:], "--on", "slurm", "--nproc", "1", "--wait", write(SAYS)]
    status, said = launch(own_python, *words).wait()
    assert status not in (0, None)
    assert f" has no Python {own_python}; install rankwise where all nodes see it" in said
    assert "before any rank started; its output is in " in said.splitlines()[-1]


def test_a_python_that_the_hosts_of_ssh_do_not_have_is_named(hosts: Start, launch: Launch, own_python: str) -> None:
    words = ["-m", "rankwise", *RUN[3:], "-H", "node1:1,node2:1", write(SAYS)]
    status, said = launch(own_python, *words).wait()
    assert status == 1
    assert f"{own_python}: " in said
    assert "; every host needs this Python with rankwise, at the same path" in said


@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_a_run_directory_that_the_hosts_of_mpi_do_not_see_is_named(
    hosts: Start, launch: Launch, own: Path, flavour: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(flavour)
    Path("bin").mkdir()
    Path("bin/mpirun").write_text(f'#!/bin/sh\nexec mpirun.{flavour} "$@"\n')
    Path("bin/mpirun").chmod(0o755)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = ["--on", "mpi", "--hosts", "node1,node2", "--nproc", "1", "--run-dir", str(own / "run"), write(SAYS)]
    status, said = launch(*RUN, *words, PATH=f"{Path('bin').absolute()}:{os.environ['PATH']}", **root).wait()
    assert status not in (0, None)
    assert f"rankwise: {own}/run/plan.json: node" in said
    assert "cannot read this plan" in said
    assert f"{SHARE} all nodes share" in said


def test_a_run_directory_that_no_host_of_grid_engine_sees_is_not_waited_for_without_end(
    sge: Start, launch: Launch, own: Path
) -> None:
    run = RunDir(own / "run")
    status, said = launch(*RUN, "--on", "sge", "--wait", "--run-dir", str(run.path), write(SAYS)).wait()
    job = run.read_job()
    assert job is not None
    grid_engine.cancel({"id": job.id})
    assert status == 1, said
    assert "Eqw: it will never start: " in said
    assert f"{SHARE} they share" in said
    assert f"stopped waiting: job {job.id} cannot start before it is repaired" in said.splitlines()[-1]


def test_a_python_that_the_hosts_of_grid_engine_do_not_have_is_named(sge: Start, launch: Launch, own_python: str) -> None:
    status, said = launch(own_python, "-m", "rankwise", *RUN[3:], "--on", "sge", "--wait", write(SAYS)).wait()
    assert status == 2, said
    assert f" has no Python {own_python}; install rankwise where all nodes see it" in said


# --- job arrays of the user


OWN = f"{' '.join(RUN)} --nproc 1 train.py $TASK\n"


def test_the_tasks_of_a_users_own_array_of_slurm_are_as_many_runs(slurm: Start) -> None:
    write(SAYS)
    write(f"#!/bin/bash\n#SBATCH -N1 -o own.log --open-mode=append -a 0-2%1\nTASK=$SLURM_ARRAY_TASK_ID\n{OWN}", "own.sh")
    done = slurm("sbatch", "--wait", "own.sh", OMP_NUM_THREADS="1")
    assert done.returncode == 0, Path("own.log").read_text()
    assert sorted(path.name for path in Path("runs").iterdir()) == ["train-0", "train-1", "train-2"]
    for number in "012":
        assert [attempt.argv for attempt in RunDir(Path("runs", f"train-{number}")).attempts()] == [("train.py", number)]


def test_the_tasks_of_a_users_own_array_of_grid_engine_are_as_many_runs(sge: Start) -> None:
    write(SAYS)
    write(f"#!/bin/bash\n#$ -S /bin/bash -cwd -o own.log -j y -v PATH -t 1-2\nTASK=$SGE_TASK_ID\n{OWN}", "own.sh")
    done = sge("qsub", "-sync", "y", "own.sh")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["train-1", "train-2"], done.stdout + done.stderr
    assert [RunDir(Path("runs/train-2")).attempts()[-1].argv] == [("train.py", "2")]


# --- what a job prints


STOPS = "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n" + SAYS + "time.sleep(600)\n"


def test_the_log_of_a_users_own_job_has_no_word_of_binding_nor_of_ctrl_c(slurm: Start) -> None:
    write(SAYS)
    write(f"#!/bin/bash\n#SBATCH -N1 -o own.log\n{OWN}", "own.sh")
    status, said = batch("own.sh")
    assert status == 0, said
    assert "cpu binding" not in said
    assert "Ctrl-C" not in said
    assert "rank 0" in said


@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_the_progress_of_a_run_of_mpi_is_not_redrawn_in_a_file(
    hosts: Start, launch: Launch, flavour: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(flavour)
    Path("bin").mkdir()
    Path("bin/mpirun").write_text(f'#!/bin/sh\nexec mpirun.{flavour} "$@"\n')
    Path("bin/mpirun").chmod(0o755)
    source = (
        "import json, os, time\nos.environ['X'] = '1'\nfrom rankwise.dist.world import agent_row, discover\n"
        "row = agent_row(discover(os.environ))\n"
        "for step in range(10):\n"
        "    row.say(json.dumps({'done': step, 'total': 10, 'elapsed_s': 1.0, 'text': 'loss 1'}))\n    time.sleep(0.05)\n"
        "print('all steps')\n"
    )
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = ["--on", "mpi", "--hosts", "node1", "--nproc", "1", write(source)]
    status, said = launch(*RUN, *words, PATH=f"{Path('bin').absolute()}:{os.environ['PATH']}", **root).wait()
    assert status == 0, said
    assert "all steps" in said
    assert "\x1b" not in said
    assert "loss 1" not in said
