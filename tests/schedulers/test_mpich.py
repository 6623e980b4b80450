"""MPICH's and Intel MPI's variables, and the mpirun that starts agents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from environments import MPICH, MPICH_IN_SBATCH, MPICH_ROUND_ROBIN, SGE_SCRIPT, SLURM_STEP, Env, mpich
from plans import TWO_HOSTS, golden, hostile, mpirun, plan

from rankwise.dist.world import discover
from rankwise.errors import NotJoinedError, WorldError
from rankwise.schedulers import Ranks
from rankwise.schedulers.mpich import Mpich

scheduler = Mpich()

__all__ = ["mpirun"]  # a fixture

SIZED = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def without(*names: str) -> Env:
    return {key: value for key, value in MPICH[1].items() if key not in names}


@pytest.mark.parametrize(("rank", "local"), [(0, (0, 2)), (1, (1, 2)), (2, (0, 1))])
def test_each_rank_finds_its_numbers(rank: int, local: tuple[int, int]) -> None:
    ranks = scheduler.ranks(MPICH[rank])
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size) == (rank, 3, *local)
    assert tuple(ranks.origin[name] for name in ("rank", "world_size", "local_rank", "local_world_size")) == SIZED


def test_the_index_of_the_node_is_not_known_and_that_is_said() -> None:
    for env in (*MPICH, *MPICH_ROUND_ROBIN):
        ranks = scheduler.ranks(env)
        assert ranks.node_rank is None
        assert ranks.origin["node_rank"] == "MPICH does not say"
    assert scheduler.ranks(mpich(1, 2, 1, 2)).node_rank == 0


def test_it_gives_no_address_and_takes_one_that_is_set() -> None:
    assert (
        scheduler.ranks(MPICH[0]).origin["master_port"] == "MPICH gives no port: rank 0 announces its own, or set MASTER_PORT"
    )
    ranks = scheduler.ranks({**MPICH[0], "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    assert (ranks.master_addr, ranks.master_port) == ("node1", 29500)


@pytest.mark.parametrize("rank", range(4))
def test_inside_sbatch_its_ranks_outrank_the_step_of_a_task_a_node(rank: int) -> None:
    world = discover(MPICH_IN_SBATCH[rank])
    assert (world.source, world.rank, world.world_size, world.local_rank) == ("mpich", rank, 4, rank % 2)


def test_inside_sge_its_ranks_outrank_the_slots() -> None:
    assert discover({**SGE_SCRIPT, **MPICH[2]}).rank == 2


def test_pmi_in_a_slurm_step_is_slurms_own_unless_there_is_a_local_rank_too() -> None:
    pmi2 = {**SLURM_STEP[2], "PMI_RANK": "2", "PMI_SIZE": "4"}  # srun --mpi=pmi2
    assert not scheduler.detect(pmi2)
    assert scheduler.tasks(pmi2) is None
    assert discover(pmi2).source == "slurm"


def test_a_launcher_that_tells_no_local_rank_is_never_taken_for_a_single_process() -> None:
    env = {"PMI_RANK": "1", "PMI_SIZE": "4"}
    with pytest.raises(NotJoinedError, match=r"^PMI_RANK=1, PMI_SIZE=4 but no MPI_LOCALRANKID: .*train alone; .*LOCAL_RANK"):
        discover(env)
    assert discover(env, allow_independent=True).world_size == 1
    assert discover({"PMI_RANK": "0", "PMI_SIZE": "1"}).world_size == 1


@pytest.mark.parametrize("name", SIZED)
def test_a_part_of_its_variables_is_an_error_that_names_what_is_missing(name: str) -> None:
    assert scheduler.detect(without(name))
    with pytest.raises(WorldError, match=rf" but not {name}: MPICH sets all of them"):
        scheduler.ranks(without(name))


@pytest.mark.parametrize("name", SIZED)
def test_a_value_that_is_no_number_is_an_error_that_shows_it(name: str) -> None:
    with pytest.raises(WorldError, match=rf"^{name}='x' is not a whole number"):
        scheduler.ranks({**MPICH[1], name: "x"})


def test_a_rank_that_is_not_below_its_size_is_an_error_that_shows_both() -> None:
    with pytest.raises(WorldError, match=r"^PMI_RANK=3 and PMI_SIZE=3: a rank must be"):
        scheduler.ranks({**MPICH[1], "PMI_RANK": "3"})


def test_the_name_of_a_start_is_where_mpirun_listens_for_the_proxy_above_the_ranks() -> None:
    proxy = ["/usr/bin/hydra_pmi_proxy", "--control-port", "vm:40995", "--rmk", "user", "--proxy-id", "1"]
    assert scheduler.start_id(MPICH[0], [["sh", "-c", "python train.py"], proxy, ["mpirun", "-np", "2"]]) == "mpich-vm:40995"
    assert scheduler.start_id(MPICH[0], [["bash"], ["x", "--control-port"]]) is None


def test_the_text_that_starts_an_agent_on_each_node_is_the_golden_one() -> None:
    assert scheduler.render(plan(hosts=TWO_HOSTS)) == golden("mpich.sh")
    assert scheduler.render(hostile()) == golden("mpich-hostile.sh")
    assert scheduler.attached({})


def test_mpirun_gets_each_word_as_it_is_and_an_empty_stdin(mpirun: Callable[..., list[str]]) -> None:
    words = mpirun(scheduler.render(plan("/", "a b $(touch x)")))
    assert words[:4] == ["-np", "2", "-ppn", "1"]
    assert words[-3:] == ["-m", "rankwise.agent", "//a b $(touch x)"]


def test_ranks_of_an_agent_do_not_take_themselves_for_its_mpi_process() -> None:
    """If several of them call MPI_Init with the same identity, it hangs."""
    set_by_a_user = {"MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "node1"}
    found = scheduler.rank_env({**MPICH[2], **set_by_a_user}, Ranks(3, 4, 1, 2, 1), "2(x2)")
    assert found == set_by_a_user
