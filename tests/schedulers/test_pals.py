"""The variables of HPE's PALS, as its library and the users of Aurora and Polaris name them."""

from __future__ import annotations

import pytest
from environments import Env

from rankwise.dist.world import discover
from rankwise.errors import NotJoinedError, WorldError
from rankwise.schedulers.pals import Pals

pals = Pals()


def process(rank: int) -> Env:
    """A process of `mpiexec -n 4 --ppn 2` over two nodes."""
    return {
        "PALS_RANKID": str(rank), "PALS_LOCAL_RANKID": str(rank % 2), "PALS_LOCAL_SIZE": "2", "PALS_NODEID": str(rank // 2),
        "PALS_APID": "3c6f6a1e-6d0b", "PMI_RANK": str(rank), "PMI_SIZE": "4", "PMI_LOCAL_RANK": str(rank % 2),
        "PMI_LOCAL_SIZE": "2", "PBS_JOBID": "12.head",
    }  # fmt: skip


@pytest.mark.parametrize("rank", range(4))
def test_each_process_is_a_rank_that_is_told_its_numbers(rank: int) -> None:
    world = discover(process(rank))
    assert (world.source, world.rank, world.world_size, world.node_rank) == ("pals", rank, 4, rank // 2)
    assert (world.local_rank, world.local_world_size) == (rank % 2, 2)


def test_the_local_size_of_pmi_is_as_good() -> None:
    env = {name: value for name, value in process(3).items() if name != "PALS_LOCAL_SIZE"}
    assert discover(env).origin["local_world_size"] == "PMI_LOCAL_SIZE"


def test_where_pmix_takes_the_place_of_pmi_the_number_of_ranks_is_missing_and_nobody_trains_alone() -> None:
    env = {name: value for name, value in process(1).items() if not name.startswith("PMI_")}
    with pytest.raises(NotJoinedError, match=r"but no PMI_SIZE: .* this process would train alone; set RANK, LOCAL_RANK"):
        discover(env)
    assert pals.tasks(env) is None
    assert pals.one_of_several(env)


def test_a_part_of_its_variables_is_an_error() -> None:
    with pytest.raises(WorldError, match="but not PALS_LOCAL_RANKID, PALS_LOCAL_SIZE, PALS_NODEID: PALS sets all of them"):
        discover({"PALS_RANKID": "0", "PMI_SIZE": "2"})


def test_a_start_is_named_by_the_identity_that_pals_gives_it() -> None:
    assert {pals.start_id(process(rank), []) for rank in range(4)} == {"pals-3c6f6a1e-6d0b"}
    assert pals.start_id({"PALS_RANKID": "0"}, []) is None
