"""MVAPICH2's variables, as its mpirun_rsh sets them (src/pm/mpirun/mpispawn.c)."""

from __future__ import annotations

import pytest
from environments import MPICH, Env

from rankwise.dist.world import discover
from rankwise.errors import WorldError
from rankwise.schedulers.mvapich import Mvapich

mvapich = Mvapich()


def process(rank: int) -> Env:
    """A process of `mpirun_rsh -np 4 host1 host1 host2 host2`."""
    return {
        "MV2_COMM_WORLD_RANK": str(rank), "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": str(rank % 2),
        "MV2_COMM_WORLD_LOCAL_SIZE": "2", "PMI_ID": str(rank), "PMI_SIZE": "4", "MPIRUN_ID": "812",
        "MPISPAWN_MPIRUN_HOST": "host1", "MPISPAWN_MPIRUN_ID": "812",
    }  # fmt: skip


@pytest.mark.parametrize("rank", range(4))
def test_each_process_is_a_rank_that_is_told_its_numbers(rank: int) -> None:
    world = discover(process(rank))
    assert (world.source, world.rank, world.world_size) == ("mvapich", rank, 4)
    assert (world.local_rank, world.local_world_size) == (rank % 2, 2)


def test_under_hydra_its_variables_say_what_hydras_say() -> None:
    same = {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "3"}
    assert discover({**MPICH[2], **same}).source == "mpich"
    assert mvapich.tasks({**MPICH[2], **same}) is None


def test_a_part_of_its_variables_is_an_error() -> None:
    with pytest.raises(WorldError, match=r"^MV2_COMM_WORLD_SIZE=4 but not MV2_COMM_WORLD_RANK, "):
        discover({"MV2_COMM_WORLD_SIZE": "4"})


def test_a_start_is_named_by_the_process_of_mpirun_rsh() -> None:
    assert {mvapich.start_id(process(rank), []) for rank in range(4)} == {"mvapich-host1-812"}
    assert mvapich.start_id({"MPISPAWN_MPIRUN_ID": "812"}, []) is None
