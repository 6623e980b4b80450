"""Collectives: the same answer on one rank as on many."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, on_ranks
from torch import nn

from rankwise import comm
from rankwise.errors import WorldError

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def everything() -> dict[str, Any]:
    """One call of each function, of which the answer can be written down for any number of ranks."""
    world = comm.init()
    me = torch.tensor([float(world.rank), 1.0], dtype=torch.float64)
    broadcast = [torch.full((2, 3), world.rank + 1.0).to(kind) for kind in KINDS]
    broadcast += [torch.tensor(world.rank), torch.empty(0), torch.full((3, 4), float(world.rank)).t()]
    parameter = nn.Parameter(torch.full((2,), float(world.rank)))
    comm.broadcast([*broadcast, parameter])
    comm.barrier()
    return {
        "rank": comm.rank(),
        "world_size": comm.world_size(),
        "sum": comm.all_reduce(me.clone()).tolist(),
        "min": comm.all_reduce(me.clone(), "min").tolist(),
        "max": comm.all_reduce(me.clone(), "max").tolist(),
        "in_place": comm.all_reduce(me) is me,
        "broadcast": [t.to(torch.float64).tolist() for t in broadcast],
        "parameter": (parameter.tolist(), parameter.requires_grad, parameter.is_leaf),
        "object": comm.broadcast_object({"from": world.rank, "text": "ä" * (world.rank + 1)}),
        "gathered": comm.all_gather_object("x" * (world.rank * 1000)),
        "all": comm.all_agree(True),
        "none": comm.all_agree(False),
        "not_all": comm.all_agree(world.rank != world.world_size - 1),
    }


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_collective_answers_the_same_on_one_rank_as_on_many(n: int) -> None:
    answers = on_ranks(n, everything)
    for rank, answer in enumerate(answers):
        assert answer == {
            "rank": rank,
            "world_size": n,
            "sum": [n * (n - 1) / 2, n],
            "min": [0, 1],
            "max": [n - 1, 1],
            "in_place": True,
            "broadcast": [[[1.0] * 3] * 2] * len(KINDS) + [0.0, [], [[0.0] * 3] * 4],
            "parameter": ([0.0, 0.0], True, True),
            "object": {"from": 0, "text": "ä"},
            "gathered": ["x" * (r * 1000) for r in range(n)],
            "all": True,
            "none": False,
            "not_all": False,
        }


def broadcast_from_last() -> tuple[float, str]:
    tensor = torch.tensor(float(comm.rank()))
    last = comm.world_size() - 1
    comm.broadcast([tensor], src=last)
    return tensor.item(), comm.broadcast_object(f"of {comm.rank()}", src=last)


def test_any_rank_can_be_the_source_of_a_broadcast() -> None:
    assert on_ranks(3, broadcast_from_last) == [(2.0, "of 2")] * 3


def count_broadcasts() -> int:
    calls = 0
    original = dist.broadcast

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    dist.broadcast = counted
    comm.broadcast([torch.zeros(3), torch.zeros(2, 2), torch.zeros((), dtype=torch.int64), torch.zeros(1)])
    comm.broadcast([])
    return calls


def test_a_broadcast_is_one_message_for_each_dtype() -> None:
    assert on_ranks(2, count_broadcasts) == [2, 2]


def init_again() -> bool:
    group = dist.group.WORLD
    again = comm.init()
    return dist.group.WORLD is group and again.rank == dist.get_rank() and again.world_size == 2


def test_a_second_init_changes_nothing() -> None:
    assert on_ranks(2, init_again) == [True, True]


def test_without_other_ranks_no_group_is_made() -> None:
    world = comm.init()
    assert (world.rank, world.world_size, world.is_main, world.is_local_main) == (0, 1, True, True)
    assert not dist.is_initialized()
    module = nn.BatchNorm1d(2)
    before = copy.deepcopy(module.state_dict())
    comm.broadcast(list(module.buffers()))
    comm.barrier()
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_half_an_environment_is_a_world_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(WorldError, match=r"WORLD_SIZE|LOCAL_RANK"):
        comm.init()


def raise_on_one() -> None:
    if comm.rank() == 1:
        raise LookupError("only here")


def test_what_a_rank_raises_comes_back_with_its_rank() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1:.*LookupError: only here"):
        on_ranks(2, raise_on_one)
