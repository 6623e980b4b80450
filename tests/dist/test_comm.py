"""Collectives give the same answer on one rank as on many."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from environments import SLURM_STEP, openmpi
from ranks import RankError, on_ranks, scripts_on_ranks, torchrun
from torch import nn
from torch.utils.data import DataLoader

import rankwise
from rankwise.dist import comm, shared_memory
from rankwise.errors import ConfigError, WorldError

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


BACKENDS = (None, "gloo")
"""None: in memory that the ranks share."""


def everything() -> dict[str, Any]:
    """One call of each function whose result can be computed for any number of ranks."""
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
        "mean": comm.all_reduce(me.clone(), "mean").tolist(),
        "in_place": comm.all_reduce(me) is me,
        "broadcast": [t.to(torch.float64).tolist() for t in broadcast],
        "parameter": (parameter.tolist(), parameter.requires_grad, parameter.is_leaf),
        "object": comm.broadcast_object({"from": world.rank, "text": "ä" * (world.rank + 1)}),
        "gathered": comm.all_gather_object("x" * (world.rank * 1000)),
        "all": comm.all_agree(True),
        "none": comm.all_agree(False),
        "not_all": comm.all_agree(world.rank != world.world_size - 1),
    }


@pytest.mark.parametrize(("n", "backend"), [(1, None), *itertools.product((2, 3), BACKENDS)])
def test_every_collective_answers_the_same_on_one_rank_as_on_many(n: int, backend: str | None) -> None:
    answers = on_ranks(n, everything, init={"backend": backend})
    for rank, answer in enumerate(answers):
        assert answer == {
            "rank": rank,
            "world_size": n,
            "sum": [n * (n - 1) / 2, n],
            "min": [0, 1],
            "max": [n - 1, 1],
            "mean": [(n - 1) / 2, 1],
            "in_place": True,
            "broadcast": [[[1.0] * 3] * 2] * len(KINDS) + [0.0, [], [[0.0] * 3] * 4],
            "parameter": ([0.0, 0.0], True, True),
            "object": {"from": 0, "text": "ä"},
            "gathered": ["x" * (r * 1000) for r in range(n)],
            "all": True,
            "none": False,
            "not_all": False,
        }


def odd_tensors() -> dict[str, Any]:
    """Each has the value 1 + rank everywhere, or True only on the last rank."""
    r, n = comm.rank(), comm.world_size()
    base = torch.full((4, 6), 1.0 + r)
    parameter = nn.Parameter(torch.full((3,), 1.0 + r))
    last = torch.tensor([r == n - 1, True, False])
    return {
        "transposed": comm.all_reduce(base.clone().t()).tolist(),
        "strided": [comm.all_reduce(base[::2, ::3]).tolist(), base.tolist()],
        "empty": comm.all_reduce(torch.empty(0, 3)).shape,
        "scalar": comm.all_reduce(torch.tensor(1.0 + r), "mean").item(),
        "any": comm.all_reduce(last.clone(), "max").tolist(),
        "all": comm.all_reduce(last.clone(), "min").tolist(),
        "parameter": [comm.all_reduce(parameter).tolist(), parameter.grad_fn, parameter.requires_grad],
        "dtypes": [comm.all_reduce(torch.full((2,), 1 + r).to(kind)).tolist() for kind in KINDS[:-1] + ODD_KINDS],
        "complex": comm.all_reduce(torch.tensor(1 + 1j) * (1 + r), "mean").item(),
        "large halves": comm.all_reduce(torch.full((2,), 4e4, dtype=torch.float16), "mean").tolist(),
    }


ODD_KINDS = [torch.int8, torch.int16, torch.int32]


@pytest.mark.parametrize(("n", "backend"), [(1, None), *itertools.product((2, 3), BACKENDS)])
def test_a_tensor_of_any_shape_stride_and_dtype_is_reduced_in_place(n: int, backend: str | None) -> None:
    total = n * (n + 1) / 2
    strided = [[total if r % 2 == 0 and c % 3 == 0 else -1.0 for c in range(6)] for r in range(4)]
    for rank, answer in enumerate(on_ranks(n, odd_tensors, init={"backend": backend})):
        assert answer["transposed"] == [[total] * 4] * 6
        assert answer["strided"][0] == [[total] * 2] * 2
        assert answer["strided"][1] == [[1.0 + rank if v < 0 else v for v in row] for row in strided]
        assert answer["empty"] == (0, 3)
        assert answer["scalar"] == total / n
        assert answer["any"] == [True, True, False]
        assert answer["all"] == [n == 1, True, False]
        assert answer["parameter"] == [[total] * 3, None, True]
        assert answer["dtypes"] == [[total] * 2] * (len(KINDS) - 1 + len(ODD_KINDS))
        assert answer["complex"] == (1 + 1j) * total / n
        assert answer["large halves"] == [40000.0] * 2


def refused() -> list[str]:
    texts = []
    for tensor, op in ((torch.ones(1), "avg"), (torch.ones(1, dtype=torch.int64), "mean"), (torch.tensor([True]), "sum")):
        with pytest.raises(ConfigError) as caught:
            comm.all_reduce(tensor, op)
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("n", [1, 2])
def test_a_reduction_that_there_is_not_is_an_error_that_says_which_there_are(n: int) -> None:
    for texts in on_ranks(n, refused):
        assert texts[0] == "all_reduce(op='avg'): give one of 'sum', 'mean', 'min', 'max'"
        assert "tensor.float()" in texts[1]
        assert "'max' (any), op='min' (all)" in texts[2]


def identity() -> tuple[Any, ...]:
    return (
        rankwise.rank(), rankwise.world_size(), rankwise.local_rank(), comm.local_world_size(), rankwise.is_main(),
        comm.is_local_main(),
    )  # fmt: skip


def identity_everywhere() -> list[tuple[Any, ...]]:
    """After init, in forked loader workers, and from the same environment before init."""
    workers = list(DataLoader([0, 1], num_workers=2, batch_size=1, collate_fn=lambda _: identity()))  # type: ignore[arg-type]
    after = identity()
    world = comm.init()
    told = (
        world.rank, world.world_size, world.local_rank, world.local_world_size, world.is_main, world.is_local_main
    )  # fmt: skip
    rankwise.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    comm._world = None
    rankwise.barrier = lambda: None  # type: ignore[assignment]  # the test's own, at its end
    return [identity(), after, told, *workers]


@pytest.mark.parametrize(
    "environ",
    [
        [{}],
        [torchrun(rank, 2, 2) for rank in range(2)],
        [torchrun(rank, 4, 2) for rank in range(4)],
        [openmpi(rank, 4, rank // 2, 2) for rank in range(4)],
        [{**task, "CUDA_VISIBLE_DEVICES": ""} for task in SLURM_STEP],  # there, the tasks had GPUs
    ],
    ids=["alone", "torchrun", "torchrun, two nodes", "mpirun by node", "srun"],
)
def test_a_process_knows_its_rank_before_and_after_init_and_in_its_workers(environ: list[dict[str, str]]) -> None:
    n = len(environ)
    locals_ = [0, 0, 1, 1] if "OMPI_COMM_WORLD_RANK" in environ[0] else [rank % 2 for rank in range(n)]
    for rank, answers in enumerate(on_ranks(n, identity_everywhere, environ=environ)):
        local = locals_[rank]
        assert answers == [(rank, n, local, min(n, 2), rank == 0, local == 0)] * 5


def own_group() -> tuple[int, str]:
    """A script that creates its process group itself, which the environment does not describe."""
    world = comm.init()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    comm._world = None
    store = dist.FileStore("store", 2)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=2)
    with pytest.raises(WorldError) as caught:
        rankwise.local_rank()
    return rankwise.rank(), str(caught.value)


def test_a_process_group_made_by_hand_gives_the_rank_and_no_wrong_local_rank() -> None:
    for rank, (answer, text) in enumerate(on_ranks(2, own_group)):
        assert answer == rank
        assert f"the process group has rank {rank} of 2, the environment rank 0 of 1" in text


def alone_for_a_while() -> list[Any]:
    with comm.alone():
        tensor = torch.tensor(1.0 + comm.rank())
        comm.barrier()
        comm.broadcast([tensor])
        inside = [
            comm.all_reduce(tensor).item(),
            comm.broadcast_object(comm.rank()),
            comm.all_gather_object("me"),
            comm.rank(),
        ]
    return [*inside, comm.all_gather_object(comm.rank())]


def test_a_rank_that_is_alone_for_a_while_answers_itself() -> None:
    for rank, answer in enumerate(on_ranks(2, alone_for_a_while)):
        assert answer == [1.0 + rank, rank, ["me"], rank, [0, 1]]


@pytest.mark.parametrize(
    "collective",
    [comm.barrier, lambda: comm.all_reduce(torch.ones(1)), lambda: comm.broadcast([]), lambda: comm.all_gather_object(1)],
)
def test_a_collective_before_init_among_several_ranks_is_an_error(
    collective: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "_world", None)
    for name, value in {**torchrun(1, 2, 2), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match=r"rank 1 of 2 has not joined the others; call rankwise.init\(\) first"):
        collective()


def test_hosts_that_are_called_alike_and_unset_node_ranks_do_not_make_two_nodes_one() -> None:
    grouped = comm._grouped
    assert grouped([("a", 0), ("a", 1), ("b", 0), ("b", 1)]) == [[0, 1], [2, 3]]
    assert grouped([("a", 0), ("b", 0), ("a", 1), ("b", 1)]) == [[0, 2], [1, 3]]
    assert grouped([("same", 0), ("same", 1), ("same", 0), ("same", 1)]) == [[0, 1], [2, 3]]
    assert grouped([("same", 0), ("same", 0), ("same", 1), ("same", 1)]) == [[0, 2], [1, 3]]
    assert grouped([("a", 1), ("a", 0)]) == [[1, 0]]  # the first is local rank 0


def broadcast_from_last() -> tuple[float, str]:
    tensor = torch.tensor(float(comm.rank()))
    last = comm.world_size() - 1
    comm.broadcast([tensor], src=last)
    return tensor.item(), comm.broadcast_object(f"of {comm.rank()}", src=last)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_rank_can_be_the_source_of_a_broadcast(backend: str | None) -> None:
    assert on_ranks(3, broadcast_from_last, init={"backend": backend}) == [(2.0, "of 2")] * 3


SMALL = ("int8", "int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "bfloat16", "bool", "complex64")


def broadcast_of_each_type() -> list[list[float]]:
    tensors = [torch.full((3,), 1 - comm.rank()).to(getattr(torch, name)) for name in SMALL]
    comm.broadcast(tensors)
    return [tensor.to(torch.complex64).real.tolist() for tensor in tensors]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_of_any_type_is_broadcast(backend: str | None) -> None:
    assert on_ranks(2, broadcast_of_each_type, init={"backend": backend}) == [[[1.0] * 3] * len(SMALL)] * 2


def count_broadcasts() -> int:
    calls = 0
    original = dist.broadcast

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    dist.broadcast = counted
    in_memory = shared_memory.begun
    comm.broadcast([torch.zeros(3), torch.zeros(2, 2), torch.zeros((), dtype=torch.int64), torch.zeros(1)])
    comm.broadcast([])
    return calls + shared_memory.begun - in_memory


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_broadcast_is_one_message_for_each_dtype(backend: str | None) -> None:
    assert on_ranks(2, count_broadcasts, init={"backend": backend}) == [2, 2]


def listens() -> list[str]:
    """The addresses at which this process listens, without those of gloo: there is its store."""
    return sorted({c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN})


def test_ranks_of_one_machine_that_are_given_an_address_meet_at_that_alone() -> None:
    tasks = [
        {**SLURM_STEP[rank], "SLURM_STEP_NUM_TASKS": "2", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        for rank in range(2)
    ]
    for first, second in [on_ranks(2, listens, environ=tasks)]:
        assert set(first) == set(second) == {"127.0.0.1"}


def init_again() -> bool:
    group = dist.group.WORLD
    again = comm.init()
    return dist.group.WORLD is group and again.rank == dist.get_rank() and again.world_size == 2


def test_a_second_init_changes_nothing() -> None:
    assert on_ranks(2, init_again) == [True, True]


SLOWER = """\
import os, time
from pathlib import Path
import torch.distributed as dist
import rankwise

connect = dist.init_process_group

def slowly(*words, **named):
    connect(*words, **named)
    time.sleep(0.5)
    Path("connected").touch()

if os.environ["RANK"] == "1":
    dist.init_process_group = slowly
rankwise.init({arguments})
assert Path("connected").exists(), "if this rank exited here, the other would fail"
"""


@pytest.mark.parametrize("arguments", ["", "backend='gloo'"])
def test_init_returns_on_no_rank_before_all_are_connected(arguments: str) -> None:
    Path("train.py").write_text(SLOWER.format(arguments=arguments))
    for done in scripts_on_ranks(2, "train.py"):
        assert (done.returncode, done.stdout) == (0, ""), done.stdout


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
