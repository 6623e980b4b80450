"""`rankwise run --check-collectives`: if ranks call different collectives, an error says so, instead of wrong numbers."""

from __future__ import annotations

import pytest
from launched import launch, wait_for

__all__ = ["launch"]  # a fixture

FIVE_THEN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
for _ in range(5):
    dist.all_reduce(torch.ones(4))
THEN
for _ in range(20):
    dist.all_reduce(torch.ones(4))
print("ended")
"""
SWAPPED = """
a, b = torch.ones(4), torch.zeros(4)
if rank == 1:
    dist.all_reduce(b)
    dist.all_reduce(a)
else:
    dist.all_reduce(a)
    dist.all_reduce(b)
"""
EVALUATION_ON_ONE_RANK = """model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
def evaluate():
    dist.all_reduce(torch.ones(1))
if rank == 0:
    evaluate()
model(torch.ones(2, 3)).sum().backward()
"""
USUAL = """
if rank != 0:
    dist.barrier()
if rank == 0:
    dist.barrier()
if rank == 1:
    dist.broadcast(torch.ones(4), src=1)
else:
    dist.broadcast(torch.zeros(4), src=1)
objects = [None] * n
dist.all_gather_object(objects, "x" * rank)
dist.broadcast_object_list(objects, src=0)
pair = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(torch.ones(2), group=pair)
dist.all_gather([torch.empty(2) for _ in range(n)], torch.ones(2))
dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX, async_op=True).wait()
"""


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (
            "dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32))",
            "rank 1 calls all_reduce(sum, int32[4]) at script.py:7, but ranks 0, 2 call all_reduce(sum, float32[4])",
        ),
        pytest.param(
            SWAPPED,
            "rank 1 calls all_reduce(sum, float32[4]) at script.py:10, but ranks 0, 2 call it at script.py:13",
            marks=pytest.mark.stress(dose="whole"),  # the same code as rankwise's own
        ),
        (
            "import rankwise\n" + SWAPPED.replace("dist.", "rankwise."),
            "rank 1 calls all_reduce(sum, float32[4]) at script.py:11, but ranks 0, 2 call it at script.py:14",
        ),
        (
            EVALUATION_ON_ONE_RANK,
            "rank 0 calls all_reduce(sum, float32[1]) at script.py:9, but ranks 1, 2 call backward() of a DDP model at "
            "script.py:12",
        ),
    ],
    ids=["dtype", "swapped", "two of rankwise swapped", "against DDP"],
)
@pytest.mark.one_in(3)
def test_the_ranks_whose_collective_differs_are_named_with_both_lines(launch, then: str, said: str) -> None:
    run = launch(FIVE_THEN.replace("THEN", then), options=("--nproc", "3", "--check-collectives"))
    assert run.wait() == 1
    number = 7 if "DDP" in said else 6  # DDP has already broadcast its parameters
    assert f"the ranks do not match in collective {number}: {said}" in run.output()
    failure = run.run.read_failure()
    assert failure is not None
    assert failure.rank in (0, 1, 2)
    assert said in failure.summary


SPAWNED = pytest.param(("--start-method", "spawn"), marks=pytest.mark.stress, id="spawned")  # the test below has one of these


@pytest.mark.parametrize("start", [pytest.param((), id="forked"), SPAWNED])
def test_what_scripts_usually_do_is_no_mismatch(launch, start: tuple[str, ...]) -> None:
    run = launch(FIVE_THEN.replace("THEN", USUAL), options=("--nproc", "3", "--check-collectives", *start))
    assert run.wait() == 0, run.output()


@pytest.mark.stress
def test_spawned_ranks_are_compared_too(launch) -> None:
    then = "dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(4))"
    run = launch(FIVE_THEN.replace("THEN", then), options=("--nproc", "2", "--check-collectives", "--start-method", "spawn"))
    assert run.wait() == 1
    assert "the ranks do not match in collective 6" in run.output()


@pytest.mark.stress  # two attempts, each with an import of torch
def test_a_restart_begins_to_count_anew(launch) -> None:
    script = "import os, sys\n" + FIVE_THEN.replace("THEN", "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(3)")
    run = launch(script, options=("--nproc", "2", "--check-collectives", "--max-restarts", "1"))
    assert run.wait() == 0, run.output()


@pytest.mark.parametrize(
    "then",
    [
        pytest.param("dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(4))", marks=pytest.mark.stress),
        pytest.param("dist.broadcast(torch.ones(4), src=int(rank == 2))", marks=pytest.mark.stress(dose="whole")),
    ],
    ids=["another collective", "root"],
)
def test_without_the_check_ranks_that_hang_in_what_does_not_match_are_told_with_their_lines(launch, then: str) -> None:
    run = launch(FIVE_THEN.replace("THEN", then), options=("--nproc", "3", "--stall-warn", "1"))
    line = wait_for(lambda: [line for line in run.output().splitlines() if "no progress for" in line], "a verdict")[0]
    assert "script.py:7" in line
