"""`rankwise status`, `logs` and `cancel` of runs over two hosts, with each way to start their agents."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_runs import GATE, RANKWISE, RUN, Launched, launch, write
from clusters import hosts, mpich, openmpi, sge, slurm

__all__ = ["hosts", "launch", "mpich", "openmpi", "sge", "slurm"]  # fixtures

pytestmark = pytest.mark.cluster

New = Callable[..., Launched]
SAYS = "import os\nprint('there, rank', os.environ['RANK'], flush=True)\n" + GATE.replace("0.01 * (1 + world.rank)", "0.02")
WORDS = {
    "ssh": ["-H", "node1:1,node2:1"],
    "openmpi": ["--on", "openmpi", "-H", "node1:1,node2:1"],
    "mpich": ["--on", "mpich", "-H", "node1:1,node2:1"],
    "sge": ["--on", "sge", "--pe", "mpi", "--slots", "2", "--wait"],
    "slurm": ["--on", "slurm", "--nodes", "2", "--nproc", "1", "--wait"],
}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def asked(*words: str) -> str:
    return subprocess.run([*RANKWISE, *words], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("on", ["ssh", "openmpi", "mpich", "sge", "slurm"])
def test_a_run_is_told_shown_and_ended_by_its_name(
    on: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue("hosts" if on in ("ssh", "openmpi", "mpich") else on)
    if on in ("openmpi", "mpich"):
        request.getfixturevalue(on)
        own = Path("bin/mpirun").absolute()  # Debian may have either one
        own.parent.mkdir()
        own.write_text(f'#!/bin/sh\nexec mpirun.{on} "$@"\n')
        own.chmod(0o755)
        monkeypatch.setenv("PATH", f"{own.parent}:{os.environ['PATH']}")
    start: New = request.getfixturevalue("launch")
    run = start(*RUN, *WORDS[on], write(SAYS), **AS_ROOT)
    run.at_the_gate()
    told = json.loads(asked("status", "--json", "train"))
    assert (told["alive"], told["lives"][-1]["ranks"], told["failure"]) == (True, 2, None)
    assert (told["job"] or {}).get("scheduler") == (on if on in ("sge", "slurm") else None)
    assert "running for" in asked("status", "train")
    assert asked("logs", "train") == "there, rank 0\n"
    assert asked("logs", "--rank", "1", "train") == "there, rank 1\n"
    asked("cancel", "train")
    _, out = run.wait()
    assert len({path.read_text() for path in Path.cwd().glob("stopped-*")}) == 1, out
    assert run.attempt().outcome.startswith("stopped by SIG"), out
    assert not json.loads(asked("status", "--json", "train"))["alive"]
