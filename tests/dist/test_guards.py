"""run_on_main: the value or the exception on every rank, and never a deadlock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from environments import openmpi
from launched import wait_for
from ranks import RankError, on_ranks, torchrun

from rankwise.data import Loader
from rankwise.dist import comm
from rankwise.dist.guards import agreed, main_process_only, once_per_node, run_on_main, run_once_per_node
from rankwise.dist.world import World
from rankwise.errors import CheckpointError, CollectiveError, ConfigError, MainProcessError
from rankwise.evaluation import Evaluate

ONE = World(0, 1, 0, 1, 0, "test")


class NeedsTwoError(Exception):
    """It can be pickled, but not created again: its constructor needs more than its args contain."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def unpicklable_error() -> Exception:
    error = ValueError("with a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


def raise_(error: BaseException) -> None:
    raise error


def outcome(function: Callable[[], Any]) -> tuple[str, Any, str, float]:
    """(the type of the exception or "value", its text or the value, its notes, seconds)."""
    began = time.perf_counter()
    try:
        value = function()
    except BaseException as error:
        return type(error).__name__, str(error), "\n".join(getattr(error, "__notes__", [])), time.perf_counter() - began
    return "value", value, "", time.perf_counter() - began


def name_the_rank(prefix: str, *, suffix: str = "") -> str:
    return f"{prefix}{comm.rank()}{suffix}"


def a_function_of_the_test() -> None:
    raise KeyError("missing word")


def values() -> list[Any]:
    calls: list[int] = []
    big = run_on_main(lambda: list(range(100_000)))
    return [
        run_on_main(name_the_rank, ["r"], {"suffix": "!"}),
        run_on_main(lambda: None),
        run_on_main(lambda: ValueError("returned, not raised")).args,
        run_on_main(lambda: (False, "looks like", "an answer")),
        sum(big),
        run_on_main(lambda: calls.append(comm.rank())),
        calls,
    ]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_rank_has_the_value_that_main_computed(n: int) -> None:
    for rank, answer in enumerate(on_ranks(n, values)):
        expected = ["r0!", None, ("returned, not raised",), (False, "looks like", "an answer"), 4999950000, None]
        assert answer == [*expected, [0] if rank == 0 else []]


class OfTwoError(Exception):
    """It can be pickled, but then has another text: its constructor is called with the text of the first."""

    def __init__(self, a: str, b: int = 0) -> None:
        super().__init__(f"{a} and {b}")


class BadStateError(Exception):
    """Its pickle cannot be read."""

    def __setstate__(self, state: Any) -> NoReturn:
        raise RuntimeError("no state is taken")

    def __reduce__(self) -> Any:
        return BadStateError, self.args, {"state": 1}


class OtherTypeError(Exception):
    """After a pickle, it is something else."""

    def __reduce__(self) -> Any:
        return ValueError, self.args


class SilentError(Exception):
    """It cannot be converted to text, and cannot take a note."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def with_a_lambda() -> Exception:
    error = LookupError("with a lambda")
    error.key = lambda: 0  # type: ignore[attr-defined]
    return error


ERRORS: dict[str, tuple[Callable[[], BaseException], str, str]] = {
    "our own": (lambda: CheckpointError("disk"), "CheckpointError", "disk"),
    "SystemExit": (lambda: SystemExit(3), "SystemExit", "3"),
    "KeyboardInterrupt": (KeyboardInterrupt, "KeyboardInterrupt", ""),
    "StopIteration": (lambda: StopIteration(7), "StopIteration", "7"),
    "OSError": (lambda: OSError(28, "No space left on device"), "OSError", "[Errno 28] No space left on device"),
    "a group": (lambda: ExceptionGroup("two", [ValueError("a"), KeyError("b")]), "ExceptionGroup", "two (2 sub-exceptions)"),
    "cannot be made again": (lambda: NeedsTwoError(1, 2), "MainProcessError", "NeedsTwoError: 1 and 2"),
    "comes back different": (lambda: OfTwoError("x", 5), "MainProcessError", "OfTwoError: x and 5"),
    "of another type": (lambda: OtherTypeError("odd"), "MainProcessError", "OtherTypeError: odd"),
    "with a lock": (unpicklable_error, "MainProcessError", "ValueError: with a lock"),
    "with a lambda": (with_a_lambda, "MainProcessError", "LookupError: with a lambda"),
    "its state cannot be set": (lambda: BadStateError("odd"), "MainProcessError", "BadStateError: odd"),
    "without a text": (SilentError, "MainProcessError", "SilentError"),
}


def errors(guard: Callable[..., Any]) -> dict[str, tuple[str, Any, str, float]]:
    outcomes = {name: outcome(lambda make=make: guard(lambda: raise_(make()))) for name, (make, _, _) in ERRORS.items()}
    outcomes["from a function"] = outcome(lambda: guard(a_function_of_the_test))
    outcomes["value"] = outcome(lambda: guard(lambda: 7))  # the guard still works after all this
    comm.barrier()  # the ranks that raised still run, so no rank returned only because another one died
    return outcomes


@pytest.mark.parametrize("guard", [run_on_main, run_once_per_node])
def test_an_exception_is_raised_on_every_rank_at_once_and_of_one_type(guard: Callable[..., Any]) -> None:
    for rank, outcomes in enumerate(on_ranks(3, errors, guard)):
        assert outcomes.pop("value")[:2] == ("value", 7)
        kind, _, notes, _ = outcomes.pop("from a function")
        assert kind == "KeyError"
        if rank > 0:
            assert "raised on the main rank" in notes
            assert "in a_function_of_the_test" in notes
            assert "KeyError: 'missing word'" in notes
        for name, (kind, text, notes, _) in outcomes.items():
            _, expected_kind, expected_text = ERRORS[name]
            assert kind == expected_kind, name
            if kind == "MainProcessError":
                assert "raised on the main rank" in text
                assert expected_text in text, name
            else:
                assert text == expected_text, name
                assert ("in raise_" in notes) == (rank > 0), name


def slow_failure() -> tuple[str, Any, str, float, bool]:
    """The seconds are counted from when the main rank raised."""
    raised_at: list[float] = []

    def work() -> None:
        time.sleep(3.0)  # longer than the process group's timeout
        raised_at.append(time.time())
        a_function_of_the_test()

    began = time.time()
    kind, text, notes, _ = outcome(lambda: run_on_main(work))
    raised = time.time()
    main_raised = comm.broadcast_object(raised_at[0] if raised_at else 0.0)  # main and all other ranks still run
    return kind, text, notes, raised - main_raised, main_raised - began > 2.5


def test_all_ranks_raise_when_main_does_however_long_it_worked() -> None:
    answers = on_ranks(4, slow_failure, init={"timeout_s": 1.0})
    for rank, (kind, text, notes, seconds, waited) in enumerate(answers):
        assert (kind, text) == ("KeyError", "'missing word'")
        assert waited
        assert 0 <= seconds < 20.0  # fast; even on a busy machine far less than the half hour that a process group waits
        assert rank == 0 or "in a_function_of_the_test\n    raise KeyError" in notes


def main_dies() -> str:
    try:
        run_on_main(lambda: os._exit(1))
    except RuntimeError as error:
        return type(error).__name__
    return "nothing was raised"


def test_when_main_dies_at_its_work_nobody_waits_for_it() -> None:
    with pytest.raises(RankError) as caught:
        on_ranks(3, main_dies, timeout_s=30)
    assert "rank 0:\nit died without a word" in str(caught.value)
    assert "no answer" not in str(caught.value)


def patience_after_a_guard() -> timedelta:
    run_on_main(lambda: None)
    patience: timedelta = comm.patient()._get_backend(torch.device("cpu")).options._timeout
    return patience


def test_a_guard_waits_for_years() -> None:
    found = on_ranks(2, patience_after_a_guard, init={"timeout_s": 5.0, "backend": "gloo"})
    assert min(found) > timedelta(days=365)


def slow_work() -> tuple[str, str]:
    """Much slower than the time limit of a collective: for one that only some ranks do, this is allowed."""

    def work() -> str:
        time.sleep(1.2)  # the work itself
        return "done"

    answer = run_on_main(work)
    if comm.rank() == 1:
        wait_for(Path("late").exists, "rank 0 to give up")
    with pytest.raises(CollectiveError) as caught:
        comm.barrier()
    Path("late").touch()
    return answer, str(caught.value)


def test_a_guard_in_shared_memory_waits_longer_than_other_collectives() -> None:
    (answer, first), (other, _) = on_ranks(2, slow_work, init={"timeout_s": 0.5})
    assert (answer, other) == ("done", "done")
    assert first.startswith("Timed out waiting 0.5 s for rank 1 in barrier")


def main_begins_before_the_others_are_ready() -> bool:
    from torch import distributed

    make, ready = distributed.new_group, 0.0

    def slow(**options: Any) -> Any:
        nonlocal ready
        group = make(**options)
        time.sleep(0.5 * comm.rank())  # late on purpose: the main rank must not overtake it
        ready = time.time()
        return group

    distributed.new_group = slow
    began = run_on_main(time.time)
    readies = comm.all_gather_object(ready)
    assert min(readies) > 0
    return began < max(readies)


def test_main_begins_its_work_when_all_are_where_they_can_learn_of_its_death() -> None:
    assert on_ranks(3, main_begins_before_the_others_are_ready, init={"backend": "gloo"}) == [False] * 3


def post_failure(error: str) -> tuple[tuple[str, Any, str, float], Any]:
    def post() -> None:
        if comm.rank() == 2:
            raise_(ERRORS[error][0]())

    failed = outcome(lambda: run_on_main(lambda: "v", post_func=post))
    return failed, run_on_main(lambda: "still works", post_func=post_nothing, run_post_on_main=True)


def post_nothing() -> None:
    comm.barrier()  # inside a guarded function, a rank is alone
    assert comm.all_gather_object(comm.rank()) == [comm.rank()]
    assert run_on_main(comm.rank) == comm.rank()


@pytest.mark.parametrize("error", ["OSError", "with a lock", "SystemExit"])
def test_a_post_func_that_raises_on_one_rank_raises_on_all(error: str) -> None:
    _, kind, text = ERRORS[error]
    for rank, (failed, after) in enumerate(on_ranks(4, post_failure, error)):
        assert after == "still works"
        assert failed[0] == kind
        assert text in failed[1]
        assert failed[3] < 2.0
        assert rank == 2 or "raised on rank 2" in failed[1] + failed[2]


class OnlyOnMain:
    """A value that no other rank can unpickle."""

    def __reduce__(self) -> Any:
        return read_on_main, ()


def read_on_main() -> str:
    if comm.rank() != 0:
        raise ImportError("only main has it")
    return "read"


def unreadable_value() -> tuple[tuple[str, Any, str, float], Any]:
    return outcome(lambda: run_on_main(OnlyOnMain)), run_on_main(lambda: "still works")


def test_a_value_that_a_rank_cannot_unpickle_is_an_error_on_every_rank() -> None:
    for (kind, text, _, _), after in on_ranks(3, unreadable_value):
        assert kind == "MainProcessError"
        assert "rank 1 cannot unpickle" in text
        assert "only main has it" in text
        assert after == "still works"


def unpicklable_value() -> tuple[tuple[str, Any, str, float], Any]:
    return outcome(lambda: run_on_main(threading.Lock)), run_on_main(lambda: "still works")


def test_a_value_that_cannot_be_pickled_is_an_error_on_every_rank() -> None:
    for (kind, text, _, _), after in on_ranks(2, unpicklable_value):
        assert kind == "MainProcessError"
        assert "cannot be pickled" in text
        assert "lock" in text
        assert after == "still works"


def nested() -> list[Any]:
    calls: list[str] = []

    @main_process_only
    def inner(word: str) -> str:
        calls.append(f"inner {word}")
        return word.upper()

    @main_process_only
    def outer() -> str:
        """Its doc."""
        calls.append("outer")
        return inner("a") + run_on_main(inner, ["b"], post_func=calls.append, post_args=["post"])

    @main_process_only
    def failing() -> str:
        return run_on_main(raise_, [LookupError("deep")])

    results = [outer(), outer.__name__, outer.__doc__, outcome(failing)[:2], outer(), calls]
    comm.barrier()
    return results


def test_a_guard_within_a_guarded_function_runs_on_main_alone() -> None:
    once = ["outer", "inner a", "inner b"]
    for n in (1, 2):
        for rank, answer in enumerate(on_ranks(n, nested)):
            assert answer[:5] == ["AB", "outer", "Its doc.", ("LookupError", "deep"), "AB"]
            assert answer[5] == (once * 2 if rank == 0 else [])


def evaluated_in_a_guard() -> list[str]:
    said = []
    loader = Loader(list(range(8)), global_batch_size=4, max_epochs=1)
    for work in (lambda: list(loader), lambda: Evaluate(loader, lambda *_: {"n": (1, 1)}).figures(torch.nn.Linear(1, 1))):
        try:
            run_on_main(work)
        except ConfigError as error:
            said.append(str(error))
    run_on_main(lambda: list(Loader([1.0], global_batch_size=1, max_epochs=1).at(ONE)))  # all of it
    return said


def test_a_loader_in_a_guard_is_an_error_and_not_a_part_of_the_data() -> None:
    for said in on_ranks(2, evaluated_in_a_guard):
        assert len(said) == 2
        for text in said:
            assert text.startswith(
                "a Loader gives each rank its own part of the data, and inside a guard such as run_on_main only"
            )


def test_what_a_rank_raises_alone_is_raised_as_it_is() -> None:
    """Also in a guarded function, on any rank. The error is of a local class, which cannot be pickled."""

    class OwnError(Exception):
        pass

    error = OwnError()
    with pytest.raises(OwnError) as caught, agreed():
        raise error
    assert caught.value is error


def posts() -> dict[str, list[Any]]:
    seen: dict[str, list[Any]] = {"others": [], "all": [], "after_error": []}
    written: list[str] = []
    value = run_on_main(written.append, ["file"], post_func=lambda *a, **k: seen["others"].append((a, k)), post_args=[1],
                        post_kwargs={"b": 2})  # fmt: skip
    assert value is None
    run_on_main(lambda: None, post_func=seen["all"].append, post_args=["x"], run_post_on_main=True)
    outcome(lambda: run_on_main(raise_, [ValueError()], post_func=seen["after_error"].append, post_args=["never"]))
    comm.barrier()
    return seen


@pytest.mark.parametrize("n", [1, 3])
def test_post_func_runs_on_the_others_and_on_main_if_asked(n: int) -> None:
    for rank, seen in enumerate(on_ranks(n, posts)):
        assert seen["others"] == ([] if rank == 0 else [((1,), {"b": 2})])
        assert seen["all"] == ["x"]
        assert seen["after_error"] == []


def test_on_a_single_process_the_exception_is_the_very_one_that_was_raised() -> None:
    error = unpicklable_error()
    with pytest.raises(ValueError, match="with a lock") as caught:
        run_on_main(raise_, [error])
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    lock = threading.Lock()
    assert run_on_main(lambda: lock) is lock
    assert not isinstance(error, MainProcessError)


# --- once per node

TWO_NODES = [torchrun(rank, 4, 2) for rank in range(4)]
UNEVEN = [{**torchrun(rank, 4, 4), "GROUP_RANK": "01"[rank > 2], "LOCAL_RANK": "0120"[rank]} for rank in range(4)]
BY_NODE = [openmpi(rank, 4, rank // 2, 2) for rank in range(4)]
"""mpirun --map-by node: no node rank, and here only one host name: the local ranks distinguish the nodes."""


def node_values() -> dict[str, Any]:
    calls: list[str] = []
    post: list[str] = []

    @once_per_node
    def unpack(word: str, *, times: int = 1) -> str:
        """Its doc."""
        calls.append(word)
        return f"{word * times} of rank {comm.rank()}"

    answers = {
        "value": unpack("a", times=2),
        "again": run_once_per_node(unpack, ["b"], {"times": 1}, post.append, ["p"], {}),
        "post on all": run_once_per_node(lambda: None, post_func=post.append, post_args=["q"], run_post_on_main=True),
        "big": sum(run_once_per_node(lambda: [comm.rank()] * 100_000)) // 100_000,
        "name": (unpack.__name__, unpack.__doc__),
        "in main": run_on_main(lambda: unpack("c")),
        "main in it": run_once_per_node(lambda: run_on_main(lambda: comm.rank())),
        "calls": calls,
        "post": post,
        "nodes": comm.nodes(),
    }
    comm.barrier()
    return answers


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [
        ([{}], [[0]]),
        ([torchrun(rank, 3, 3) for rank in range(3)], [[0, 1, 2]]),
        (TWO_NODES, [[0, 1], [2, 3]]),
        (UNEVEN, [[0, 1, 2], [3]]),
        (BY_NODE, [[0, 2], [1, 3]]),
    ],
)
def test_the_first_rank_of_each_node_works_and_the_node_has_its_value(
    environ: list[dict[str, str]], nodes: list[list[int]]
) -> None:
    for rank, answer in enumerate(on_ranks(len(environ), node_values, environ=environ)):
        first = next(node[0] for node in nodes if rank in node)
        assert answer["nodes"] == nodes
        assert answer["value"] == f"aa of rank {first}"
        assert answer["again"] == f"b of rank {first}"
        assert answer["big"] == first
        assert answer["name"] == ("unpack", "Its doc.")
        assert answer["in main"] == "c of rank 0"
        assert answer["main in it"] == first
        assert answer["calls"] == (["a", "b"] if rank == first else []) + (["c"] if rank == 0 else [])
        assert answer["post"] == (["q"] if rank == first else ["p", "q"])


def prepared(folders: list[Path]) -> tuple[int, str]:
    """(what the work returned, what this rank finds)."""
    mine = folders[comm.rank()]

    def prepare() -> int:
        mine.mkdir(parents=True, exist_ok=True)
        with (mine / "corpus").open("a") as file:
            file.write(f"by rank {comm.rank()}\n")
        return comm.rank()

    by = run_once_per_node(prepare, if_not_shared=mine / "corpus")
    comm.barrier()
    return by, (mine / "corpus").read_text()


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    ("names", "by"),
    [
        (("one", "one", "two", "two"), [0, 0, 2, 2]),
        (("one", "one", "one", "one"), [0, 0, 0, 0]),
    ],
    ids=["each its own", "one for all"],
)
def test_nodes_that_share_a_place_prepare_it_once(
    tmp_path: Path, names: tuple[str, ...], by: list[int], is_there: bool
) -> None:
    folders = [tmp_path / name / "data" for name in names]
    for folder in folders:
        (folder if is_there else folder.parent).mkdir(parents=True, exist_ok=True)
    found = on_ranks(4, prepared, folders, environ=TWO_NODES)
    assert [answer[0] for answer in found] == by
    assert [answer[1] for answer in found] == [f"by rank {first}\n" for first in by]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["corpus"] * len(set(by))


def test_a_place_where_no_file_can_be_is_each_nodes_own() -> None:
    place = "/proc/nothing"
    answers = on_ranks(4, run_once_per_node, comm.rank, environ=TWO_NODES, if_not_shared=place)
    assert answers == [0, 0, 2, 2]
    assert run_once_per_node(lambda: 7, if_not_shared=place) == 7


def node_errors() -> list[tuple[str, Any, str, float]]:
    def fail_on(*ranks: int) -> int:
        if comm.rank() in ranks:
            raise_(OSError(28, f"on rank {comm.rank()}") if comm.rank() == 2 else LookupError(f"on rank {comm.rank()}"))
        return comm.rank()

    outcomes = [
        outcome(lambda: run_once_per_node(fail_on, [2])),
        outcome(lambda: run_once_per_node(fail_on, [0])),
        outcome(lambda: run_once_per_node(fail_on, [0, 2])),
        outcome(lambda: run_once_per_node(fail_on, [1, 3])),  # a rank that does not run the work cannot fail
        outcome(lambda: run_once_per_node(fail_on, post_func=fail_on, post_args=[3])),
        outcome(lambda: run_once_per_node(threading.Lock)),
        outcome(lambda: run_once_per_node(lambda: threading.Lock() if comm.rank() == 2 else 0)),
    ]
    comm.barrier()
    return outcomes


def test_an_exception_on_any_node_ends_on_every_rank_of_every_node() -> None:
    for rank, outcomes in enumerate(on_ranks(4, node_errors, environ=TWO_NODES)):
        kinds = ["OSError", "LookupError", "LookupError", "value", "LookupError", "MainProcessError", "MainProcessError"]
        assert [kind for kind, *_ in outcomes] == kinds
        assert outcomes[0][1] == "[Errno 28] on rank 2"
        assert rank == 2 or "raised on rank 2" in outcomes[0][2]
        assert outcomes[2][1] == "on rank 0"  # of two errors, that of the lowest rank
        assert outcomes[3][1] == rank // 2 * 2
        assert outcomes[4][1] == "on rank 3"
        assert "cannot be pickled" in outcomes[6][1]


def in_a_worker() -> tuple[str, Any, str, float]:
    from torch.utils.data import DataLoader

    def collate(samples: list[int]) -> Any:
        return outcome(lambda: run_on_main(lambda: 1))

    (answer,) = DataLoader([0], num_workers=1, collate_fn=collate)  # type: ignore[arg-type]
    comm.barrier()
    return answer


def test_a_guard_in_a_loader_worker_is_an_error_and_no_dead_lock() -> None:
    for kind, text, _, _ in on_ranks(2, in_a_worker):
        assert kind == "WorldError"
        assert "loader worker" in text


@pytest.mark.parametrize("guard", [run_on_main, run_once_per_node])
def test_a_single_process_runs_post_func_only_if_asked_and_nested_too(guard: Callable[..., Any]) -> None:
    seen: list[str] = []
    assert guard(lambda: "v", post_func=seen.append, post_args=["no"]) == "v"
    guard(lambda: guard(lambda: None, post_func=seen.append, post_args=["yes"], run_post_on_main=True))
    assert seen == ["yes"]
