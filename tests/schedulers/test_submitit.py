"""Submitit's variables, as its local executor (1.5.4) sets them."""

from __future__ import annotations

from pathlib import Path

import pytest
from environments import SLURM_STEP

from rankwise.dist.world import discover
from rankwise.errors import WorldError
from rankwise.schedulers.slurm import Slurm
from rankwise.schedulers.submitit import Submitit

slurm = Slurm()
submitit = Submitit()

TASKS = [
    {
        "SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "4711", "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_GLOBALID": str(rank), "SUBMITIT_LOCAL_LOCALID": str(rank), "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1", "CUDA_VISIBLE_DEVICES": "", "SUBMITIT_FOLDER": "/home/u/jobs",
    }
    for rank in range(2)
]  # fmt: skip
"""tasks_per_node=2"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_task_is_a_rank_on_one_node(rank: int) -> None:
    world = discover(TASKS[rank])
    assert world.source == "submitit"
    numbers = (world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank)
    assert numbers == (rank, 2, rank, 2, 0)
    assert (world.master_addr, world.master_port) == (None, None)


def test_all_tasks_of_a_start_have_its_name_in_common() -> None:
    names = {submitit.start_id(env, []) for env in TASKS}
    assert len(names) == 1
    assert "4711" in str(names)


def test_the_shell_that_submits_is_no_task() -> None:
    assert not submitit.detect({"SUBMITIT_EXECUTOR": "local"})


def test_an_address_that_was_exported_completes_its_ranks() -> None:
    world = discover({**TASKS[1], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    assert (world.source, world.rank, world.master_port) == ("submitit", 1, 29500)


def test_within_an_allocation_the_local_executor_is_nearer() -> None:
    assert discover({**SLURM_STEP[0], **TASKS[1]}).source == "submitit"


def test_a_slurm_job_that_such_a_task_submits_is_slurms() -> None:
    env = {**TASKS[1], **SLURM_STEP[2], "SUBMITIT_EXECUTOR": "slurm"}
    assert discover(env).source == "slurm"
    assert discover(env).rank == slurm.ranks(env).rank == 2


def test_a_part_of_the_variables_is_an_error() -> None:
    env = {name: value for name, value in TASKS[0].items() if name != "SUBMITIT_LOCAL_NTASKS"}
    with pytest.raises(WorldError, match=r"but not SUBMITIT_LOCAL_NTASKS: Submitit's local executor sets all of them"):
        submitit.ranks(env)


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        (TASKS[0], "4711_run"),
        ({"SUBMITIT_FOLDER": "/home/u/jobs", "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "8"}, "8_run"),
        (
            {
                "SUBMITIT_FOLDER": "/home/u/jobs", "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "9",
                "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1",
            },
            "8_1_run",
        ),
    ],
)  # fmt: skip
def test_a_job_has_one_folder_over_all_its_starts(env: dict[str, str], folder: str) -> None:
    assert submitit.job_folder(env) == Path("/home/u/jobs", folder)


def test_elsewhere_there_is_no_such_folder() -> None:
    assert submitit.job_folder({"SLURM_JOB_ID": "8"}) is None
    assert submitit.job_folder({"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "8"}) is None
