"""Measures the coverage of every Python that the tests start, by test. run.py installs it in the measured environment.

A .pth file imports it in each interpreter, even if a test has cleared the environment variables. `tracer.rc` beside it says how
it measures. Ranks exit by os._exit, agents by exec, and the ranks of `on_ranks` are forked from a server that keeps the
variables of the first test: the code below handles each of these. A process that SIGKILL or SIGTERM ends saves nothing.

It is also a plugin of pytest (-p tracer; PYTEST_DONT_REWRITE). It switches the context to each test, and writes into
`tracer.json` how long each test took, and which failed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.machinery
import json
import multiprocessing.spawn
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import coverage

_HERE = Path(__file__).parent
_TEST = "rankwise test"

_current: coverage.Coverage | None = None


def _start() -> None:
    global _current
    _current = coverage.Coverage(config_file=str(_HERE / "tracer.rc"))
    _current.start()
    _switch(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])


def _switch(test: str) -> None:
    if _current is not None and test:
        _current.switch_context(test)


def _save() -> None:
    if _current is not None:
        with contextlib.suppress(Exception):
            _current.stop()
            _current.save()


def _in_child() -> None:
    """The parent saves what it has measured; a child starts empty, with its own file."""
    if _current is not None:
        with contextlib.suppress(Exception):
            _current.stop()
        _start()


def _before(act: Callable[..., object], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return function(*args, **kwargs)

    return wrapper


class _Pause:
    """Stops tracing while a module that is not ours is imported: otherwise this would take most of the time."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._busy:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        origin = (spec and spec.origin) or ""
        ours = not origin.startswith(sys.base_prefix) and "/site-packages/" not in origin
        if spec is None or ours or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            traced = sys.gettrace()
            if traced is None or self._busy:
                return execute(module)
            self._busy = True
            sys.settrace(None)
            try:
                return execute(module)
            finally:
                self._busy = False
                sys.settrace(traced)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _name_the_test() -> None:
    """Pass the current test to a process that multiprocessing starts."""
    prepared, prepare = multiprocessing.spawn.get_preparation_data, multiprocessing.spawn.prepare

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**prepared(name), _TEST: os.environ.get("PYTEST_CURRENT_TEST", "")}

    def prepare_and_switch(data: dict[str, Any]) -> None:
        if test := data.pop(_TEST, ""):
            os.environ["PYTEST_CURRENT_TEST"] = test
            _switch(test.rpartition(" ")[0])
        prepare(data)

    multiprocessing.spawn.get_preparation_data = get_preparation_data  # type: ignore[assignment]
    multiprocessing.spawn.prepare = prepare_and_switch  # type: ignore[assignment]


_seconds: dict[str, float] = {}
_failed: set[str] = set()


def pytest_runtest_logstart(nodeid: str) -> None:
    _switch(nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if report.failed:
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    _HERE.joinpath("tracer.json").write_text(json.dumps({"seconds": _seconds, "failed": sorted(_failed)}))


_start()
atexit.register(_save)
sys.meta_path.insert(0, _Pause())  # type: ignore[arg-type]
os.register_at_fork(after_in_child=_in_child)
os._exit = _before(lambda *_: _save(), os._exit)  # type: ignore[assignment]
os.execv = _before(lambda *_: _current and _current.save(), os.execv)  # type: ignore[assignment]
os.execve = _before(lambda *_: _current and _current.save(), os.execve)
_name_the_test()
