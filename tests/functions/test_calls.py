"""How a call is sent."""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankwise.errors import ConfigError, FunctionError
from rankwise.functions import calls
from rankwise.ipc import pickles


def train(lr: float = 0.1) -> float:
    return lr


@functools.wraps(train)
def decorated(*args: Any) -> float:
    return train(*args)


class Training:
    def run(self) -> None: ...

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (train, "test_calls.train"),
        (decorated, "test_calls.train"),
        (functools.partial(train, 0.2), "test_calls.train"),
        (Training().run, "test_calls.Training.run"),
        (Training(), "test_calls.Training"),
        (len, "len"),
    ],
)
def test_a_call_has_a_name_and_the_users_file(fn: Callable[..., Any], name: str) -> None:
    assert calls.name_of(fn) == name
    assert calls._file_of(fn) == (None if fn is len else __file__)


def test_in_a_rank_modules_are_found_where_the_caller_finds_them_and_verdicts_name_the_functions_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", ["", "/of/the/caller", *sys.path])
    pickles.write(Path("call"), calls.pack(train, (0.5,), {}))
    monkeypatch.setattr(sys, "path", ["/of/the/rank", *sys.path[2:]])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "worker.py", raising=False)
    fn, args, kwargs = calls.load(Path("call"))
    assert (fn, args, kwargs) == (train, (0.5,), {})
    assert sys.path[:2] == [str(tmp_path), "/of/the/caller"]
    assert sys.path[-1] == "/of/the/rank"
    assert sys.modules["__main__"].__file__ == __file__


def test_the_source_of_a_cell_travels_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "worker.py", raising=False)
    name, source = "<cell 5>", "def cell():\n    return 5\n"
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), found)
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    pickles.write(Path("call"), calls.pack(found["cell"], (), {}))
    del linecache.cache[name]
    fn, _, _ = calls.load(Path("call"))
    assert fn() == 5
    linecache.checkcache()
    assert linecache.getline(name, 2) == "    return 5\n"


def test_what_is_no_call_is_an_error_with_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"^args=0\.1: give .* as a tuple: \(0\.1,\)$"):
        calls.pack(len, 0.1, {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^fn=3: give the function itself"):
        calls.pack(3, (), {})  # type: ignore[arg-type]


def test_a_folder_that_a_host_does_not_see_is_said() -> None:
    with pytest.raises(FunctionError, match="a function needs a run directory that all hosts see"):
        calls.load(Path("elsewhere/call"))


def test_an_answer_is_read_once() -> None:
    path = Path("rank-3")
    pickles.write(path, calls.answer({"loss": 0.5}, 3))
    assert calls.understand(path, 3) == {"loss": 0.5}
    with pytest.raises(FunctionError, match="rank 3 exited without returning anything"):
        calls.understand(path, 3)


def test_an_answer_that_cannot_be_read_here_names_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    pickles.write(Path("rank-1"), calls.answer(Training(), 1))
    monkeypatch.delattr(sys.modules[__name__], "Training")
    with pytest.raises(FunctionError, match="what rank 1 returned cannot be unpickled here: AttributeError"):
        calls.understand(Path("rank-1"), 1)


class OddError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize(("error", "kind"), [(KeyError("x"), KeyError), (OddError(1, 2), FunctionError)])
def test_an_error_keeps_its_type_where_it_survives_a_pickle(error: Exception, kind: type[Exception]) -> None:
    pickles.write(Path("rank-2"), calls.answer_error(error))
    found = calls.understand_error(Path("rank-2"), 2, "node1")
    assert type(found) is kind
    told = str(found) + "".join(getattr(found, "__notes__", ()))
    assert "raised on rank 2, on node1" in told
    assert type(error).__name__ in told
