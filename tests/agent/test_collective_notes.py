"""Each collective of torch with each way in which ranks can ask different things: noted, compared, reported."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from rankwise.agent import collective_notes
from rankwise.agent.collective_check import Comparison, Note, Rings
from rankwise.host import listener

RANKS, ODD = 3, 1

Call = Callable[[Any, str], Any]
"""(the functions of one rank, a word that says what differs, or an empty text)."""


def tensor(different: str) -> torch.Tensor:
    return torch.ones(8 if different == "shape" else 4, dtype=torch.int32 if different == "dtype" else torch.float32)


def tensors(different: str) -> list[torch.Tensor]:
    return [tensor(different) for _ in range(RANKS)]


def op(different: str) -> Any:
    return dist.ReduceOp.MAX if different == "operation" else dist.ReduceOp.SUM


def root(different: str) -> int:
    return 2 if different == "root" else 0


CALLS: dict[str, Call] = {
    "all_reduce": lambda d, x: d.all_reduce(tensor(x), op(x)),
    "all_reduce_coalesced": lambda d, x: d.all_reduce_coalesced(tensors(x), op=op(x)),
    "broadcast": lambda d, x: d.broadcast(tensor(x), src=root(x)),
    "reduce": lambda d, x: d.reduce(tensor(x), root(x), op=op(x)),
    "all_gather": lambda d, x: d.all_gather(tensors(x), tensor(x)),
    "all_gather_into_tensor": lambda d, x: d.all_gather_into_tensor(torch.cat(tensors(x)), tensor(x)),
    "all_gather_coalesced": lambda d, x: d.all_gather_coalesced([tensors(x)] * RANKS, tensors(x)),
    "reduce_scatter": lambda d, x: d.reduce_scatter(tensor(x), tensors(x), op(x)),
    "reduce_scatter_tensor": lambda d, x: d.reduce_scatter_tensor(tensor(x), torch.cat(tensors(x)), op=op(x)),
    "gather": lambda d, x: d.gather(tensor(x), dst=root(x)),
    "scatter": lambda d, x: d.scatter(tensor(x), src=root(x)),
    "all_to_all": lambda d, x: d.all_to_all(tensors(x), tensors(x)),
    "all_to_all_single": lambda d, x: d.all_to_all_single(torch.cat(tensors(x)), torch.cat(tensors(x))),
    "barrier": lambda d, _: d.barrier(),
    "monitored_barrier": lambda d, _: d.monitored_barrier(),
    "all_gather_object": lambda d, _: d.all_gather_object([None] * RANKS, 3),
    "broadcast_object_list": lambda d, x: d.broadcast_object_list([3], src=root(x)),
    "gather_object": lambda d, x: d.gather_object(3, dst=root(x)),
    "scatter_object_list": lambda d, x: d.scatter_object_list([None], src=root(x)),
}
REDUCES = {"all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"}
ROOTED = {name for name in CALLS if name.startswith(("broadcast", "gather", "scatter")) or name == "reduce"}
WITHOUT_TENSORS = {name for name in CALLS if name.endswith(("barrier", "_object", "_object_list"))}
OF_ANY_SHAPE = {"all_to_all", "all_to_all_single"}
FROM_ANY_LINE = ROOTED | {"barrier", "monitored_barrier"}

DIFFERENCES = [
    *((name, "operation") for name in CALLS if name in REDUCES),
    *((name, "dtype") for name in CALLS if name not in WITHOUT_TENSORS),
    *((name, "shape") for name in CALLS if name not in WITHOUT_TENSORS | OF_ANY_SHAPE),
    *((name, "root") for name in CALLS if name in ROOTED),
]


class Rank:
    """The functions of torch.distributed as one rank has them: they note calls, and send nothing."""

    def __init__(self, rings: Rings, rank: int) -> None:
        notes = collective_notes.Distributed(rings.place(rank), ("", 0))
        world = SimpleNamespace(group_name="0", size=lambda: RANKS)
        silent = SimpleNamespace(
            is_initialized=lambda: True, group=SimpleNamespace(WORLD=world), GroupMember=c10d.GroupMember,
            get_global_rank=lambda _, inside: inside,
        )  # fmt: skip
        for name, (same, its_root) in collective_notes.COLLECTIVES.items():
            setattr(silent, name, functools.wraps(getattr(c10d, name))(lambda *_, **__: None))
            setattr(self, name, notes._noted(silent, name, same, its_root))


def told(*programs: Callable[[Any], object]) -> str | None:
    """What is reported of ranks that run these; None if they match."""
    rings, comparison = Rings(RANKS), Comparison(RANKS)
    for rank, program in enumerate(programs):
        program(Rank(rings, rank))
    for rank, line in rings.read():
        comparison.add(rank, Note.of(line))
    rings.close()
    return comparison.mismatch().summary if comparison.differs else None


def with_the_odd(usual: Callable[[Any], object], odd: Callable[[Any], object]) -> str | None:
    return told(*(odd if rank == ODD else usual for rank in range(RANKS)))


def test_every_collective_is_in_the_tables() -> None:
    assert CALLS.keys() == collective_notes.COLLECTIVES.keys()
    for name, (same, its_root) in collective_notes.COLLECTIVES.items():
        parameters = inspect.signature(getattr(dist, name)).parameters
        assert same is None or same in parameters, name
        assert (its_root is not None) == (name in ROOTED), name
        assert ("op" in parameters) == (name in REDUCES), name
        assert collective_notes._DTYPE_ALONE.get(name, "group") in parameters, name


@pytest.mark.parametrize("name", CALLS)
def test_ranks_that_ask_the_same_match(name: str) -> None:
    assert with_the_odd(lambda d: CALLS[name](d, ""), lambda d: CALLS[name](d, "")) is None


@pytest.mark.parametrize(("name", "different"), DIFFERENCES)
def test_one_rank_that_asks_something_else_is_named_with_both(name: str, different: str) -> None:
    said = with_the_odd(lambda d: CALLS[name](d, ""), lambda d: CALLS[name](d, different))
    assert said is not None
    assert said.startswith(f"the ranks do not match in collective 1: rank {ODD} calls {name}(")
    assert f", but ranks 0, 2 call {name}(" in said
    asked = {"operation": "(max", "dtype": "int32", "shape": "[8]", "root": " 2) at"}[different]
    assert asked in said.partition(" where ")[0]
    assert asked not in said.partition(" where ")[2]


@pytest.mark.parametrize("name", CALLS)
def test_two_collectives_in_another_order_are_named(name: str) -> None:
    other = CALLS["barrier" if name == "all_reduce" else "all_reduce"]
    usual, odd = (lambda d: (CALLS[name](d, ""), other(d, ""))), (lambda d: (other(d, ""), CALLS[name](d, "")))
    said = with_the_odd(usual, odd)
    assert said is not None
    assert f"in collective 1: rank {ODD} calls {'barrier' if name == 'all_reduce' else 'all_reduce'}(" in said


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_passes_a_collective_over_is_named_at_the_next(name: str) -> None:
    other = CALLS["barrier" if name == "all_reduce" else "all_reduce"]
    said = with_the_odd(lambda d: (CALLS[name](d, ""), other(d, "")), lambda d: other(d, ""))
    assert said is not None
    assert f"in collective 1: rank {ODD} calls" in said
    assert with_the_odd(lambda d: CALLS[name](d, ""), lambda _: None) is None  # the call may still come


@pytest.mark.parametrize("name", CALLS)
def test_two_alike_from_different_lines_are_two_unless_a_line_of_its_own_is_usual(name: str) -> None:
    def one(d: Any) -> None:
        getattr(d, name)(*arguments)

    def another(d: Any) -> None:
        getattr(d, name)(*arguments)

    given: list[Any] = []
    CALLS[name](SimpleNamespace(**{name: lambda *args, **kwargs: given.append((args, kwargs))}), "")
    (positional, named) = given[0]
    arguments = [*positional, *named.values()] if name not in ("all_reduce_coalesced", "reduce_scatter_tensor") else positional
    said = with_the_odd(one, another)
    assert (said is None) == (name in FROM_ANY_LINE)
    assert said is None or "these are two different calls" in said


WRONG: dict[str, Call] = {
    "all_reduce of a dict": lambda d, x: d.all_reduce({f"loss {i}": x for i in range(100)}),
    "all_reduce of dicts": lambda d, x: d.all_reduce([{f"loss {i}": x for i in range(100)}]),
    "all_to_all of a dict": lambda d, x: d.all_to_all({f"loss {i}": x for i in range(100)}, {}),
    "broadcast of a model": lambda d, x: d.broadcast(nn.Sequential(*(nn.Linear(2, 2) for _ in range(len(x) + 20)))),
    "broadcast of a model with a dtype": lambda d, _: d.broadcast(SimpleNamespace(dtype=torch.float32)),
    "broadcast from an object": lambda d, _: d.broadcast(torch.ones(4), object()),
    "all_reduce with an operation that has a long name": lambda d, _: d.all_reduce(torch.ones(4), "sum" * 200),
}


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_argument_that_torch_will_refuse_makes_a_complete_note_and_no_mismatch(call: str) -> None:
    assert with_the_odd(lambda d: WRONG[call](d, "a\tb"), lambda d: WRONG[call](d, "c")) is None
    said = with_the_odd(lambda d: WRONG[call](d, ""), lambda d: d.barrier())
    assert said is not None
    assert said.count("at test_collective_notes.py:") == 2


MODULE = """
def all_reduce(d, tensor):
    d.all_reduce(tensor)
"""


def within(module: str) -> Callable[..., None]:
    """A function of one of our modules that calls a collective."""
    names: dict[str, Any] = {"__name__": module}
    exec(compile(MODULE, f"/venv/rankwise/{module.rpartition('.')[2]}.py", "exec"), names)
    return names["all_reduce"]  # type: ignore[no-any-return]


def test_a_reduction_by_a_function_of_ours_is_told_with_the_line_that_calls_it() -> None:
    ours = within("rankwise.dist.comm")
    a, b = torch.ones(4), torch.zeros(4)

    def usual(d: Any) -> None:
        ours(d, a)
        ours(d, b)

    def odd(d: Any) -> None:
        ours(d, b)
        ours(d, a)

    said = with_the_odd(usual, odd)
    assert said is not None
    assert "at test_collective_notes.py:" in said
    assert "comm.py" not in said
    assert with_the_odd(usual, usual) is None


def test_one_within_a_part_of_ours_is_told_with_both_lines_and_may_come_from_different_lines_of_the_script() -> None:
    ours = within("rankwise.sync.flat")

    def usual(d: Any) -> None:
        ours(d, torch.ones(4))

    def from_another_line(d: Any) -> None:
        ours(d, torch.ones(4))

    assert with_the_odd(usual, from_another_line) is None
    line = usual.__code__.co_firstlineno + 1
    said = with_the_odd(usual, lambda d: d.barrier())
    assert f"call all_reduce(sum, float32[4]) at test_collective_notes.py:{line} (in rankwise/sync/flat.py:3)" in str(said)


# --- DDP's own collectives


class Normed(nn.Module):
    """A model with buffers, which DDP broadcasts in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def on_this_rank(places: list[dict[str, Any]], module: Callable[[], nn.Module], steps: int, micro_batches: int) -> None:
    rank = dist.get_rank()
    collective_notes.Distributed(places[rank], ("", 0))._prepare_ddp(collective_notes.sys.modules[collective_notes._DDP])
    model = DistributedDataParallel(module())
    for _ in range(steps):
        for _ in range(micro_batches - 1):
            with model.no_sync():
                model(torch.ones(2, 3)).sum().backward()
        model(torch.ones(2, 3)).sum().backward()
        nn.Linear(2, 2)(torch.ones(2)).sum().backward()  # does not involve DDP
    with model.join():  # inside, a rank that has finished answers the other
        for _ in range(rank + 1):
            model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("module", [functools.partial(nn.Linear, 3, 3), Normed], ids=["without buffers", "with buffers"])
def test_what_ddp_sends_by_itself_is_noted_once_a_step(module: Callable[[], nn.Module]) -> None:
    rings = Rings(2)
    on_ranks(2, on_this_rank, [rings.place(rank) for rank in range(2)], module, steps=3, micro_batches=2)
    notes = [[Note.of(line) for row, line in lines if row == rank] for lines in [rings.read()] for rank in range(2)]
    rings.close()
    said = [note.what for note in notes[0]]
    assert said == [note.what for note in notes[1]]
    assert said.count("backward() of a DDP model") == 3
    assert all(note.place.startswith("test_collective_notes.py:") for note in notes[0])
    broadcasts = [what for what in said[said.index("backward() of a DDP model") :] if what.startswith("broadcast by DDP(")]
    assert bool(broadcasts) == (module is Normed)


def test_a_module_that_does_not_exist_is_an_import_error_and_one_that_is_only_a_folder_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    finders = [collective_notes.AfterImport(name, lambda _: None) for name in ("no_such_module", "only_a_folder")]
    monkeypatch.setattr(sys, "meta_path", [*finders, *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("no_such_module")
    assert list(importlib.import_module("only_a_folder").__path__) == [str(tmp_path / "only_a_folder")]


@pytest.mark.parametrize(
    ("url", "rank", "waits"),
    [
        ("env://", -1, [("node1", 29500)]), ("env://", 1, [("node1", 29500)]), ("env://", 0, []),
        ("tcp://10.0.0.1:2222", 1, [("10.0.0.1", 2222)]), ("tcp://10.0.0.1:none", 1, []), ("file:///tmp/x", 1, []),
    ],
)  # fmt: skip
def test_a_rank_of_a_script_waits_until_rank_0_listens_before_it_connects(
    url: str, rank: int, waits: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(listener, "wait_for", lambda host, port: seen.append((host, port)))
    for name, value in {"RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    module = SimpleNamespace(rendezvous=lambda *args, **kwargs: seen.append((args, kwargs)))
    collective_notes._wait_for_rank_0(module)
    module.rendezvous(url, rank, 2, timeout=3)
    assert seen == [*waits, ((url, rank, 2), {"timeout": 3})]


def test_torch_connects_by_the_function_at_which_a_rank_waits() -> None:
    assert "rendezvous(" in inspect.getsource(c10d.init_process_group)
