"""Each test starts in an empty folder, with an environment that knows of no other rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
    "PYTHONUNBUFFERED",  # a line printed by one of several processes on one pipe would come in pieces
)


def pytest_configure() -> None:
    """Who starts the tests by nohup, or behind a shell's back, has them ignore these; what the tests start must not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # passed over here as before; a handler does not survive an exec


def pytest_addoption(parser: pytest.Parser) -> None:
    doses = "of the stress tests: what CI runs, or all that the RESULTS.md in stress/ were taken with"
    parser.addoption("--dose", choices=("small", "whole"), default="small", help=doses)


_CLUSTERS = ("slurm", "sge", "debian_hosts", "hosts", "ssh", "openmpi", "mpich")
"""What says which hosts a test needs: a fixture, or a value of a parameter by which it asks for one."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need the same hosts come after each other, wherever they are: to bring others up takes seconds each time.

    A whole dose of a stress test has no time limit.
    """
    if config.getoption("dose") == "whole":
        for item in items:
            if item.get_closest_marker("stress") is not None:
                item.add_marker(pytest.mark.timeout(0))
    items.sort(key=_cluster)


def _cluster(item: pytest.Item) -> int:
    """In the order of _CLUSTERS; tests that need no hosts come first."""
    if item.get_closest_marker("cluster") is None:
        return -1
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    asked = {*getattr(item, "fixturenames", ()), *(str(getattr(value, "up", value)) for value in values)}
    return next((number for number, name in enumerate(_CLUSTERS) if name in asked), -1)


@pytest.fixture(autouse=True)
def _empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-configuration"))  # not that of whoever runs the tests
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
    """Calls the command as a user does; returns what it printed."""

    def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rankwise", *words], capture_output=True, text=True, timeout=120, **options
        )  # type: ignore[call-overload, no-any-return]

    return run
