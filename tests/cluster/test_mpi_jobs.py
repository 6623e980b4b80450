"""Starting the agents with the real mpirun of Open MPI and of MPICH: on this host, and over two hosts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from clusters import PYTHON, Start, hosts, mpich, openmpi
from plans import plan

from rankwise.errors import ConfigError
from rankwise.run.directory import RunDir, write_json, write_text
from rankwise.run.plan import Host
from rankwise.schedulers import mpi, queues

__all__ = ["hosts", "mpich", "openmpi"]  # fixtures

pytestmark = pytest.mark.cluster

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
HOSTILE = 'a b$(touch x);it\'s "here" `touch y` & *'


@pytest.fixture(params=["openmpi", "mpich"])
def mpirun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of the MPI that `mpirun` belongs to. Debian may have either one."""
    name = str(request.param)
    request.getfixturevalue(name)
    commands = tmp_path_factory.mktemp("bin")
    (commands / "mpirun").write_text(f'#!/bin/sh\nexec mpirun.{name} "$@"\n')
    (commands / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    for key, value in {**AS_ROOT, "TMPDIR": str(commands)}.items():
        monkeypatch.setenv(key, value)
    return name


def job(on: str, *argv: str, folder: str = "run", **changes: Any) -> RunDir:
    """The run directory of a run whose agents mpirun starts, as the launcher leaves it."""
    run = RunDir(Path(folder).absolute())
    run.prepare(fresh=False)
    values = {"nodes": 1, "min_nodes": 1, "grace_s": 5.0, "stall_warn_s": 0.0, "fork": False, **changes}
    planned = plan(str(Path.cwd()), folder, on=on, argv=argv, interpreter=(PYTHON,), **values)
    write_json(run.plan, planned.record())
    write_text(run.job, queues()[on].render(planned), mode=0o755)
    return run


def run_by(on: str, run: RunDir) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(int(queues()[on].submit(str(run.job), {})), 0)[1])


def test_the_mpirun_on_path_is_known_by_what_it_says(mpirun: str) -> None:
    assert mpi.installed() == mpirun


@pytest.mark.parametrize("folder", ["run", HOSTILE], ids=["plain", "hostile"])
def test_an_agent_runs_its_ranks_below_mpirun_and_their_status_comes_back(mpirun: str, folder: str) -> None:
    Path("train.py").write_text(
        "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])\nsys.exit(4 if os.environ['RANK'] == '1' else 0)\n"
    )
    run = job(mpirun, "train.py", folder=folder)
    assert run_by(mpirun, run) == 4
    assert run.log(0).read_text() == "0 2\n"
    assert not [path for path in Path.cwd().rglob("*") if path.name in ("x", "y")]


def test_to_cancel_is_to_ask_the_agent_which_ends_its_ranks_and_says_so(mpirun: str) -> None:
    os.mkfifo("there")
    Path("train.py").write_text("import os, time\nif os.environ['RANK'] == '0': open('there', 'w').close()\ntime.sleep(600)\n")
    run = job(mpirun, "train.py")
    pid = queues()[mpirun].submit(str(run.job), {})
    try:
        Path("there").read_text()
        queues()[mpirun].cancel({"id": pid})
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(int(pid), 0)[1])
    asked = queues()[mpirun].stop_signals.get(signal.SIGTERM, signal.SIGTERM)
    assert (run.attempts()[-1].outcome, run.attempts()[-1].status) == (f"ended by {asked.name}", 128 + asked)
    # After MPICH's mpirun has forwarded a signal, its status says little: 0, or, one time in six, that of its agents.
    assert status in ((128 + asked,) if mpirun == "openmpi" else (0, 128 + asked))


def test_each_host_gets_one_agent_whatever_its_slots_with_the_folder_and_what_python_needs(
    hosts: Start, mpirun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("agent.py").write_text(
        "import os\nenv = os.environ\nwidth = len(os.sched_getaffinity(0))\n"
        "print(os.uname().nodename, os.getcwd(), env.get('PYTHONPATH'), width)\n"
    )
    run = job(mpirun, "agent.py", nodes=2, min_nodes=2, hosts=(Host("node2", 2), Host("node1", 0)))
    write_text(run.job, run.job.read_text().replace(f"-P -m rankwise.agent {shlex.quote(str(run.path))}", "agent.py"))
    monkeypatch.setenv("PYTHONPATH", "/a b")
    done = subprocess.run(["/bin/sh", run.job], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    cores = len(os.sched_getaffinity(0))
    assert sorted(done.stdout.splitlines()) == [f"{node} {Path.cwd()} /a b {cores}" for node in ("node1", "node2")], done


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is refused")
def test_root_is_told_what_to_type_instead_of_what_open_mpi_says(openmpi: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in AS_ROOT:
        monkeypatch.delenv(name, raising=False)
    run = job("openmpi", "train.py")
    with pytest.raises(
        ConfigError, match=r"put before the command: OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1$"
    ):
        queues()["openmpi"].submit(str(run.job), {})
