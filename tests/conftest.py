"""Each test starts in an empty folder, with an environment in which there are no other ranks."""

from __future__ import annotations

import collections
import functools
import gc
import json
import multiprocessing.forkserver
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from rankwise.host import machine

_BEGAN = time.time()

gc.disable()  # a collection during the imports finds nothing to free, and takes a third of their time

_HAS_GPU = machine.gpus({}) > 0

_FOREIGN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_",
    "SLURM",
    "OMPI_",
    "PMI",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC",
    "RANKWISE_",
    "SUBMITIT",
    "PYTHONUNBUFFERED",  # without it, several processes on one pipe would print parts of lines
)


def pytest_configure() -> None:
    """If the tests are started by nohup or in the background of a shell, these signals are ignored; what the tests start must
    not ignore them."""
    # Tests ask no name server. torch asks for the name of each address that connects, and warns if it finds none.
    os.environ |= {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of Pythons start here, and each would compile all our files
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # ignored here as before; but a handler does not survive an exec


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.enable()
    gc.freeze()  # thousands of tests, torch: nothing that a collection during a test could free


def pytest_addoption(parser: pytest.Parser) -> None:
    doses = "of the stress tests: what CI runs, or all that the RESULTS.md in stress/ were taken with"
    parser.addoption("--dose", choices=("small", "whole"), default="small", help=doses)
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped has failed: CI has all that a test needs")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.config.getoption("no_skips"):
        report.outcome, report.longrepr = "failed", f"skipped, with --no-skips: {report.longrepr}"
    return report


def pytest_xdist_auto_num_workers() -> int:
    """One more than the cores that we may use: a test waits for a fifth of its time. Each worker imports torch, so many more do
    not help."""
    return min(len(os.sched_getaffinity(0)) + 1, 8)


@functools.cache
def _groups() -> IO[str]:
    """Written by the first worker, since only workers collect tests: {test id: group}."""
    return tempfile.NamedTemporaryFile("r", prefix="rankwise-tests-", suffix=".json")


def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput["groups"] = _groups().name


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return _ByHosts(config, log)


class _ByHosts(LoadScopeScheduling):
    """Tests that need the same virtual hosts run in one worker, one after the other; other tests run in any free worker.

    This is `--dist loadgroup`, which in xdist 3.8 does nothing with pytest 9.2.
    """

    @functools.cached_property
    def _group(self) -> dict[str, str]:
        return dict(json.load(_groups()))

    def _split_scope(self, nodeid: str) -> str:
        return self._group.get(nodeid, nodeid)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """xdist keeps what a worker has done, and counts all of it again after each test: for 8000 tests, 15 s of CPU time."""
        test = self.registered_collections[node][item_index]
        scope = self._split_scope(test)
        work = self.assigned_work[node]
        work[scope][test] = True
        if all(work[scope].values()):
            del work[scope]
        self._reschedule(node)


def pytest_unconfigure() -> None:
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]  # waits for it: its CPU time counts


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was skipped and the command for it, and what took how long."""
    if config.option.markexpr in config.getini("addopts"):  # the default tier: the user has chosen no other
        terminalreporter.write_line(
            "left out: real Slurm, Grid Engine, Open MPI, MPICH and ssh hosts (needs root on Debian), stress, and some of the "
            f'cases that take long; to run them, type: {Path(sys.executable)} -m pytest -m "cluster or stress"'
        )
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    wall_s = time.time() - _BEGAN
    cpu_s = sum(use.ru_utime + use.ru_stime for use in used)
    terminalreporter.write_line(f"the tests took {_clock(wall_s)} of wall time and {_clock(cpu_s)} of CPU time")


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


_GROUPS = {
    "slurm": "slurm",
    "slurm_elsewhere": "slurm",
    "sge": "sge",
    "debian_hosts": "hosts",
    "hosts": "hosts",
    "ssh": "hosts",
    "openmpi": "hosts",
    "mpich": "hosts",
}
"""The group of a test, by one of its fixtures or the value of a parameter. The tests of a group run in one worker."""


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need the same hosts run one after the other, wherever they are: to start other hosts takes seconds each time.

    The whole dose of a stress test has no time limit. The small dose excludes tests marked `stress(dose="whole")`, which only
    try more of what other tests have tried. It has a time limit for a test that hangs, not for a slow machine.
    """
    _thin_out(items)
    stress = {item: mark for item in items if (mark := item.get_closest_marker("stress")) is not None}
    if config.getoption("dose") == "whole":
        for item in stress:
            item.add_marker(pytest.mark.timeout(0))
    else:
        left_out = {item for item, mark in stress.items() if mark.kwargs.get("dose") == "whole"}
        for item in stress:
            item.add_marker(pytest.mark.timeout(1200))
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    needs = {item: _needs(item) for item in items}
    items.sort(key=lambda item: [None, *_GROUPS].index(needs[item]))  # tests that need no hosts come first
    worker = getattr(config, "workerinput", {})
    if worker.get("workerid") == "gw0":
        groups = {item.nodeid: _GROUPS[what] for item, what in needs.items() if what is not None}
        Path(worker["groups"]).write_text(json.dumps(groups))


def _thin_out(items: list[pytest.Item]) -> None:
    """Of each test marked `one_in(k)`, leave the first of k cases as it is, and mark the others `stress`.

    The first, so that a case that is asked for by its id is never left out.
    """
    cases = collections.Counter[tuple[object, str]]()
    for item in items:
        if (mark := item.get_closest_marker("one_in")) is None or item.get_closest_marker("stress") is not None:
            continue
        (k,), test = mark.args, (item.parent, item.originalname)  # type: ignore[attr-defined]  # of a Function
        if cases[test] % k != 0:
            item.add_marker("stress")
        cases[test] += 1


def _needs(item: pytest.Item) -> str | None:
    """The key in _GROUPS."""
    if item.get_closest_marker("cluster") is None:
        return None
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    asked = {*getattr(item, "fixturenames", ()), *(str(getattr(value, "up", value)) for value in values)}
    return next((name for name in _GROUPS if name in asked), None)


@pytest.fixture(scope="session")
def _configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not that of the person who runs the tests. Spawned ranks start without torch, whose import takes the time of ten such
    runs. Tests of the fork, or whose script needs torch, ask for it."""
    configuration = tmp_path_factory.mktemp("configuration")
    (configuration / "rankwise.toml").write_text('start-method = "spawn"\n')
    return configuration


@pytest.fixture(autouse=True)
def _empty_place(tmp_path: Path, _configuration: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        if not _HAS_GPU:
            pytest.skip("there is no GPU")
    elif _HAS_GPU:  # these tests are written for a machine without one
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(_configuration))
    # As in an active environment, in which the command is `rankwise`.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name in list(os.environ):
        if name.startswith(_FOREIGN):
            monkeypatch.delenv(name)


@pytest.fixture
def dose(request: pytest.FixtureRequest) -> str:
    """`small` or `whole`."""
    return str(request.config.getoption("dose"))


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def rankwise() -> Run:
    """Calls the command like a user, and returns what it printed."""

    def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rankwise", *words], capture_output=True, text=True, timeout=240, **options
        )  # type: ignore[call-overload, no-any-return]

    return run
