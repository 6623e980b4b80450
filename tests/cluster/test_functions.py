"""Functions on two hosts with our launcher, with each way to start its agents; and as tasks of Submitit's executor on Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from clusters import PYTHON, Start, hosts, openmpi, sge, slurm

from rankwise.run.directory import RunDir

__all__ = ["hosts", "openmpi", "sge", "slurm"]  # fixtures

pytestmark = pytest.mark.cluster

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

FUNCTIONS = """
import os, time
from pathlib import Path

import rankwise

def sums():
    import torch  # here: neither the caller nor `fails` needs it
    world = rankwise.init()
    print("rank", world.rank, flush=True)
    return world.rank, world.node_rank, int(rankwise.all_reduce(torch.tensor(world.rank))), os.uname().nodename

def fails():
    if rankwise.init().rank == 1:
        raise KeyError("no data")
    rankwise.barrier()

def step(model, batch):
    Path("begun").touch()
    if "SLURM_RESTART_COUNT" not in os.environ:  # the first start, which is ended long before its last step
        time.sleep(0.1)
    return (model(batch[0]) ** 2).sum(), len(batch[0])

def trains():
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    log = rankwise.actions.Log(1)
    trainer = rankwise.Trainer(model, optimizer, step, data, global_batch_size=8, max_steps=60, actions=[log])
    return trainer.fit().step, len(trainer.run.attempts())
"""

CALLER = """
import functions
import rankwise

print(rankwise.run_function(functions.sums, **SETTINGS))
try:
    rankwise.run_function(functions.fails, **SETTINGS)
except KeyError as error:
    print(error, error.__notes__[0].splitlines()[0])
"""

SUBMITTER = """
import submitit
import functions
from rankwise.functions import on_submitit

executor = submitit.SlurmExecutor("jobs")
executor.update_parameters(nodes=2, ntasks_per_node=1, cpus_per_task=1, time=30)
job = executor.submit(on_submitit(functions.trains))
print(job.job_id, flush=True)
print(job.results())
"""


def called(start: Start, settings: dict[str, Any], **environ: str) -> list[str]:
    """What CALLER has printed."""
    Path("functions.py").write_text(FUNCTIONS)
    Path("caller.py").write_text(CALLER.replace("SETTINGS", repr(settings)))
    done = start(PYTHON, "caller.py", OMP_NUM_THREADS="1", PYTHONPATH=str(Path.cwd()), **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("on", ["slurm", pytest.param("sge", marks=pytest.mark.stress(dose="whole")), "ssh", "openmpi"])
def test_a_function_answers_from_each_host_or_raises_what_was_raised_there(on: str, request: pytest.FixtureRequest) -> None:
    start: Start = request.getfixturevalue("hosts" if on in ("ssh", "openmpi") else on)
    settings: dict[str, Any] = {
        "slurm": {"on": "slurm", "nodes": 2, "nproc": 1},
        "sge": {"on": "sge", "slots": 2, "pe": "mpi"},
        "ssh": {"hosts": "node1:1,node2:1"},
        "openmpi": {"on": "openmpi", "hosts": "node1:1,node2:1"},
    }[on]
    environ = {name: value for name, value in os.environ.items() if name.startswith("SGE_")}
    if on == "openmpi":
        request.getfixturevalue("openmpi")
        own = Path("bin/mpirun").absolute()  # Debian may have another one as mpirun
        own.parent.mkdir()
        own.write_text('#!/bin/sh\nexec mpirun.openmpi "$@"\n')
        own.chmod(0o755)
        environ = {**AS_ROOT, "PATH": f"{own.parent}:{os.environ['PATH']}"}
    printed = called(start, settings, **environ)
    answers = [line for line in printed if line.startswith("[")]
    hosts = re.findall("node[12]", answers[0])
    assert sorted(hosts) == ["node1", "node2"]
    assert answers == [f"[(0, 0, 1, '{hosts[0]}'), (1, 1, 1, '{hosts[1]}')]"]
    assert "rank 0" in printed
    assert re.fullmatch("'no data' raised on rank 1, on node[12]:", printed[-1])  # the order may vary


def test_a_preempted_job_of_submitit_saves_after_one_step_and_goes_on_when_it_is_requeued(slurm: Start) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed (pip install 'rankwise[submitit]')")
    Path("functions.py").write_text(FUNCTIONS)
    Path("caller.py").write_text(SUBMITTER)
    with open("out.txt", "wb") as out:
        caller = subprocess.Popen([PYTHON, "caller.py"], stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while not Path("begun").exists():
            assert time.monotonic() < deadline, Path("out.txt").read_text()
            time.sleep(0.1)
        job = Path("out.txt").read_text().split()[0]
        subprocess.run(["scancel", f"--signal={signal.SIGUSR2.name[3:]}", job], check=True)
        assert caller.wait(200) == 0, Path("out.txt").read_text()
    finally:
        caller.kill()
        caller.wait()
    assert Path("out.txt").read_text().splitlines()[-1] == "[(60, 2), (60, 2)]"
    steps = [record["step"] for record in RunDir(Path("jobs", f"{job}_run")).read_metrics() if "loss" in record]
    assert steps == list(range(1, 61))  # no gap, no repeat
