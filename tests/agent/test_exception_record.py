"""The record that a rank leaves of an exception."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import launch

from rankwise.agent import exception_record

__all__ = ["launch"]  # a fixture


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


def spec_in(folder: Path) -> dict[str, str]:
    return {"log": str(folder / "rank-0.log"), "exception": str(folder / "exception.json")}


def left_by(error: BaseException, folder: Path) -> dict[str, Any]:
    """The record of a rank that ends with this error."""
    try:
        raise error
    except BaseException as raised:
        exception_record.leave(raised, spec_in(folder))
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


class UnprintableError(Exception):
    def __str__(self) -> str:
        return "code " + self.args[0]  # type: ignore[no-any-return]


def test_an_exception_that_cannot_be_printed_leaves_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = UnprintableError(5)
    error.__notes__ = [UnprintableError(6)]  # type: ignore[list-item]
    record = left_by(error, tmp_path)
    assert (record["type"], record["message"]) == ("UnprintableError", "<exception str() failed>")
    assert record["notes"] == []
    assert record["traceback"] == capsys.readouterr().err
    assert "UnprintableError: <exception str() failed>\n" in record["traceback"]


def test_a_script_that_has_deleted_its_own_module_leaves_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "__main__")
    assert left_by(ValueError("no data"), tmp_path)["message"] == "no data"


@pytest.mark.usefixtures("signals")
def test_a_handler_that_raises_after_the_record_does_not_report_the_exception_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signal.signal(signal.SIGTERM, raise_as_torch_does)
    left_by(InterruptedRecordError(signal.SIGTERM), tmp_path)
    assert capsys.readouterr().err.count("loss is nan") == 1


@pytest.mark.parametrize(
    ("end", "status"), [(SystemExit(3), 3), (SystemExit(), 0), (SystemExit("bad"), 1), (KeyError(), 1), (GeneratorExit(), 1)]
)
def test_a_hook_of_the_script_is_called_once_and_may_choose_the_status(
    end: BaseException, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = []

    def hook(*_: object) -> None:
        called.append(1)
        raise end

    monkeypatch.setattr(sys, "excepthook", hook)
    try:
        raise ValueError("no data")
    except ValueError as error:
        found = exception_record.leave(error, spec_in(tmp_path))
    assert found == status
    assert called == [1]
    assert ("ValueError: no data" in capsys.readouterr().err) == (not isinstance(end, SystemExit))


HOOK = """
import atexit, sys
def hook(kind, error, traceback):
    print("hook", kind.__name__, file=sys.stderr)
    sys.exit(3)
sys.excepthook = hook
atexit.register(print, "at exit", file=sys.stderr)
"""

SILENT = """
import builtins, sys
builtins.print = lambda *words, **options: None
"""

CASES = [
    HOOK + "raise ValueError",
    pytest.param(HOOK + "raise KeyboardInterrupt", marks=pytest.mark.stress),
    "class E(Exception):\n    def __str__(self): return 'code ' + 5\nraise E",
    f"{SILENT}sys.exit('error: no data')",
    f"{SILENT}raise ValueError('no data')",
]


@pytest.mark.parametrize("source", CASES, ids=range(len(CASES)))
def test_a_script_ends_and_prints_as_under_python(source: str, launch) -> None:
    run = launch(source, options=("--nproc", "1"))
    plain = subprocess.run([sys.executable, str(run.folder / "script.py")], stderr=subprocess.PIPE, text=True)
    assert run.wait() == plain.returncode, run.output()
    assert run.run.log(0).read_text() == plain.stderr


class Unprintable:
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (None, 0, ""), (3, 3, ""), (True, 1, ""), (256, 0, ""), (-1, 255, ""), (1 << 70, 255, ""), (-(1 << 70), 255, ""),
        ((1 << 63) - 2, 254, ""), ("no data", 1, "no data\n"), (2.0, 1, "2.0\n"), (Unprintable(), 1, ""),
    ],
)  # fmt: skip
def test_a_status_is_that_of_python(code: object, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exception_record.exit_status(SystemExit(code)) == status
    assert capsys.readouterr().err == said


def test_a_stderr_that_the_script_has_removed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert exception_record.exit_status(SystemExit("no data")) == 1
    assert exception_record.print_exception(ValueError(), "no data", brief=False) is None


SILENCED = """
import os
print("epoch 1: accuracy 0.93")
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # silences a C library
raise ValueError("no data")
"""


def test_what_was_printed_before_is_shown_though_stderr_goes_elsewhere(launch) -> None:
    run = launch(SILENCED, options=("--nproc", "1"))
    assert run.wait() == 1
    assert "epoch 1: accuracy 0.93" in run.output()
    assert run.output().count("ValueError: no data") == 2  # in the traceback, and in the last line


def test_the_log_without_the_exception_is_measured_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank-0.log").write_text("epoch 1\n")
    assert left_by(ValueError(), tmp_path)["log_bytes"] == len("epoch 1\n")
    removed = str(tmp_path / "removed.log")
    assert exception_record._log_bytes(removed) == os.fstat(2).st_size

    def refuse(_: object) -> os.stat_result:
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(exception_record.os, "stat", refuse)
        assert exception_record._log_bytes(removed) == 1 << 62


@pytest.mark.parametrize("limit", [8_192_000_000, -1])
def test_a_rank_without_memory_reports_the_limit_of_its_address_space(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exception_record.resource, "getrlimit", lambda _: (limit, limit))
    said = "at most 8.2 GB of address space per process (ulimit -v)" if limit > 0 else None
    assert left_by(MemoryError(), tmp_path)["shortage"] == said
    assert left_by(RuntimeError("DefaultCPUAllocator: can't allocate memory"), tmp_path)["shortage"] == said
