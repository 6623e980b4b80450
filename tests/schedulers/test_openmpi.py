"""Open MPI's variables, and the mpirun that starts agents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from environments import OPENMPI, OPENMPI_BY_NODE, OPENMPI_IN_SBATCH, OPENMPI_IN_SGE, Env, openmpi
from plans import TWO_HOSTS, golden, hostile, mpirun, plan

from rankwise.dist.world import discover
from rankwise.errors import ConfigError, WorldError
from rankwise.schedulers import Ranks
from rankwise.schedulers.openmpi import OpenMpi, refuse_root

scheduler = OpenMpi()

__all__ = ["mpirun"]  # a fixture

SIZED = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")


@pytest.mark.parametrize(("rank", "local"), [(0, (0, 2)), (1, (1, 2)), (2, (0, 1))])
def test_each_rank_finds_its_numbers(rank: int, local: tuple[int, int]) -> None:
    ranks = scheduler.ranks(OPENMPI[rank])
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size) == (rank, 3, *local)
    assert tuple(ranks.origin[name] for name in ("rank", "world_size", "local_rank", "local_world_size")) == SIZED


def test_the_index_of_the_node_is_not_known_and_that_is_said() -> None:
    for env in (*OPENMPI, *OPENMPI_BY_NODE):  # rank // local size would be wrong by node, OMPI_COMM_WORLD_NODE_RANK in all
        ranks = scheduler.ranks(env)
        assert ranks.node_rank is None
        assert ranks.origin["node_rank"] == "Open MPI does not say"


def test_on_one_node_the_index_of_the_node_is_known() -> None:
    ranks = scheduler.ranks(openmpi(1, 2, 1, 2))
    assert ranks.node_rank == 0
    assert ranks.origin["node_rank"] == "all ranks are on one node"


def test_it_gives_no_address_and_takes_one_that_is_set() -> None:
    ranks = scheduler.ranks(OPENMPI[2])
    assert (ranks.master_addr, ranks.master_port) == (None, None)
    assert ranks.origin["master_addr"] == "Open MPI gives no address: rank 0 announces its own, or set MASTER_ADDR"
    ranks = scheduler.ranks({**OPENMPI[2], "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    assert (ranks.master_addr, ranks.master_port) == ("node1", 29500)
    assert (ranks.origin["master_addr"], ranks.origin["master_port"]) == ("MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize("rank", range(4))
def test_inside_sbatch_its_ranks_outrank_the_batch_shell_and_the_step_of_one_task(rank: int) -> None:
    world = discover(OPENMPI_IN_SBATCH[rank])
    assert (world.source, world.rank, world.world_size, world.local_rank) == ("openmpi", rank, 4, rank % 2)


@pytest.mark.parametrize("rank", range(3))
def test_inside_sge_its_ranks_outrank_the_slots(rank: int) -> None:
    world = discover(OPENMPI_IN_SGE[rank])
    assert (world.source, world.rank, world.world_size) == ("openmpi", rank, 3)


@pytest.mark.parametrize("name", SIZED)
def test_a_part_of_its_variables_is_an_error_that_names_what_is_missing(name: str) -> None:
    env = {key: value for key, value in OPENMPI[1].items() if key != name}
    assert scheduler.detect(env)
    with pytest.raises(WorldError, match=rf" but not {name}: Open MPI sets all of them"):
        scheduler.ranks(env)


@pytest.mark.parametrize("name", SIZED)
def test_a_value_that_is_no_number_is_an_error_that_shows_it(name: str) -> None:
    with pytest.raises(WorldError, match=rf"^{name}='x' is not a whole number"):
        scheduler.ranks({**OPENMPI[1], name: "x"})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3"}, "OMPI_COMM_WORLD_RANK=3 and OMPI_COMM_WORLD_SIZE=3: a rank must be"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK=2 and OMPI_COMM_WORLD_LOCAL_SIZE=2: a local rank"),
    ],
)
def test_a_rank_that_is_not_below_its_size_is_an_error_that_shows_both(change: Env, found: str) -> None:
    with pytest.raises(WorldError, match=f"^{found}"):
        scheduler.ranks({**OPENMPI[1], **change})


def test_pmix_alone_is_not_open_mpi() -> None:
    assert not scheduler.detect({"PMIX_RANK": "2", "OMPI_MCA_btl": "tcp"})
    assert scheduler.tasks({"PMIX_RANK": "2"}) is None


def test_the_name_of_a_start_is_the_same_for_its_ranks_and_another_with_another_random_key() -> None:
    keyed = [{**env, "OMPI_MCA_orte_precondition_transports": "e323a13b5b26f06d-aa34531e83ca2f71"} for env in OPENMPI]
    names = {scheduler.start_id(env, []) for env in keyed}
    assert len(names) == 1
    assert str(names.pop()).startswith("openmpi-162267137-")
    assert scheduler.start_id({**keyed[0], "OMPI_MCA_orte_precondition_transports": "0-0"}, []) != scheduler.start_id(
        keyed[0], []
    )
    assert scheduler.start_id({"PMIX_NAMESPACE": "prterun-node1-77@1"}, []) == "openmpi-prterun-node1-77@1"
    assert scheduler.start_id({}, []) is None


def test_the_text_that_starts_an_agent_on_each_node_is_the_golden_one() -> None:
    assert scheduler.render(plan(hosts=TWO_HOSTS)) == golden("openmpi.sh")
    assert scheduler.render(hostile()) == golden("openmpi-hostile.sh")
    assert scheduler.attached({})


def test_mpirun_is_told_the_names_that_are_set_and_no_others(mpirun: Callable[..., list[str]]) -> None:
    words = mpirun(scheduler.render(plan("/", "run")), PYTHONPATH="/a b", LD_LIBRARY_PATH="")
    assert words[: words.index("-x") + 3] == [
        "-np", "2", "--map-by", "ppr:1:node", "--bind-to", "none", "-x", "PYTHONPATH", "/bin/bash",
    ]  # fmt: skip
    assert words[-3:] == ["-m", "rankwise.agent", "//run"]


def test_root_is_told_what_to_type_for_open_mpi_refuses_it() -> None:
    with pytest.raises(ConfigError, match=r"OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1$"):
        refuse_root({"OMPI_ALLOW_RUN_AS_ROOT": "1"}, 0)
    refuse_root({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}, 0)
    refuse_root({}, 1000)


def test_ranks_of_an_agent_do_not_take_themselves_for_its_mpi_process() -> None:
    """If several of them call MPI_Init with the same identity, it hangs."""
    set_by_a_user = {"OMPI_MCA_btl": "^openib", "PMIX_MCA_gds": "hash", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    found = scheduler.rank_env({**OPENMPI[2], **set_by_a_user}, Ranks(3, 4, 1, 2, 1), "2(x2)")
    assert found == set_by_a_user
