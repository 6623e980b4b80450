"""horovodrun's variables, as its own starter sets them (horovod/runner/gloo_run.py)."""

from __future__ import annotations

import pytest
from environments import SLURM_BATCH, Env

from rankwise.dist.world import discover
from rankwise.errors import WorldError
from rankwise.schedulers.horovodrun import Horovodrun

horovodrun = Horovodrun()


def process(rank: int, local_rank: int, local_size: int) -> Env:
    return {
        "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(local_size), "HOROVOD_CROSS_RANK": "0" if rank < 2 else "1",
        "HOROVOD_CROSS_SIZE": "1" if rank == 1 else "2", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "41234",
    }  # fmt: skip


THREE = [process(0, 0, 2), process(1, 1, 2), process(2, 0, 1)]
"""horovodrun --gloo -np 3 -H host1:2,host2:1"""


@pytest.mark.parametrize("rank", range(3))
def test_each_process_is_a_rank_that_is_told_its_numbers(rank: int) -> None:
    world = discover(THREE[rank])
    assert (world.source, world.rank, world.world_size, world.node_rank) == ("horovodrun", rank, 3, None)
    assert (world.local_rank, world.local_world_size) == ((0, 2), (1, 2), (0, 1))[rank]


def test_within_a_job_of_slurm_they_are_the_nearer() -> None:
    assert discover({**SLURM_BATCH, **THREE[2]}).rank == 2


def test_rank_and_size_alone_are_an_error_and_no_lonely_training() -> None:
    with pytest.raises(WorldError, match=r"but not HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE: horovodrun sets all of them"):
        discover({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"})


def test_a_start_is_named_by_where_horovodrun_listens_and_on_one_host_by_that_host_too() -> None:
    assert {horovodrun.start_id(env, []) for env in THREE} == {"horovodrun-10.0.0.1-41234"}
    lonely = {**THREE[0], "HOROVOD_SIZE": "2"}
    assert str(horovodrun.start_id(lonely, [])).count("-") > str(horovodrun.start_id(THREE[0], [])).count("-")
    assert horovodrun.start_id({"HOROVOD_RANK": "0"}, []) is None
