"""Runs that do not fail and do not continue: the rank that blocks the others is reported with its line."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launched import launch, wait_for

__all__ = ["launch"]  # a fixture

STALL = """
import os, subprocess, sys, threading, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
if rank == 1:
    REASON
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("while True: pass", "rank 1 is at script.py:7 ("),
        pytest.param("time.sleep(600)", "rank 1 is at script.py:7 (idle", marks=pytest.mark.stress(dose="whole")),  # as a lock
        ("sum(range(10**14))", "rank 1 is at script.py:7 ("),
        pytest.param(
            "lock = threading.Lock(); lock.acquire(); lock.acquire()",
            "rank 1 is at script.py:7 (idle",
            marks=pytest.mark.stress,
        ),
        pytest.param("subprocess.run(['sleep', '600'])", "running sleep", marks=pytest.mark.stress),
    ],
    ids=["an endless loop", "a sleep", "a C call that holds the GIL", "a lock", "a subprocess"],
)
@pytest.mark.one_in(2)
def test_the_late_rank_is_named_with_its_line_and_those_that_wait_with_theirs(launch, reason: str, said: str) -> None:
    run = launch(STALL.replace("REASON", reason), options=("--nproc", "2", "--stall-warn", "1"))
    line = wait_for(lambda: [line for line in run.output().splitlines() if "no progress for" in line], "a verdict")[0]
    assert said in line
    assert "rank 0 waits in all_reduce at script.py:8" in line
    assert (run.run.logs / "stall.txt").read_text().count("Current thread") >= 6
    wait_for(lambda: run.process.send_signal(signal.SIGINT) or run.process.poll() is not None, "the second to be obeyed")
    assert run.wait() == 130


OF_WORKERS = """
import os, time, torch, rankwise
class Reads(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if index > 60 and os.environ["RANK"] == "1":
            time.sleep(600)
        return torch.ones(3)
class InOne(Reads):
    draws_nothing = True
    def read_batch(self, indices):
        return torch.stack([self[index] for index in indices])
if __name__ == "__main__":
    rankwise.init()
    for batch in LOADER:
        rankwise.run_on_main(lambda: None)
"""


@pytest.mark.parametrize(
    "loader",
    [
        "rankwise.Loader(Reads(), batch_size=2, num_workers=2)",
        pytest.param("torch.utils.data.DataLoader(Reads(), batch_size=2, num_workers=2)", marks=pytest.mark.stress),
        pytest.param("rankwise.Loader(InOne(), batch_size=2, prefetch_factor=4)", marks=pytest.mark.stress),
    ],
    ids=["ours", "torch's", "a thread"],
)
def test_a_loader_worker_or_thread_that_hangs_is_named_with_its_line(launch, loader: str) -> None:
    run = launch(OF_WORKERS.replace("LOADER", loader), options=("--nproc", "2", "--stall-warn", "1", "--grace", "1"))
    line = wait_for(lambda: [line for line in run.output().splitlines() if "no progress for" in line], "a verdict")[0]
    who = "thread that reads ahead" if "prefetch" in loader else "loader worker"
    assert f"(waiting for its {who}, which is at script.py:8 in __getitem__, idle, " in line
    stacks = (run.run.logs / "stall.txt").read_text()
    assert ("Child process " in stacks) == ("worker" in who)
    assert "line 8 in __getitem__" in stacks
    wait_for(lambda: run.process.send_signal(signal.SIGINT) or run.process.poll() is not None, "the second to be obeyed")
    assert run.wait() == 130


STEADY = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
for step in range(STEPS):
    model(torch.ones(2, 3)).sum().backward()
    time.sleep(LATE if rank == 0 else 0.02)
"""


@pytest.mark.stress
@pytest.mark.parametrize(("steps", "late_s"), [(15, 0.3), (100, 0.1)], ids=["15", "100"])
def test_steps_of_a_script_that_prints_nothing_are_progress_though_one_rank_is_always_late(
    launch, steps: int, late_s: float
) -> None:
    run = launch(
        STEADY.replace("STEPS", str(steps)).replace("LATE", str(late_s)), options=("--nproc", "2", "--stall-warn", "1.5")
    )
    assert run.process.wait(timeout=120) == 0
    assert "no progress" not in run.output()


def test_a_rank_that_raised_and_cannot_exit_fails_when_the_grace_is_over_and_the_run_restarts(launch) -> None:
    run = launch(
        "import os, threading\nif os.environ['RANK'] == os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    threading.Thread(target=threading.Event().wait).start()\n    raise ValueError('loss is nan')",
        options=("--nproc", "2", "--grace", "0.5", "--max-restarts", "1"),
    )
    assert run.wait() == 0
    assert "rank 0 raised ValueError: loss is nan (script.py:4); restarting all ranks, 1 of 1" in run.output()


@pytest.mark.stress
def test_the_traceback_of_a_rank_that_raised_and_cannot_exit_is_shown(launch) -> None:
    run = launch(
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\nraise ValueError('loss is nan')",
        options=("--nproc", "1", "--grace", "0.5"),
    )
    assert run.wait() == 1
    assert run.output().count("ValueError: loss is nan\n") == 1
    assert "rank 0 raised ValueError: loss is nan (script.py:3), on" in run.output()


@pytest.mark.stress
def test_a_rank_that_raised_may_save_at_its_exit_as_long_as_the_grace_is(launch) -> None:
    run = launch(
        "import atexit, pathlib, time\natexit.register(lambda: (time.sleep(2), pathlib.Path('saved').touch()))\n"
        "raise ValueError('loss is nan')",
        options=("--nproc", "1", "--grace", "100"),
    )
    assert run.wait() == 1
    assert (run.folder / "saved").exists()


def test_a_stopped_rank_is_named_long_before_anything_times_out_and_so_is_its_return(launch) -> None:
    run = launch("import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)")
    pid = run.pids()[1]
    os.kill(pid, signal.SIGSTOP)
    wait_for(
        lambda: f"rank 1 is stopped (SIGSTOP); the others wait for it. To continue, type: kill -CONT {pid}" in run.output(),
        "it",
    )
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: "rank 1 runs again after" in run.output(), "its return")
    (run.folder / "go").touch()
    assert run.wait() == 0


def test_a_script_that_is_silent_while_it_computes_is_left_in_peace(launch) -> None:
    run = launch(
        "import time; end = time.time() + 2.2\nwhile time.time() < end: pass", options=("--nproc", "2", "--stall-warn", "1")
    )
    assert run.wait() == 0
    assert "no progress" not in run.output()


def test_a_rank_that_starts_slowly_is_not_ended_by_the_question_for_its_stack(
    launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(2.5)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert launch("print('done')", options=("--nproc", "2", "--stall-warn", "1")).wait() == 0
