"""Flux's variables, as flux-environment(7) lists them."""

from __future__ import annotations

import pytest
from environments import SLURM_STEP, Env

from rankwise.dist.world import discover
from rankwise.errors import NotJoinedError, WorldError
from rankwise.schedulers.flux import Flux

flux = Flux()


def task(rank: int, size: int = 4, nodes: int = 2) -> Env:
    return {
        "FLUX_TASK_RANK": str(rank), "FLUX_TASK_LOCAL_ID": str(rank % max(1, size // nodes)), "FLUX_JOB_SIZE": str(size),
        "FLUX_JOB_NNODES": str(nodes), "FLUX_JOB_ID": "ƒ3ETxsR9H", "FLUX_JOB_ID_PATH": "/ƒD2e73NP/ƒ3ETxsR9H",
        "PMI_RANK": str(rank), "PMI_SIZE": str(size), "PMI_FD": "9",
    }  # fmt: skip


@pytest.mark.parametrize("rank", range(4))
def test_each_task_is_a_rank_that_is_told_its_numbers(rank: int) -> None:
    world = discover(task(rank))
    assert (world.source, world.rank, world.world_size, world.node_rank) == ("flux", rank, 4, None)
    assert (world.local_rank, world.local_world_size) == (rank % 2, 2)
    assert world.origin["local_world_size"] == "FLUX_JOB_SIZE / FLUX_JOB_NNODES"
    assert discover(task(0, 4, 1)).node_rank == 0


def test_within_the_step_of_slurm_that_carries_flux_its_tasks_are_the_nearer() -> None:
    assert discover({**SLURM_STEP[0], **task(3)}).rank == 3


def test_tasks_that_are_not_the_same_number_on_each_node_are_refused() -> None:
    with pytest.raises(NotJoinedError, match=r"--tasks-per-node=N python script.py"):
        discover(task(4, 5, 2))


def test_a_part_of_its_variables_is_an_error() -> None:
    with pytest.raises(WorldError, match=r"^FLUX_TASK_RANK=1 but not FLUX_JOB_SIZE, FLUX_TASK_LOCAL_ID, FLUX_JOB_NNODES: "):
        discover({"FLUX_TASK_RANK": "1"})


def test_a_start_is_named_by_the_job_and_what_it_runs_in() -> None:
    assert {flux.start_id(task(rank), []) for rank in range(4)} == {"flux-/ƒD2e73NP/ƒ3ETxsR9H"}
    assert flux.start_id({**task(0), "SLURM_JOB_ID": "3"}, []) == "flux-3-/ƒD2e73NP/ƒ3ETxsR9H"
    assert flux.start_id({"FLUX_TASK_RANK": "0"}, []) is None
