"""`rankwise explain`, and the rules by which a process knows its rank: the complete truth table."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import MappingProxyType

import environments as seen
import pytest
import torch
from conftest import Run
from environments import Env
from ranks import on_ranks, scripts_on_ranks

from rankwise import schedulers
from rankwise.dist import comm
from rankwise.dist.world import World, discover, explain
from rankwise.errors import NotJoinedError, WorldError
from rankwise.report.explain import as_record, as_text
from rankwise.run import directory

TRIPLE = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip

# --- the order in which schedulers are asked


@pytest.mark.parametrize(
    ("env", "source", "rank", "world_size"),
    [
        ({}, "local", 0, 1),
        (TRIPLE, "torchrun", 5, 8),
        ({**seen.OPENMPI_IN_SBATCH[2], **TRIPLE}, "torchrun", 5, 8),
        ({**seen.MPICH_IN_SBATCH[2], **TRIPLE}, "torchrun", 5, 8),
        ({**seen.SLURM_AGENTS[1], **TRIPLE}, "torchrun", 5, 8),
        ({**seen.SLURM_BATCH, **TRIPLE}, "torchrun", 5, 8),
        ({**seen.SGE_TASK, **TRIPLE}, "torchrun", 5, 8),
        (seen.OPENMPI[2], "openmpi", 2, 3),
        ({**seen.OPENMPI[2], **seen.MPICH[0]}, "openmpi", 2, 3),
        (seen.OPENMPI_IN_SBATCH[1], "openmpi", 1, 4),
        (seen.OPENMPI_IN_SBATCH[3], "openmpi", 3, 4),
        (seen.OPENMPI_IN_SGE[2], "openmpi", 2, 3),
        (seen.MPICH[2], "mpich", 2, 3),
        (seen.MPICH_IN_SBATCH[3], "mpich", 3, 4),
        ({**seen.SGE_SCRIPT, **seen.MPICH[1]}, "mpich", 1, 3),
        (seen.SLURM_STEP[3], "slurm", 3, 4),
        ({**seen.SGE_SCRIPT, **seen.SLURM_STEP[3]}, "slurm", 3, 4),
        (seen.SLURM_OVERLAP, "slurm", 0, 1),
        (seen.SLURM_ARRAY, "slurm", 0, 1),
        (seen.SGE_ONE_HOST, "sge", 0, 1),
    ],
)
def test_the_most_trusted_launcher_that_speaks_is_believed(env: Env, source: str, rank: int, world_size: int) -> None:
    world = discover(env)
    assert (world.source, world.rank, world.world_size) == (source, rank, world_size)


UNTOLD = [
    seen.SLURM_BATCH, seen.SLURM_BATCH_WRAP, seen.SLURM_SALLOC, seen.SLURM_INTERACTIVE,
    {**seen.SLURM_OVERLAP, "SLURM_PROCID": "1"}, seen.SGE_SCRIPT, seen.SGE_TASK, {"PMI_RANK": "1", "PMI_SIZE": "2"},
]  # fmt: skip


@pytest.mark.parametrize("env", UNTOLD)
def test_no_process_of_several_trains_alone_without_leave(env: Env) -> None:
    with pytest.raises(NotJoinedError, match="this process would train alone"):
        discover(env)
    world = discover(env, allow_independent=True)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (0, 1, 0, 1)
    assert set(world.origin.values()) == {"an independent process, because of --allow-independent"}
    assert str(explain(env).error) in str(world.note)


@pytest.mark.parametrize("names", [("RANK",), ("WORLD_SIZE",), ("RANK", "WORLD_SIZE"), ("RANK", "WORLD_SIZE", "MASTER_ADDR")])
@pytest.mark.parametrize("under", [{}, seen.OPENMPI[1], seen.SLURM_STEP[1], seen.SLURM_BATCH, seen.SGE_SCRIPT])
def test_leave_to_be_alone_does_not_excuse_a_half_set_triple(names: tuple[str, ...], under: Env) -> None:
    with pytest.raises(WorldError, match="MASTER_PORT"):
        discover({**under, **{name: TRIPLE[name] for name in names}}, allow_independent=True)


@pytest.mark.parametrize("under", [seen.OPENMPI[1], seen.MPICH[1], seen.SLURM_STEP[1]])
def test_an_address_alone_completes_a_launcher_that_counts_ranks(under: Env) -> None:
    world = discover({**under, "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    assert (world.rank, world.master_addr, world.master_port) == (1, "node1", 29500)
    assert discover({**under, "MASTER_ADDR": "node1"}).master_port is None  # comm.init asks for it


@pytest.mark.parametrize("under", [{}, seen.SLURM_BATCH, seen.SLURM_SALLOC, seen.SLURM_OVERLAP, seen.SGE_SCRIPT])
def test_an_address_where_nobody_counts_ranks_is_half_a_triple(under: Env) -> None:
    with pytest.raises(WorldError, match=r"^MASTER_ADDR=node1 but not RANK, WORLD_SIZE: "):
        discover({**under, "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})


@pytest.mark.parametrize("under", [seen.OPENMPI[1], seen.MPICH[1], seen.SLURM_STEP[1]])
@pytest.mark.parametrize(("rank", "world_size"), [("0", "1"), ("0", "16")])
def test_a_triple_that_one_shell_exported_for_all_tasks_is_an_error(under: Env, rank: str, world_size: str) -> None:
    exported = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    with pytest.raises(
        WorldError, match=r"the batch script exports them, so all tasks have the same rank; .*unset RANK WORLD_SIZE"
    ):
        discover({**under, **exported}, allow_independent=True)


# --- numbers as arguments


@pytest.mark.parametrize("env", [{}, TRIPLE, {"RANK": "1"}, seen.SLURM_BATCH, seen.OPENMPI[1]])
def test_numbers_given_by_hand_outrank_everything(env: Env) -> None:
    world = World.discover(env, rank=2, world_size=6, local_rank=0, local_world_size=2, master_addr="h", master_port=7)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank) == (2, 6, 0, 2, None)
    assert (world.source, world.master_addr, world.master_port) == ("arguments", "h", 7)
    assert world.origin["rank"] == "the argument rank"
    assert {other.scheduler for other in explain(env, rank=1).not_taken} == set(schedulers.launchers(env))


def test_the_address_may_be_left_out_and_one_node_is_node_0() -> None:
    world = discover({}, rank=1, world_size=2, local_rank=1, local_world_size=2)
    assert (world.node_rank, world.master_addr) == (0, None)


def test_numbers_given_by_half_are_an_error_that_names_what_is_missing() -> None:
    with pytest.raises(
        WorldError, match=r"^got rank=1, world_size=2 as arguments, but not local_rank, local_world_size; give all"
    ):
        discover(TRIPLE, rank=1, world_size=2)
    with pytest.raises(WorldError, match=r" as arguments, but not master_port; "):
        discover({}, rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="h")
    with pytest.raises(WorldError, match=r"^the argument rank=2 and the argument world_size=2: a rank must be"):
        discover({}, rank=2, world_size=2, local_rank=0, local_world_size=2)


def test_none_is_as_not_given() -> None:
    assert discover(TRIPLE, rank=None, master_addr=None).source == "torchrun"


# --- the explanation


@pytest.mark.parametrize("env", [{}, TRIPLE, {"RANK": "x"}, *UNTOLD, seen.OPENMPI_IN_SBATCH[2], {"SLURM_STEP_ID": "?"}])
def test_explain_and_discover_are_the_same_rules(env: Env) -> None:
    told = explain(MappingProxyType(env))
    assert (told.world is None) is not (told.error is None)
    if told.world is not None:
        assert World.discover(env) == discover(env) == told.world
    else:
        with pytest.raises(WorldError) as caught:
            discover(env)
        assert str(caught.value) == str(told.error)
    assert [told.source, *(other.scheduler for other in told.not_taken)].count(told.source) == 1
    assert sorted([told.source, *(other.scheduler for other in told.not_taken)]) == sorted(schedulers.launchers(env))


def test_an_explanation_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        explain({}).source = "x"  # type: ignore[misc]


def test_what_was_rejected_says_what_it_would_have_meant() -> None:
    why = {other.scheduler: other for other in explain(seen.OPENMPI_IN_SBATCH[2]).not_taken}
    assert why["slurm"].found["SLURM_STEP_NUM_TASKS"] == "1"
    assert why["slurm"].why == "openmpi comes first; without it, this would be rank 0 of 1"
    assert why["torchrun"].found == {}
    assert why["torchrun"].why == "needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: not set"
    why = {other.scheduler: other for other in explain({**seen.SLURM_STEP[2], "PMI_RANK": "2", "PMI_SIZE": "4"}).not_taken}
    assert why["mpich"].found == {"PMI_RANK": "2", "PMI_SIZE": "4"}
    assert why["mpich"].why == "needs PMI_RANK and MPI_LOCALRANKID: not enough of them set"
    why = {other.scheduler: other for other in explain(seen.OPENMPI_IN_SBATCH[0]).not_taken}
    assert why["slurm"].why == "openmpi comes first; without it, this would be an error"


def test_only_the_variables_of_launchers_are_shown() -> None:
    secret = {"API_TOKEN": "hunter2", "MY_RANK": "hunter2", "SLURM_JWT": "hunter2", "PMIX_SERVER_URI2": "hunter2"}
    told = explain({**seen.OPENMPI_IN_SBATCH[2], **secret})
    assert "hunter2" not in as_text(told) + json.dumps(as_record(told))


def test_a_long_value_is_cut_in_the_text_alone() -> None:
    told = explain({**seen.OPENMPI[0], "SLURM_JOB_ID": "1", "SLURM_GTIDS": ",".join(map(str, range(500)))})
    assert max(map(len, as_text(told).splitlines())) < 260
    (slurm,) = [other for other in as_record(told)["not_taken"] if other["scheduler"] == "slurm"]
    assert "499" in slurm["found"]["SLURM_GTIDS"]


# --- as the user sees it

STEP_TEXT = """\
rank 2 of 4: local rank 0 of 2, node 1 (source: slurm)

                             from which variable
  rank              2        SLURM_PROCID
  local rank        0        SLURM_LOCALID
  world size        4        SLURM_STEP_NUM_TASKS
  local world size  2        SLURM_GTIDS, counted
  node rank         1        SLURM_NODEID
  master address    unknown  Slurm gives no address: rank 0 announces its own, or set MASTER_ADDR
  master port       unknown  Slurm gives no port: rank 0 announces its own, or set MASTER_PORT

not taken
  torchrun    needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: not set
  jsrun       needs JSM_NAMESPACE_RANK: not set
  openmpi     needs OMPI_COMM_WORLD_RANK: not set
  horovodrun  needs HOROVOD_RANK: not set
  mvapich     needs MV2_COMM_WORLD_RANK: not set
  pals        needs PALS_RANKID: not set
  flux        needs FLUX_TASK_RANK: not set
  mpich       needs PMI_RANK and MPI_LOCALRANKID: not set
  submitit    needs SUBMITIT_EXECUTOR=local and SUBMITIT_LOCAL_GLOBALID: not set
  sge         needs PE_HOSTFILE or JOB_SCRIPT=QRSH: not set
  pbs         needs PBS_JOBID: not set
  lsf         needs LSB_JOBID: not set
  others      needs PMIX_RANK, PMI_ID, ... (one of several processes) or SM_HOSTS, ... (several hosts): not set
  local       slurm comes first; without it, this would be rank 0 of 1
"""


def told_under(rankwise: Run, env: Env, *options: str) -> subprocess.CompletedProcess[str]:
    return rankwise("explain", *options, env={"PATH": os.environ["PATH"], **env})


def test_the_whole_text(rankwise: Run) -> None:
    done = told_under(rankwise, seen.SLURM_STEP[2])
    assert (done.stdout, done.stderr, done.returncode) == (STEP_TEXT, "", 0)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "a single process: rank 0 of 1 (source: local)"),
        (TRIPLE, "rank 5 of 8: local rank 1 of 4, node 1 (source: torchrun)"),
        (seen.OPENMPI_IN_SBATCH[2], "rank 2 of 4: local rank 0 of 2, node not known (source: openmpi)"),
        (seen.MPICH_IN_SBATCH[3], "rank 3 of 4: local rank 1 of 2, node not known (source: mpich)"),
        (seen.OPENMPI_IN_SGE[2], "rank 2 of 3: local rank 0 of 1, node not known (source: openmpi)"),
        (seen.SLURM_UNEVEN[4], "rank 4 of 5: local rank 0 of 1, node 2 (source: slurm)"),
        (
            seen.SLURM_OVERLAP,
            "note: a step of one task in a job with SLURM_NTASKS_PER_NODE=2, SLURM_JOB_NUM_NODES=2: it trains",
        ),
        (seen.SLURM_ARRAY, "note: task 3 of job array 15: each task trains on its own"),
        (seen.SGE_ONE_HOST, "note: NSLOTS=3 slots on this host, but one process"),
    ],
)
def test_who_knows_its_rank_is_told_it(rankwise: Run, env: Env, said: str) -> None:
    done = told_under(rankwise, env)
    assert said in done.stdout
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("env", "found", "cure"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1, WORLD_SIZE=2 but not MASTER_ADDR, MASTER_PORT", "set all, or unset all"),
        ({**TRIPLE, "RANK": "one"}, "RANK='one' is not a whole number", "unset it"),
        ({**TRIPLE, "RANK": "8"}, "RANK=8 and WORLD_SIZE=8", "rankwise run script.py"),
        (
            {**seen.SLURM_STEP[2], **TRIPLE, "TORCHELASTIC_RUN_ID": None},
            "RANK=5 and WORLD_SIZE=8, but SLURM_PROCID=2",
            "unset RANK",
        ),
        (seen.SLURM_BATCH, "this is the batch shell on node1", "put srun before the command: srun python script.py"),
        (seen.SLURM_SALLOC, "this is salloc's shell", "put srun before the command: srun python script.py"),
        (seen.SGE_SCRIPT, "this is the job's script, on the first of its 2 hosts", "mpirun python script.py"),
        (seen.SGE_TASK, "which does not give it a rank", "qrsh -v"),
    ],
)
def test_who_does_not_is_told_what_was_found_and_what_to_type(rankwise: Run, env: Env, found: str, cure: str) -> None:
    done = told_under(rankwise, {name: value for name, value in env.items() if value is not None})
    assert done.returncode == 2
    assert done.stdout.startswith("the rank is not known (source: ")
    assert "\nnot taken\n" in done.stdout
    assert done.stderr.startswith("rankwise: ")
    assert found in done.stderr
    assert cure in done.stderr
    assert done.stderr.count("\n") == 1


def test_leave_to_be_alone_is_given_on_the_command_line(rankwise: Run) -> None:
    done = told_under(rankwise, seen.SLURM_BATCH, "--allow-independent")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("a single process: rank 0 of 1 (source: slurm)\n")
    assert "note: without --allow-independent this is an error: SLURM_NTASKS=6" in done.stdout


def test_the_record_has_every_number_and_where_it_comes_from(rankwise: Run) -> None:
    done = told_under(rankwise, {**TRIPLE, directory.ENV_RUN_DIR: "/runs/a b"}, "--json")
    record = json.loads(done.stdout)
    assert list(record) == [
        "rank", "local_rank", "world_size", "local_world_size", "node_rank", "master_addr", "master_port", "source", "run_dir",
        "origin", "note", "error", "found", "not_taken",
    ]  # fmt: skip
    assert [record[name] for name in list(record)[:9]] == [5, 1, 8, 4, 1, "10.0.0.1", 29500, "torchrun", "/runs/a b"]
    assert record["origin"]["local_world_size"] == "LOCAL_WORLD_SIZE"
    assert record["error"] is None
    assert record["found"]["RANK"] == "5"
    assert record["not_taken"][-1] == {
        "scheduler": "local", "found": {}, "why": "torchrun comes first; without it, this would be rank 0 of 1",
    }  # fmt: skip


def test_the_record_of_an_error_has_no_numbers_and_the_status_is_2(rankwise: Run) -> None:
    done = told_under(rankwise, seen.SLURM_BATCH, "--json")
    record = json.loads(done.stdout)
    assert done.returncode == 2
    assert done.stderr == f"rankwise: {record['error']}\n"
    assert (record["rank"], record["world_size"], record["source"]) == (None, None, "slurm")
    assert record["found"]["SLURM_NTASKS"] == "6"


# --- how a script uses it

SCRIPT = """
import os, sys, rankwise, torch
try:
    world = rankwise.init()
except rankwise.RankwiseError as error:
    sys.exit(str(error))
total = rankwise.all_reduce(torch.tensor([float(world.rank)]))
print(world.rank, world.world_size, world.source, total.item(), flush=True)
os._exit(0)  # taking torch apart is torch's own: with gloo it aborts now and then ("terminate called without ...")
"""


def said(*environ: Env) -> list[tuple[int, str]]:
    """(exit status, output) of SCRIPT as each of these ranks."""
    Path("train.py").write_text(SCRIPT)
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    done = scripts_on_ranks(
        len(environ), "train.py", environ=[{"PATH": os.environ["PATH"], **env, **no_gpu} for env in environ]
    )
    return [(rank.returncode, rank.stdout) for rank in done]


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.one_in(2)
def test_half_an_address_is_refused(name: str) -> None:
    [(status, text)] = said({**seen.SLURM_STEP[1], name: "1"})
    assert status == 1
    other = {"MASTER_ADDR": "MASTER_PORT", "MASTER_PORT": "MASTER_ADDR"}[name]
    assert text.startswith(f"rank 1 of 4 (slurm) has no {other}; set both ")
    assert "or neither" in text


def test_without_an_address_the_tasks_of_a_step_find_each_other_by_a_file_that_is_gone_then(tmp_path: Path) -> None:
    nowhere = {"HOME": str(tmp_path / "home")}
    ranks = [{**seen.SLURM_STEP[rank], "SLURM_STEP_NUM_TASKS": "2", **nowhere} for rank in range(2)]
    assert said(*ranks) == [(0, "0 2 slurm 1.0\n"), (0, "1 2 slurm 1.0\n")]
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def found_by_a_task() -> tuple[int, int, str, float]:
    world = comm.init()
    return world.rank, world.world_size, world.source, comm.all_reduce(torch.tensor([float(world.rank)])).item()


def test_with_the_address_that_was_asked_for_the_tasks_of_a_step_find_each_other() -> None:
    tasks = [
        {**seen.SLURM_STEP[rank], "SLURM_STEP_NUM_TASKS": "2", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        for rank in range(2)
    ]
    assert on_ranks(2, found_by_a_task, environ=tasks) == [(0, 2, "slurm", 1.0), (1, 2, "slurm", 1.0)]  # on_ranks sets it
