"""Functions on a real Slurm of two nodes: by our own launcher, and as tasks of Submitit's executor."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from clusters import PYTHON, Start, slurm

from rankwise.rundir import RunDir

__all__ = ["slurm"]  # a fixture

pytestmark = pytest.mark.cluster

FUNCTIONS = """
import os, time
from pathlib import Path

import torch
import rankwise

def sums():
    world = rankwise.init()
    print("rank", world.rank, flush=True)
    return world.rank, world.node_rank, int(rankwise.all_reduce(torch.tensor(world.rank))), os.environ["SLURM_JOB_ID"] != ""

def fails():
    if rankwise.init().rank == 1:
        raise KeyError("no data")
    rankwise.barrier()

def step(model, batch):
    Path("begun").touch()
    if not Path("signalled").exists():
        time.sleep(0.05)
    return (model(batch[0]) ** 2).sum(), len(batch[0])

def trains():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = rankwise.Trainer(model, optimizer, step, data, global_batch_size=8, max_steps=120, log_every=1)
    return trainer.fit().step, len(trainer.run.lives())
"""

CALLER = """
import functions
import rankwise

print(rankwise.run_function(functions.sums, on="slurm", nodes=2, nproc=1))
try:
    rankwise.run_function(functions.fails, on="slurm", nodes=2, nproc=1)
except KeyError as error:
    print(error, error.__notes__[0].splitlines()[0])
"""

SUBMITTER = """
import submitit
import functions
import rankwise

executor = submitit.SlurmExecutor("jobs")
executor.update_parameters(nodes=2, ntasks_per_node=1, cpus_per_task=1, time=30)
job = executor.submit(rankwise.on_submitit(functions.trains))
print(job.job_id, flush=True)
print(job.results())
"""


def call(slurm: Start, source: str) -> str:
    Path("functions.py").write_text(FUNCTIONS)
    Path("caller.py").write_text(source)
    done = slurm(PYTHON, "caller.py", OMP_NUM_THREADS="1", PYTHONPATH=str(Path.cwd()))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_function_is_queued_and_answers_from_each_node(slurm: Start) -> None:
    printed = call(slurm, CALLER).splitlines()
    assert "rank 0" in printed
    assert "[(0, 0, 1, True), (1, 1, 1, True)]" in printed
    assert printed[-1] == "'no data' raised on rank 1, on node2:"


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
        Path("signalled").touch()
        assert caller.wait(200) == 0, Path("out.txt").read_text()
    finally:
        caller.kill()
        caller.wait()
    assert Path("out.txt").read_text().splitlines()[-1] == "[(120, 2), (120, 2)]"
    steps = [record["step"] for record in RunDir(Path("jobs", f"{job}_run")).read_metrics() if "loss" in record]
    assert steps == list(range(1, 121))  # no gap, no repeat
