"""Each test starts in an empty folder, with an environment that knows of no other rank."""

from __future__ import annotations

import os
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
)


@pytest.fixture(autouse=True)
def _empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-configuration"))  # not that of whoever runs the tests
    for name in list(os.environ):
        if name.startswith(_FOREIGN):
            monkeypatch.delenv(name)


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def rankwise() -> Run:
    """Calls the command as a user does; returns what it printed."""

    def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rankwise", *words], capture_output=True, text=True, timeout=120, **options
        )  # type: ignore[call-overload, no-any-return]

    return run
