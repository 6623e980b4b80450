"""Grid Engine's variables."""

from __future__ import annotations

import pytest
from environments import SGE_ARRAY, SGE_ONE_HOST, SGE_SCRIPT, SGE_SERIAL, SGE_TASK, Env

from rankwise.errors import NotJoinedError, WorldError
from rankwise.schedulers import sge
from rankwise.world import discover


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (SGE_SCRIPT, r"^NHOSTS=2, NSLOTS=3, PE_HOSTFILE=.*: this is the job's script, on the first of its 2 hosts"),
        (SGE_TASK, r"^JOB_SCRIPT=QRSH, JOB_NAME=petask, JOB_ID=2: .*its rank must come from its starter, so"),
        ({**SGE_SCRIPT, **SGE_TASK}, r"^JOB_SCRIPT=QRSH.*its rank must come from its starter"),
        ({"JOB_SCRIPT": "QRSH"}, r"^JOB_SCRIPT=QRSH: .*its rank must come from its starter"),
        ({"PE_HOSTFILE": "x", "NSLOTS": "3"}, r"^PE_HOSTFILE=x, NSLOTS=3 but no NHOSTS"),
        ({"PE_HOSTFILE": "x"}, r"^PE_HOSTFILE=x but no NHOSTS"),
    ],
    ids=["script", "task", "task with -V", "bare task", "no hosts", "no counts"],
)
def test_a_process_of_a_parallel_job_that_was_not_joined_is_an_error(env: Env, said: str) -> None:
    with pytest.raises(NotJoinedError, match=f"{said}.*would train alone; .*mpirun python script.py"):
        discover(env)
    world = discover(env, allow_independent=True)
    assert (world.rank, world.world_size, world.source) == (0, 1, "sge")


def test_several_slots_on_one_host_are_one_process_and_it_says_so() -> None:
    ranks = sge.ranks(SGE_ONE_HOST)
    assert (ranks.rank, ranks.world_size, ranks.node_rank) == (0, 1, 0)
    assert ranks.note == "NSLOTS=3 slots on this host and one process; to use them all: rankwise run script.py"


def test_a_serial_job_is_single() -> None:
    world = discover(SGE_SERIAL)
    assert (world.source, world.world_size, world.note) == ("sge", 1, None)  # SGE_TASK_ID=undefined is no task


def test_a_task_of_a_job_array_is_a_world_of_its_own_and_says_so() -> None:
    assert sge.ranks(SGE_ARRAY).note == "task 4 of job array 26: each is a world of its own"


@pytest.mark.parametrize("name", ["NHOSTS", "NSLOTS"])
def test_a_count_that_is_no_number_is_an_error_that_shows_it(name: str) -> None:
    with pytest.raises(WorldError, match=f"^{name}='x' is no whole number"):
        sge.ranks({**SGE_SCRIPT, name: "x"})


def test_a_triple_that_the_starter_passed_is_believed() -> None:
    triple = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "node2", "MASTER_PORT": "29500"}
    assert discover({**SGE_TASK, **triple}).source == "torchrun"


def test_a_submit_host_does_not_speak_of_a_job() -> None:
    assert not sge.detect({"SGE_ROOT": "/opt/sge", "SGE_CELL": "default", "JOB_ID": "7"})
