"""Slurm's variables: a task of a step, and the shells that look like one."""

from __future__ import annotations

import pytest
from environments import (
    SLURM_AGENTS,
    SLURM_ARBITRARY,
    SLURM_ARRAY,
    SLURM_BATCH,
    SLURM_BATCH_ONE,
    SLURM_BATCH_WRAP,
    SLURM_CYCLIC,
    SLURM_INTERACTIVE,
    SLURM_OVERLAP,
    SLURM_SALLOC,
    SLURM_STEP,
    SLURM_STEP_IN_BATCH,
    SLURM_UNEVEN,
    Env,
)

from rankwise.dist.world import discover
from rankwise.errors import NotJoinedError, WorldError
from rankwise.schedulers import Ranks
from rankwise.schedulers.ranks import variables_of
from rankwise.schedulers.slurm import Slurm, tasks_per_node

slurm = Slurm()

ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def numbers(ranks: Ranks) -> tuple[int | None, ...]:
    return ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size, ranks.node_rank


def without(env: Env, *names: str) -> Env:
    return {key: value for key, value in env.items() if key not in names}


# --- a task of a step


@pytest.mark.parametrize("envs", [SLURM_STEP, SLURM_STEP_IN_BATCH], ids=["srun", "srun in sbatch"])
@pytest.mark.parametrize("rank", range(4))
def test_a_task_of_a_step_finds_its_numbers(envs: list[Env], rank: int) -> None:
    ranks = slurm.ranks(envs[rank])
    assert numbers(ranks) == (rank, 4, rank % 2, 2, rank // 2)
    assert ranks.note is None
    assert ranks.origin == {
        "rank": "SLURM_PROCID",
        "world_size": "SLURM_STEP_NUM_TASKS",
        "local_rank": "SLURM_LOCALID",
        "local_world_size": "SLURM_GTIDS, counted",
        "node_rank": "SLURM_NODEID",
        "master_addr": "Slurm gives no address: rank 0 announces its own, or set MASTER_ADDR",
        "master_port": "Slurm gives no port: rank 0 announces its own, or set MASTER_PORT",
    }


def test_the_steps_numbers_are_believed_and_the_jobs_are_not() -> None:
    stale = {"SLURM_NTASKS": "99", "SLURM_NTASKS_PER_NODE": "99", "SLURM_TASKS_PER_NODE": "99", "SLURM_NNODES": "99"}
    assert numbers(slurm.ranks({**SLURM_STEP[3], **stale})) == (3, 4, 1, 2, 1)


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, (0, 5, 0, 3, 0)), (2, (2, 5, 2, 3, 0)), (3, (3, 5, 0, 1, 1)), (4, (4, 5, 0, 1, 2))]
)
def test_nodes_with_different_numbers_of_tasks(rank: int, expected: tuple[int, ...]) -> None:
    assert numbers(slurm.ranks(SLURM_UNEVEN[rank])) == expected
    counted = slurm.ranks(without(SLURM_UNEVEN[rank], "SLURM_GTIDS"))
    assert numbers(counted) == expected
    assert counted.origin["local_world_size"] == "SLURM_STEP_TASKS_PER_NODE at SLURM_NODEID"


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, (0, 5, 0, 3, 0)), (1, (1, 5, 0, 1, 1)), (3, (3, 5, 1, 3, 0)), (4, (4, 5, 2, 3, 0))]
)
def test_ranks_dealt_out_in_turn(rank: int, expected: tuple[int, ...]) -> None:
    assert numbers(slurm.ranks(SLURM_CYCLIC[rank])) == expected


def test_rank_0_need_not_be_on_the_first_node() -> None:
    assert numbers(slurm.ranks(SLURM_ARBITRARY)) == (0, 4, 0, 3, 1)
    assert numbers(slurm.ranks(without(SLURM_ARBITRARY, "SLURM_GTIDS"))) == (0, 4, 0, 3, 1)


def test_ranks_that_are_not_this_steps_are_not_counted() -> None:
    assert numbers(slurm.ranks({**SLURM_STEP[3], "SLURM_GTIDS": "0"})) == (3, 4, 1, 2, 1)


def test_an_address_that_is_set_completes_what_slurm_tells() -> None:
    world = discover({**SLURM_STEP[2], **ADDRESS})
    assert (world.source, world.rank, world.master_addr, world.master_port) == ("slurm", 2, "node1", 29500)


def test_a_task_of_a_job_array_is_a_world_of_its_own_and_says_so() -> None:
    ranks = slurm.ranks(SLURM_ARRAY)
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.note == "task 3 of job array 15: each task trains on its own"
    step = slurm.ranks({**SLURM_STEP[2], "SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "6"})
    assert (step.rank, step.world_size, step.note) == (2, 4, "task 6 of job array 15: each task trains on its own")


@pytest.mark.parametrize(("text", "counts"), [("2", [2]), ("2(x2)", [2, 2]), ("3,1(x2)", [3, 1, 1]), ("1,3", [1, 3])])
def test_tasks_per_node_as_slurm_writes_them(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "2(x2", "2(3)", "two", "2,,1", "-1", "2(x2)1"])
def test_tasks_per_node_as_slurm_never_writes_them_are_an_error(text: str) -> None:
    with pytest.raises(WorldError, match="Slurm writes it as"):
        tasks_per_node(text)


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS"])
def test_half_a_step_is_an_error_that_names_what_is_missing(name: str) -> None:
    with pytest.raises(WorldError, match=f" but not {name}: srun sets all of them"):
        slurm.ranks(without(SLURM_STEP[1], name))


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS"])
def test_a_value_that_is_no_number_is_an_error_that_shows_it(name: str) -> None:
    with pytest.raises(WorldError, match=f"^{name}='x' is not a whole number"):
        slurm.ranks({**SLURM_STEP[1], name: "x"})


def test_numbers_that_contradict_each_other_are_an_error_that_shows_them() -> None:
    with pytest.raises(WorldError, match=r"^SLURM_PROCID=4 and SLURM_STEP_NUM_TASKS=4: a rank must be"):
        slurm.ranks({**SLURM_STEP[1], "SLURM_PROCID": "4"})
    with pytest.raises(WorldError, match=r"^SLURM_NODEID=2, SLURM_STEP_TASKS_PER_NODE=2\(x2\): the step has no such node"):
        slurm.ranks({**SLURM_STEP[1], "SLURM_NODEID": "2", "SLURM_GTIDS": ""})


# --- one task


def test_a_step_of_one_task_in_a_larger_job_is_single_and_says_so() -> None:
    ranks = slurm.ranks(SLURM_OVERLAP)
    assert numbers(ranks) == (0, 1, 0, 1, 0)
    assert ranks.note == "a step of one task in a job with SLURM_NTASKS_PER_NODE=2, SLURM_JOB_NUM_NODES=2: it trains alone"
    assert set(ranks.origin.values()) == {"SLURM_STEP_NUM_TASKS=1"}


def test_a_step_of_one_task_in_a_job_of_one_has_nothing_to_say() -> None:
    assert (
        slurm.ranks({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}).note is None
    )


@pytest.mark.parametrize("env", [{**SLURM_OVERLAP, "SLURM_PROCID": "1"}, without(SLURM_OVERLAP, "SLURM_PROCID")])
def test_in_a_larger_job_a_process_that_is_not_the_one_task_of_its_step_was_not_joined(env: Env) -> None:
    with pytest.raises(NotJoinedError, match=r"^SLURM_STEP_NUM_TASKS=1, .*SLURM_PROCID.* train alone; put srun before"):
        slurm.ranks(env)
    assert discover(env, allow_independent=True).world_size == 1


def test_a_rank_above_the_one_task_of_a_job_of_one_is_an_error() -> None:
    env = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "1"}
    with pytest.raises(WorldError, match=r"^SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=1: a rank must be"):
        slurm.ranks(env)


@pytest.mark.parametrize("env", [SLURM_BATCH_ONE, SLURM_ARRAY, {"SLURM_JOB_ID": "1"}])
def test_a_job_of_one_task_is_single_without_srun(env: Env) -> None:
    world = discover(env)
    assert (world.source, world.rank, world.world_size) == ("slurm", 0, 1)


# --- the shells


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            SLURM_BATCH,
            r"^SLURM_NTASKS=6, .*, SLURM_PROCID=0, no SLURM_STEP_ID: this is the batch shell on node1, not a task",
        ),
        (
            SLURM_BATCH_WRAP,
            r"^SLURM_NNODES=2, SLURM_JOB_NUM_NODES=2, SLURM_PROCID=0, no SLURM_STEP_ID: this is the batch shell",
        ),
        ({**SLURM_BATCH_ONE, "SLURM_NTASKS_PER_NODE": "4"}, r"^SLURM_NTASKS_PER_NODE=4, .*this is the batch shell"),
        (SLURM_SALLOC, r"^SLURM_NTASKS=4, .*, no SLURM_PROCID and no SLURM_STEP_ID: this is salloc's shell, not a task"),
        (
            SLURM_INTERACTIVE,
            r"^SLURM_NTASKS=4, .*, SLURM_STEP_ID=4294967290 \(Slurm's own\): this is the shell of the job itself",
        ),
        (without(SLURM_BATCH, "SLURM_JOB_ID", "SLURM_JOBID"), r"this is the batch shell"),
    ],
    ids=["batch", "wrap", "ntasks-per-node", "salloc", "interactive step", "no job id"],
)
def test_the_shell_of_a_job_of_several_tasks_is_not_rank_0(env: Env, said: str) -> None:
    with pytest.raises(NotJoinedError, match=f"{said}.*would train alone; put srun before the command: srun python script.py"):
        discover(env)
    world = discover(env, allow_independent=True)
    assert (world.rank, world.world_size, world.source) == (0, 1, "slurm")
    assert world.note is not None
    assert "put srun before the command" in world.note


def test_only_a_shell_on_the_jobs_own_node_is_told_to_use_that_node_alone() -> None:
    for env, told in ((SLURM_BATCH, True), (SLURM_INTERACTIVE, True), (SLURM_SALLOC, False)):  # salloc's shell is elsewhere
        with pytest.raises(NotJoinedError) as caught:
            slurm.ranks(env)
        assert ("rankwise run script.py" in str(caught.value)) is told


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_JOB_NUM_NODES"])
def test_a_count_that_is_no_number_is_an_error_that_shows_it(name: str) -> None:
    with pytest.raises(WorldError, match=f"^{name}='six' is not a whole number"):
        slurm.ranks({**SLURM_BATCH, name: "six"})


def test_outside_of_a_job_nothing_speaks_of_slurm() -> None:
    assert not slurm.detect({})
    assert not slurm.detect({"SLURM_CONF": "/etc/slurm.conf", "SLURM_NTASKS": "4"})  # a login shell may export these


# --- the variables of an agent, and those that a batch script exports


def triple(rank: int, world_size: int, **more: str) -> Env:
    return {**ADDRESS, "RANK": str(rank), "WORLD_SIZE": str(world_size), **more}


@pytest.mark.parametrize(
    "env",
    [
        {**SLURM_AGENTS[1], **triple(3, 6, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")},
        {**SLURM_AGENTS[1], **triple(3, 6, LOCAL_RANK="1")},
        {**SLURM_AGENTS[1], **triple(2, 3, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", TORCHELASTIC_RUN_ID="x")},
        {**SLURM_AGENTS[1], **triple(4, 5, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="x")},
        {**SLURM_STEP[2], **triple(2, 4, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")},
        {**SLURM_STEP[2], **triple(2, 4)},
        {**SLURM_OVERLAP, **triple(3, 4, LOCAL_RANK="3")},
        {**SLURM_BATCH, **triple(3, 4, LOCAL_RANK="3")},
    ],
    ids=["agent a node", "without its local size", "torchrun's own order", "uneven torchrun", "a rank a task", "the least",
         "in a step of one task", "in a batch shell"],
)  # fmt: skip
def test_a_triple_that_fits_the_step_is_the_inner_one_and_is_believed(env: Env) -> None:
    world = discover(env)
    assert (world.source, str(world.rank), str(world.world_size)) == ("torchrun", env["RANK"], env["WORLD_SIZE"])


@pytest.mark.parametrize(
    "exported",
    [
        triple(0, 1),
        triple(0, 8),
        triple(0, 8, LOCAL_RANK="0", LOCAL_WORLD_SIZE="4"),
        triple(0, 3, LOCAL_RANK="0"),
        triple(0, 4),  # RANK=$SLURM_PROCID in the batch script
    ],
)
def test_a_triple_that_the_batch_script_exported_is_an_error_that_says_so(exported: Env) -> None:
    with pytest.raises(
        WorldError, match=r"SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=4: the batch script exports them, so all tasks have"
    ):
        discover({**SLURM_STEP[2], **exported})


def test_a_step_that_cannot_be_read_does_not_disturb_a_complete_triple() -> None:
    assert discover({**SLURM_STEP[2], "SLURM_STEP_NUM_TASKS": "x", **triple(1, 2)}).rank == 1


def test_the_name_of_a_start_is_one_for_its_tasks_and_another_after_a_requeue_or_in_another_step() -> None:
    assert {slurm.start_id(env, []) for env in SLURM_STEP} == {"slurm-cluster-3.0-0"}
    task = {**SLURM_STEP[0], "SLURM_CLUSTER_NAME": "tc"}
    assert slurm.start_id({**task, "SLURM_RESTART_COUNT": "1"}, []) == "slurm-tc-3.0-1"
    assert slurm.start_id({**task, "SLURM_STEP_ID": "2"}, []) == "slurm-tc-3.2-0"
    assert slurm.start_id({**task, "SLURM_JOB_ID": "4", "SLURM_HET_JOB_ID": "3"}, []) == "slurm-tc-3.0-0"
    assert slurm.start_id({}, []) is None


# --- a rank of our agent


def rank_of_an_agent(rank: int, local_rank: int, local_world_size: int, node: int, world_size: int = 4) -> Ranks:
    return Ranks(rank, world_size, local_rank, local_world_size, node, "10.88.0.1", 29500)


def told(rank: Ranks, per_node: str, env: Env) -> Env:
    """The environment of a rank that the agent with the environment `env` has started."""
    return {**slurm.rank_env(env, rank, per_node), **variables_of(rank, 0, 0, "id")}


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_an_agent_finds_in_slurms_variables_what_it_finds_in_torchruns(rank: int) -> None:
    mine = rank_of_an_agent(rank, rank % 2, 2, rank // 2)
    env = told(mine, "2(x2)", SLURM_AGENTS[rank // 2])
    by_slurm = slurm.ranks(env)
    for field in ("rank", "world_size", "local_rank", "local_world_size", "node_rank"):
        assert getattr(by_slurm, field) == getattr(mine, field)
    assert (env["SLURM_NTASKS"], env["SLURM_NPROCS"], env["SLURM_NTASKS_PER_NODE"], env["SLURM_NNODES"]) == ("4", "4", "2", "2")
    assert discover(env).source == "torchrun"
    assert env["SLURM_JOB_ID"] == "3"


def test_ranks_of_nodes_with_different_numbers_have_no_one_number_a_node() -> None:
    env = told(rank_of_an_agent(4, 0, 1, 2, 5), "3,1(x2)", {**SLURM_AGENTS[2], "SLURM_NTASKS_PER_NODE": "1"})
    assert "SLURM_NTASKS_PER_NODE" not in env
    assert (env["SLURM_TASKS_PER_NODE"], env["SLURM_STEP_TASKS_PER_NODE"]) == ("3,1(x2)", "3,1(x2)")
    assert slurm.ranks(env).local_world_size == 1


def test_what_mpi_would_take_an_agent_for_is_not_passed_on_and_what_a_user_sets_is() -> None:
    env = {
        **SLURM_AGENTS[0],
        "PMIX_RANK": "0",
        "PMI_RANK": "0",
        "PMI2_FD": "3",
        "PMIX_MCA_gds": "hash",
        "SLURM_MPI_TYPE": "pmix",
    }
    found = told(rank_of_an_agent(1, 1, 2, 0), "2(x2)", env)
    assert [name for name in found if name.startswith("PMI")] == ["PMIX_MCA_gds"]
    assert found["SLURM_MPI_TYPE"] == "pmix"


def test_a_rank_has_its_part_of_its_nodes_cores_where_the_job_speaks_of_cores() -> None:
    rank = rank_of_an_agent(0, 0, 2, 0)
    asked = told(rank, "2(x2)", {**SLURM_AGENTS[0], "SLURM_CPUS_PER_TASK": "8", "SLURM_CPUS_ON_NODE": "8"})
    assert asked["SLURM_CPUS_PER_TASK"] == "4"
    assert "SLURM_CPUS_PER_TASK" not in told(rank, "2(x2)", {**SLURM_AGENTS[0], "SLURM_CPUS_ON_NODE": "8"})


def test_a_batch_shell_has_no_step_and_its_ranks_have_none_either() -> None:
    env = told(rank_of_an_agent(1, 1, 2, 0, 2), "2", SLURM_BATCH)
    assert (env["SLURM_PROCID"], env["SLURM_LOCALID"], env["SLURM_NTASKS"]) == ("1", "1", "2")
    assert not [name for name in env if name.startswith("SLURM_STEP")]
