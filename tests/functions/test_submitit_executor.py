"""Functions as tasks of Submitit, with its own local executor."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import wait_for

import rankwise
from rankwise import errors
from rankwise.errors import ConfigError
from rankwise.functions import on_submitit, submitit_executor
from rankwise.host import processes
from rankwise.run.directory import RunDir

STEPS = 120


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    submitit = pytest.importorskip("submitit", reason="submitit is not installed (pip install 'rankwise[submitit]')")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{Path(__file__).parents[1]}")  # tasks find this file here
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = submitit.LocalExecutor(tmp_path / "jobs")
    found.update_parameters(tasks_per_node=2, timeout_min=5)
    jobs: list[Any] = []
    submit = found.submit
    found.submit = lambda *args, **kwargs: jobs.append(submit(*args, **kwargs)) or jobs[-1]
    yield found
    for job in jobs:
        job._process.kill() if job._process.poll() is None else None
        job._process.wait()


def trains(folder: str) -> tuple[int, list[int]]:
    """Slow until it gets the signal, so that the signal arrives in the middle."""
    import time

    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)

    def step(model: Any, batch: Any) -> Any:
        if rankwise.rank() == 0:  # before this rank's first step, Submitit's handler gets the signal
            Path(folder, "begun").touch()
        if not Path(folder, "signalled").exists():
            time.sleep(0.05)
        return (model(batch[0]) ** 2).sum(), len(batch[0])

    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    log = rankwise.actions.Log(1)
    trainer = rankwise.Trainer(model, optimizer, step, data, global_batch_size=8, max_steps=STEPS, actions=[log])
    state = trainer.fit()
    return state.step, [len(trainer.run.attempts()), int(trainer.run.path.name.endswith("_run"))]


def sums_ranks_and_fails_on_rank_1(offset: int) -> tuple[int, int, str]:
    import torch

    world = rankwise.init()
    total = int(rankwise.all_reduce(torch.tensor(world.rank + offset)))
    if world.rank == 1:
        raise ValueError(f"no data for {world.rank, total, world.source}")
    return world.rank, total, world.source


@pytest.mark.stress
def test_tasks_of_the_local_executor_are_the_ranks_and_what_one_raises_is_told_as_submitit_does(executor: Any) -> None:
    job = executor.submit(on_submitit(sums_ranks_and_fails_on_rank_1), 10)
    assert job.task(0).result() == (0, 21, "submitit")
    assert "ValueError: no data for (1, 21, 'submitit')" in str(job.exception())


@pytest.mark.stress(dose="whole")  # tests/cluster has it with Slurm, and the default tier tests the result of a stop, below
def test_a_preempted_job_saves_after_one_step_and_goes_on_in_its_next_start(executor: Any, tmp_path: Path) -> None:
    job = executor.submit(on_submitit(trains), str(tmp_path))
    wait_for((tmp_path / "begun").exists, "a step")
    # Like a scheduler, to every task; the local executor's own _interrupt would end its controller.
    for task in processes.children(job._process.pid):
        processes.send(task, signal.SIGUSR2)
    (tmp_path / "signalled").touch()
    assert job.results() == [(STEPS, [2, 1]), (STEPS, [2, 1])]
    run = RunDir(tmp_path / "jobs" / f"{job.job_id}_run")
    steps = [record["step"] for record in run.read_metrics() if "loss" in record]
    assert steps == list(range(1, STEPS + 1))  # no gap, no repeat
    told = job.stderr() + job.stdout()
    assert "Requeued job" in told
    assert "resuming from step" in told


def test_a_stop_for_another_reason_is_no_requeue(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")

    def stopped() -> None:
        stop = rankwise.Stopped(75)
        stop.signum = signal.SIGTERM
        raise stop

    with pytest.raises(rankwise.RankwiseError, match="stopped by SIGTERM after a step, saved"):
        on_submitit(stopped)()


def test_without_submitit_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitit_executor, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rankwise\[submitit\]'"):
        on_submitit(os.getcwd)


def test_an_error_of_on_submitit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bool] = []
    monkeypatch.setattr(errors, "without_traceback", lambda: shown.append(True))
    with pytest.raises(ConfigError, match=r"^on_submitit\(fn='train'\): give a function$"):
        on_submitit("train")  # type: ignore[arg-type]
    assert shown
