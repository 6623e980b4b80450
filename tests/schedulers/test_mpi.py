"""Which mpirun is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankwise.errors import ConfigError
from rankwise.schedulers import mpi


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n", "openmpi"),
        ("mpirun.openmpi (OpenRTE) 4.1.4\n", "openmpi"),
        ("HYDRA build details:\n    Version:                                 4.0.2\n", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307\n", "mpich"),
    ],
)
def test_the_two_are_told_apart_by_what_their_mpirun_says(said: str, name: str) -> None:
    assert mpi.flavour(said) == name


def test_the_mpirun_on_path_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    (tmp_path / "mpirun").write_text('#!/bin/sh\n[ "$*" = --version ] && echo "HYDRA build details:"\n')
    (tmp_path / "mpirun").chmod(0o755)
    assert mpi.installed() == "mpich"


def test_another_mpirun_and_none_are_errors_that_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"`mpirun --version` says 'lam 7', neither Open MPI nor MPICH"):
        mpi.flavour("\nlam 7\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^mpirun: No such file or directory; install Open MPI or MPICH"):
        mpi.installed()
