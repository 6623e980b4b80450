"""run_on_main: the value or the exception on every rank, and never a dead-lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from ranks import on_ranks

from rankwise import comm
from rankwise.errors import CheckpointError, MainProcessError
from rankwise.guards import main_process_only, run_on_main


class NeedsTwoError(Exception):
    """Pickles, but cannot be made again: its constructor takes more than its args hold."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def unpicklable_error() -> Exception:
    error = ValueError("with a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


def raise_(error: BaseException) -> None:
    raise error


def outcome(function: Callable[[], Any]) -> tuple[str, Any, str, float]:
    """(type of what was raised or "value", its text or the value, notes, seconds)."""
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


def errors() -> list[tuple[str, Any, str, float]]:
    outcomes = [
        outcome(lambda: run_on_main(a_function_of_the_test)),
        outcome(lambda: run_on_main(raise_, [CheckpointError("disk")])),
        outcome(lambda: run_on_main(raise_, [SystemExit(3)])),
        outcome(lambda: run_on_main(raise_, [KeyboardInterrupt()])),
        outcome(lambda: run_on_main(lambda: raise_(OSError(28, "No space left on device")))),
        outcome(lambda: run_on_main(lambda: raise_(NeedsTwoError(1, 2)))),
        outcome(lambda: run_on_main(lambda: raise_(unpicklable_error()))),
        outcome(lambda: run_on_main(lambda: 7)),  # and the guard works after all that
    ]
    comm.barrier()  # main lives on: nobody was saved by its death
    return outcomes


def test_an_exception_of_main_is_raised_on_every_rank_at_once() -> None:
    kinds = [
        "KeyError",
        "CheckpointError",
        "SystemExit",
        "KeyboardInterrupt",
        "OSError",
        "MainProcessError",
        "MainProcessError",
    ]
    for rank, outcomes in enumerate(on_ranks(3, errors)):
        assert [o[0] for o in outcomes] == [*kinds, "value"]
        assert outcomes[1][1] == "disk"
        assert outcomes[4][1] == "[Errno 28] No space left on device"
        assert outcomes[7][1] == 7
        assert all(seconds < 2.0 for *_, seconds in outcomes)
        assert "NeedsTwoError: 1 and 2" in outcomes[5][1]
        assert "ValueError: with a lock" in outcomes[6][1]
        if rank > 0:
            assert "a_function_of_the_test" in outcomes[0][2]
            assert "KeyError: 'missing word'" in outcomes[0][2]
            assert "raised on the main rank" in outcomes[0][2]


def unpicklable_value() -> tuple[tuple[str, Any, str, float], Any]:
    return outcome(lambda: run_on_main(threading.Lock)), run_on_main(lambda: "still works")


def test_a_value_that_cannot_be_pickled_is_an_error_on_every_rank() -> None:
    for (kind, text, _, seconds), after in on_ranks(2, unpicklable_value):
        assert kind == "MainProcessError"
        assert "cannot be pickled" in text
        assert "lock" in text
        assert seconds < 2.0
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
