"""One of several processes that nothing connects is refused, whatever has started it; a single process is not."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from environments import SLURM_STEP, Env, openmpi

from rankwise.dist.world import discover
from rankwise.errors import NotJoinedError
from rankwise.schedulers import launchers, named_by_task
from rankwise.schedulers.others import OtherLaunchers

others = OtherLaunchers()

Run = Callable[..., "subprocess.CompletedProcess[str]"]

STARTED: list[Env] = [
    {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-a"},
    {"ALPS_APP_PE": "0"},
    {"MPT_LRANK": "1"},
    {"PMI_ID": "3"},
]
SEVERAL_HOSTS: list[Env] = [
    {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"},
    {"AWS_BATCH_JOB_NUM_NODES": "4", "AWS_BATCH_JOB_NODE_INDEX": "0"},
]
ALONE: list[Env] = [
    {"SM_HOSTS": '["algo-1"]'},
    {"SM_HOSTS": "none"},
    {"AWS_BATCH_JOB_NUM_NODES": "1"},
]


@pytest.mark.parametrize("env", [*STARTED, *SEVERAL_HOSTS], ids=lambda env: next(iter(env)))
def test_a_process_that_would_train_alone_is_refused_with_what_was_found_and_what_to_type(env: Env) -> None:
    with pytest.raises(NotJoinedError, match=r"^[A-Z_]+=.*: .*train alone; .*rankwise run -H HOST1,HOST2.*allow_independent"):
        discover(env)
    assert discover(env, allow_independent=True).world_size == 1


@pytest.mark.parametrize("env", ALONE, ids=str)
def test_a_job_of_one_host_is_a_single_process(env: Env) -> None:
    assert discover(env).source == "local"


@pytest.mark.parametrize("env", [*STARTED, *SEVERAL_HOSTS], ids=lambda env: next(iter(env)))
def test_whoever_says_which_rank_this_is_is_believed_first(env: Env) -> None:
    assert discover({**env, **openmpi(2, 3, 0, 1)}).rank == 2
    assert discover({**env, **SLURM_STEP[1]}).rank == 1


def test_a_launcher_is_not_started_in_each_of_them_but_in_a_jobs_own_shell(rankwise: Run) -> None:
    Path("train.py").write_text("print('trained')\n")
    done = rankwise("run", "--nproc", "1", "train.py", env={"PATH": "/usr/bin", **STARTED[3]})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rankwise: PMI_ID=3: mpirun_rsh has started this process, and does not say how many")
    assert all(others.one_of_several(env) for env in STARTED)
    assert not any(others.one_of_several(env) for env in SEVERAL_HOSTS)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, "train"),
        ({"SLURM_JOB_ID": "16", "SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "3"}, "train-3"),
        ({"SLURM_ARRAY_TASK_ID": "0"}, "train-0"),
        ({"SGE_TASK_ID": "4", "JOB_ID": "26"}, "train-4"),
        ({"SGE_TASK_ID": "undefined", "JOB_ID": "26"}, "train"),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "5"}, "train-5"),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "0"}, "train"),
        ({"PBS_JOBID": "12", "PBS_ARRAY_INDEX": "0"}, "train-0"),
        ({"PBS_JOBID": "12", "PBS_ARRAYID": "2"}, "train-2"),
    ],
)
def test_in_a_task_of_a_job_array_a_run_has_its_number_in_its_name(env: Env, name: str) -> None:
    assert named_by_task("train", env) == name


def test_each_way_to_start_processes_has_variables_and_says_what_it_needs() -> None:
    for launcher in launchers({}).values():
        assert isinstance(launcher.variables, tuple)
        assert launcher.needs
