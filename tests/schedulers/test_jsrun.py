"""jsrun's variables, as Lightning's LSFEnvironment and the users of Summit and Sierra read them."""

from __future__ import annotations

import pytest
from environments import Env

from rankwise.dist.world import discover
from rankwise.errors import WorldError
from rankwise.schedulers.jsrun import Jsrun

jsrun = Jsrun()


def task(rank: int) -> Env:
    """One of `jsrun -n 4 -r 2`: two resource sets on each of two hosts."""
    return {
        "JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": str(rank % 2),
        "JSM_NAMESPACE_LOCAL_SIZE": "2", "PMIX_RANK": str(rank), "PMIX_NAMESPACE": "7", "LSB_JOBID": "4711",
        "LSB_JOBINDEX": "0", "LSB_MCPU_HOSTS": "batch1 1 h01n04 42 h01n05 42",
    }  # fmt: skip


@pytest.mark.parametrize("rank", range(4))
def test_each_task_is_a_rank_that_is_told_its_numbers(rank: int) -> None:
    world = discover(task(rank))
    assert (world.source, world.rank, world.world_size) == ("jsrun", rank, 4)
    assert (world.local_rank, world.local_world_size, world.node_rank) == (rank % 2, 2, None)
    assert world.origin["rank"] == "JSM_NAMESPACE_RANK"


def test_its_variables_alone_are_enough_for_a_rank() -> None:
    alone = {name: value for name, value in task(1).items() if name.startswith("JSM_")}
    assert discover(alone).world_size == 4


def test_what_spectrum_mpi_sets_beside_them_changes_nothing() -> None:
    env = {**task(1), "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    assert discover(env).source == "jsrun"


def test_a_part_of_its_variables_is_an_error() -> None:
    with pytest.raises(WorldError, match=r"^JSM_NAMESPACE_RANK=1 but not JSM_NAMESPACE_SIZE, JSM_NAMESPACE_LOCAL_RANK"):
        discover({"JSM_NAMESPACE_RANK": "1"})


def test_the_ranks_of_a_step_have_its_name_in_common_and_no_other_step_has() -> None:
    assert {jsrun.start_id(task(rank), []) for rank in range(4)} == {"jsrun-4711.0-7"}
    assert jsrun.start_id({**task(0), "PMIX_NAMESPACE": "8"}, []) != jsrun.start_id(task(0), [])
    assert jsrun.start_id({"JSM_NAMESPACE_RANK": "0"}, []) is None
