"""The record that a rank leaves of an exception."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankwise.agent import exception_record


@pytest.fixture
def signals() -> Iterator[None]:
    kinds = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(kind) for kind in kinds]
    yield
    for kind, handler in zip(kinds, before, strict=True):
        signal.signal(kind, handler)


class InterruptedRecordError(Exception):
    """Looking at it raises a signal, because a signal may arrive at any line."""

    def __init__(self, signum: int) -> None:
        super().__init__("loss is nan")
        self.signum = signum

    def __str__(self) -> str:
        signal.raise_signal(self.signum)
        return str(self.args[0])


def left_by(error: BaseException, folder: Path) -> dict[str, Any]:
    """The record of a rank that ends with this error."""
    try:
        raise error
    except BaseException as raised:
        exception_record.leave(raised, {"exception": str(folder / "exception.json")})
    return json.loads((folder / "exception.json").read_text())  # type: ignore[no-any-return]


KILLED = "DataLoader worker (pid 5) is killed by signal: Killed. "


def raise_as_torch_does(*_: object) -> None:
    raise RuntimeError(KILLED)


@pytest.mark.usefixtures("signals")
def test_no_handler_of_the_scripts_interrupts_the_record_of_an_exception(tmp_path: Path) -> None:
    signal.signal(signal.SIGCHLD, raise_as_torch_does)
    record = left_by(InterruptedRecordError(signal.SIGCHLD), tmp_path)
    assert record["message"] == "loss is nan"
    assert record["where"].startswith("test_exception_record.py:")


@pytest.mark.usefixtures("signals")
def test_a_signal_that_comes_during_the_record_is_answered_after_it(tmp_path: Path) -> None:
    seen: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: seen.append((tmp_path / "exception.json").exists()))
    left_by(InterruptedRecordError(signal.SIGTERM), tmp_path)
    assert seen == [True]
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(("said", "told"), [(KILLED, KILLED), ("something else", "broken")])
def test_what_a_handler_that_was_due_says_of_a_loader_worker_is_the_reason(
    said: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(*_: object) -> None:
        raise RuntimeError(said)

    look, due = signal.getsignal, [signal.SIGCHLD]

    def look_when_one_is_due(signum: int) -> Any:
        if due:
            signal.raise_signal(due.pop())
        return look(signum)

    signal.signal(signal.SIGCHLD, handler)
    monkeypatch.setattr(exception_record.signal, "getsignal", look_when_one_is_due)
    record = left_by(ConnectionResetError("broken"), tmp_path)
    assert record["message"] == told
    assert record["where"].startswith("test_exception_record.py:")


class Worker:
    """A worker process of a loader. It has exited if `code` is given."""

    sentinel = -1

    def __init__(self, code: int | None) -> None:
        self.pid, self.exitcode = 4711, code
        self.sentinel, self.writer = os.pipe()
        if code is not None:
            os.close(self.writer)

    def join(self, _timeout: float) -> None: ...


def loaded(workers: list[Worker], error: Exception) -> None:
    """Raise the error like a loader with these workers."""

    class Loader:
        def __init__(self) -> None:
            self._workers = workers

    names = {"error": error, "self": Loader()}
    code = "def load(self):\n    raise error\nload(self)"
    exec(compile(code, "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", "exec"), names)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            ConnectionResetError(104, "Connection reset by peer"),
            -9,
            "DataLoader worker (pid 4711) is killed by signal: Killed.",
        ),
        (EOFError(), -11, "DataLoader worker (pid 4711) is killed by signal: Segmentation fault."),
        (ConnectionRefusedError(111, "Connection refused"), 0, "DataLoader worker (pid 4711) exited with status 0."),
        (RuntimeError("DataLoader worker (pid(s) 4711) exited unexpectedly"), -9, "is killed by signal: Killed."),
        (ConnectionResetError(104, "by S3"), None, "[Errno 104] by S3"),
        (ValueError("no data"), -9, "no data"),
    ],
)
def test_a_broken_connection_to_a_loader_worker_is_told_as_that_workers_end(
    error: Exception, code: int | None, said: str, tmp_path: Path
) -> None:
    try:
        loaded([Worker(None), Worker(code)], error)
    except Exception as raised:
        record = left_by(raised, tmp_path)
    assert said in record["message"]


def test_the_innermost_line_of_the_users_own_code_is_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = ("/home/me/rnn.py", "/home/me/engine/core.py", sys.modules["json"].__file__, "/v/site-packages/lib.py", "<string>")
    call: Any = None
    for file in reversed(frames):
        names: dict[str, Any] = {"inner": call, "__name__": "m"}
        body = "    inner()" if call is not None else "    raise ValueError('no data')"
        exec(compile(f"def call():\n{body}", str(file), "exec"), names)
        call = names["call"]
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/home/me/rnn.py", raising=False)
    with pytest.raises(ValueError, match="no data") as raised:
        call()
    assert exception_record._where(raised.value) == "core.py:2"
