"""Runs submitted to a real Slurm over two virtual hosts: queued, followed, reported, ended, and refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from clusters import PYTHON, Ended, Start, slurm
from launched import left_over

from rankwise.run.directory import RunDir

__all__ = ["slurm"]  # a fixture

pytestmark = pytest.mark.cluster

# It sets a variable before it would import torch, so its ranks start without waiting for this import.
SAYS = "import os\nos.environ['X'] = '1'\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"
# What our StopSignal does, but without waiting for a step.
STOPS = "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
WAITS = SAYS + "import time\nwhile True:\n    time.sleep(0.1)\n"
DEADLINE_S = 60.0


class Cluster:
    """Calls `rankwise` as a user of Slurm does."""

    def __init__(self, start: Start) -> None:
        self.start = start

    def __call__(self, *words: str) -> Ended:
        return self.start(PYTHON, "-m", "rankwise", *words, OMP_NUM_THREADS="1")

    def run(self, source: str, *words: str) -> Ended:
        Path("train.py").write_text(source)
        return self("run", "--on", "slurm", "--nproc", "1", *words, "train.py")

    def status(self, run: str = "train") -> dict:
        told = self("status", "--json", run)
        assert told.returncode == 0, told.stderr
        return json.loads(told.stdout)

    def comes_to(self, phase: str, run: str = "train") -> dict:
        deadline = time.monotonic() + DEADLINE_S
        while (found := self.status(run))["job"]["phase"] != phase:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        return found


@pytest.fixture
def cluster(slurm: Start) -> Cluster:
    return Cluster(slurm)


def jobs() -> list[str]:
    """The jobs that wait or run."""
    command = ["squeue", "-h", "-t", "PENDING,RUNNING,SUSPENDED", "-o", "%i %j %T"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@contextmanager
def in_background(source: str, *words: str, within: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """`rankwise run` with one rank. Its output is in the file `out`."""
    Path("train.py").write_text(source)
    command = [*within, PYTHON, "-m", "rankwise", "run", "--nproc", "1", *words, "train.py"]
    with open("out", "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"})
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def printed(text: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while text not in Path("out").read_text():
        assert time.monotonic() < deadline, Path("out").read_text()
        time.sleep(0.1)


def log_of(run: str, rank: int = 0) -> str:
    return RunDir(Path("runs", run)).log(rank).read_text()


def test_a_run_that_is_waited_for_shows_its_output_and_leaves_the_exit_status_of_its_script(cluster: Cluster) -> None:
    done = cluster.run(SAYS + "raise SystemExit(3)", "--nodes", "1", "--nproc", "2", "--wait")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "rank 0 of 2" in done.stdout
    assert "rankwise: train.py with slurm (--on) on 1 node, 2 ranks each, in runs/train" in done.stderr
    assert " exited with status 3, on node1\n" in done.stderr
    found = cluster.comes_to("ended")
    assert (found["job"]["status"], found["alive"], found["lives"][0]["status"]) == (3, False, 3)
    assert [path.name for path in RunDir(Path("runs/train")).path.glob("lease.json")] == []


def test_a_submitted_run_is_told_followed_and_cancelled_and_is_not_submitted_twice(cluster: Cluster) -> None:
    done = cluster.run(WAITS, "--nodes", "1", "--time", "10")
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()
    assert done.stdout == f"{job_id}\n"
    assert f"rankwise: submitted job {job_id} of slurm: " in done.stderr
    assert "rankwise status train, rankwise logs -f train; to stop it: rankwise cancel train" in done.stderr
    cluster.comes_to("running")
    again = cluster.run(WAITS, "--nodes", "1")
    assert again.returncode == 2
    assert f"the run in runs/train is job {job_id} of slurm, submitted " in again.stderr
    deadline = time.monotonic() + DEADLINE_S
    while "rank 0 of 1" not in cluster("logs", "train").stdout:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    told = cluster("status", "train").stdout
    assert re.search(rf"^job +{job_id} of slurm, submitted ", told, re.MULTILINE)
    assert re.search(r"^process +[0-9]+ on node1, since ", told, re.MULTILINE)
    assert "RUNNING on node1" in told
    ended = cluster("cancel", "train")
    assert ended.returncode == 0
    assert ended.stdout.startswith(f"job {job_id} of slurm (RUNNING on node1) is cancelled; its ranks save and stop")
    found = cluster.comes_to("ended")
    assert found["job"]["reason"].startswith("CANCELLED")
    assert not found["alive"]
    assert cluster("cancel", "train").stdout.startswith("runs/train is not running; ")


def test_waiting_for_a_run_that_somebody_cancels_ends_with_a_failure(cluster: Cluster) -> None:
    with in_background(WAITS, "--on", "slurm", "--wait") as waiting:
        printed("rank 0 of 1")
        assert cluster("cancel", "train").returncode == 0
        assert waiting.wait(DEADLINE_S) not in (0, None)
    assert jobs() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partition", "nowhere"], "Slurm refuses the job: Invalid partition name specified (--partition=nowhere); "),
        (["--gpus-per-node", "9"], "Slurm refuses the job: "),
        (["--time", "-5"], "--time -5: give minutes, h:m:s, or d-h:m:s"),
        (["--time", "99999999999"], "--time 99999999999: give minutes"),
        (["--nodes", "9"], "would never start, and was cancelled: PENDING (Partition"),
        (["--nodelist", "nowhere"], "Slurm refuses the job: Invalid node name specified (--nodelist=nowhere); "),
        (["--mem", "much"], "Slurm refuses the job: "),
        (["--sbatch-arg=--nonsense"], "Slurm refuses the job: "),
    ],
    ids=["partition", "gpus", "negative time", "endless time", "nodes", "node", "memory", "option"],
)
def test_what_cannot_be_had_is_one_clear_line_and_nothing_is_queued(cluster: Cluster, words: list[str], message: str) -> None:
    done = cluster.run(SAYS, *words)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("rankwise: ")
    assert message in last
    assert "Traceback" not in done.stderr
    assert jobs() == []


def test_what_is_asked_for_arrives_word_by_word_and_a_sites_habits_need_not_be_typed(cluster: Cluster) -> None:
    Path("site").mkdir()
    Path("site/rankwise.toml").write_text(
        'on = "slurm"\npartition = "main"\ntime = "0:20:00"\nsbatch_args = ["--begin=now+1hour"]\n'
    )
    Path("train.py").write_text(SAYS)
    words = ["--nproc", "1", "--mem", "200M", "-c", "2", "--gpus-per-node", "1"]
    words += ["--nodelist", "node2", "--sbatch-arg=--comment=a $(touch x) b"]
    command = [PYTHON, "-m", "rankwise", "run", "--nodes", "1"]
    site = str(Path("site").absolute())
    first = cluster.start(*command, "--nproc", "1", "--name", "first", "train.py", XDG_CONFIG_HOME=site)
    assert first.returncode == 0, first.stderr
    words += ["--dependency", f"afterany:{first.stdout.strip()}", "--account", "speech"]
    done = cluster.start(*command, *words, "train.py", XDG_CONFIG_HOME=site)
    assert done.returncode == 0, done.stderr
    shown = cluster.start("scontrol", "-o", "show", "job", done.stdout.strip()).stdout
    assert cluster("cancel", "train").returncode == cluster("cancel", "first").returncode == 0
    assert f" Dependency=afterany:{first.stdout.strip()}(unfulfilled) " in shown
    for fact in (
        "JobName=train",
        "Partition=main",
        "TimeLimit=00:20:00",
        "ReqNodeList=node2",
        "CPUs/Task=2",
        "MinMemoryNode=200M",
        "Account=speech",
    ):
        assert f" {fact} " in f" {shown} ", shown
    assert "Comment=a $(touch x) b " in shown
    assert not Path("x").exists()


def test_nothing_of_a_hostile_name_or_folder_is_run(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "a b %j;$(touch x) 'it\\'s' \"here\""
    folder.mkdir()
    (folder / "train.py").write_text(SAYS)
    words = [PYTHON, "-m", "rankwise", "run", "--on", "slurm", "--nproc", "1", "--wait", "--name", ";$(touch x)", "train.py"]
    done = cluster.start("sh", "-c", f"cd {shlex.quote(str(folder))} && {shlex.join(words)}", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 of 1" in done.stdout
    assert not list(tmp_path.rglob("x"))
    assert (folder / "runs" / ";$(touch x)" / "logs" / "rank-0.log").read_text() == "rank 0 of 1\n"


def test_a_job_array_is_as_many_runs(cluster: Cluster) -> None:
    done = cluster.run(SAYS + "print('task', os.environ['SLURM_ARRAY_TASK_ID'])", "--nodes", "1", "--array", "3-9:3%2")
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()
    for number in ("3", "6", "9"):
        found = cluster.comes_to("ended", f"train-{number}")
        assert found["job"]["id"] == f"{job_id}_{number}"
        assert found["lives"][0]["status"] == 0
        assert log_of(f"train-{number}") == f"rank 0 of 1\ntask {number}\n"


def test_a_task_of_an_array_that_waits_is_told_and_cancelled_by_itself(cluster: Cluster) -> None:
    done = cluster.run(SAYS, "--array", "0-2", "--sbatch-arg=--begin=now+1hour")
    assert done.returncode == 0, done.stderr
    assert "PENDING (BeginTime)" in cluster("status", "train-1").stdout
    assert cluster("cancel", "train-1").stdout == f"job {done.stdout.strip()}_1 of slurm (PENDING (BeginTime)) is cancelled\n"
    assert [cluster.status(f"train-{task}")["alive"] for task in (0, 1, 2)] == [True, False, True]
    for task in (0, 2):
        assert cluster("cancel", f"train-{task}").returncode == 0
    assert jobs() == []


def test_inside_an_allocation_nothing_is_queued(cluster: Cluster) -> None:
    Path("train.py").write_text(SAYS + "import socket\nprint('on', socket.gethostname())")
    words = [PYTHON, "-m", "rankwise", "run", "--nproc", "2", "train.py"]
    done = cluster.start("salloc", "-N1", "-w", "node2", "--ntasks-per-node=2", *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 of 2\non node2\n" in done.stdout
    assert "train.py with slurm (this shell is in one of its jobs) on 1 node, 2 ranks each" in done.stderr
    failed = cluster.start("salloc", "-N1", *words[:-1], "--name", "other", "fail.py", OMP_NUM_THREADS="1")
    assert failed.returncode != 0
    Path("fail.py").write_text(SAYS + "raise ValueError('no')")
    failed = cluster.start("salloc", "-N1", *words[:-1], "--name", "other", "fail.py", OMP_NUM_THREADS="1")
    assert failed.returncode == 1
    assert "raised ValueError: no" in failed.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_in_an_allocation_stops_the_ranks_and_kills_none(cluster: Cluster, signum: int) -> None:
    """srun passes on other signals than these; the ranks get what the launcher got."""
    name, expected = signal.Signals(signum).name, 130 if signum == signal.SIGINT else 75
    stops = STOPS.replace("SIGUSR1", name).replace("75", str(expected))
    with in_background(stops + WAITS, within=("salloc", "-N1")) as salloc:
        printed("rank 0 of 1")
        holder = RunDir(Path("runs/train")).holder()
        assert holder is not None
        os.kill(holder.pid, signum)
        status = salloc.wait(DEADLINE_S)
    assert status == expected, Path("out").read_text()
    assert RunDir(Path("runs/train")).attempts()[-1].outcome == f"stopped by {name} after step 0"
    assert jobs() == []


def test_nothing_goes_on_in_an_allocation_whose_launcher_was_killed(cluster: Cluster) -> None:
    with in_background(WAITS, within=("salloc", "-N1")) as salloc:
        printed("rank 0 of 1")
        run = RunDir(Path("runs/train"))
        holder = run.holder()
        assert holder is not None
        os.kill(holder.pid, signal.SIGKILL)
        salloc.wait(DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while left_over(Path.cwd()):
        assert time.monotonic() < deadline, left_over(Path.cwd())
        time.sleep(0.1)
    assert jobs() == []


def test_in_a_batch_script_of_the_users_own_the_launcher_starts_the_ranks_of_its_job(cluster: Cluster) -> None:
    Path("train.py").write_text(SAYS)
    command = shlex.join([PYTHON, "-m", "rankwise", "run", "--nproc", "2", "train.py"])
    Path("own.sh").write_text(f"#!/bin/bash\n#SBATCH -N1 -c2 -o own.txt\n{command}\n")
    done = cluster.start("sbatch", "--wait", "own.sh", OMP_NUM_THREADS="1")
    assert done.returncode == 0, Path("own.txt").read_text()
    assert "train.py with slurm (this shell is in one of its jobs) on 1 node, 2 ranks each" in Path("own.txt").read_text()
    assert "\nrank 0 of 2\n" in Path("own.txt").read_text()


def test_a_run_that_was_asked_to_stop_before_its_time_is_over_goes_back_into_the_queue_and_on(cluster: Cluster) -> None:
    source = STOPS + SAYS + "import pathlib, time\nfirst = not pathlib.Path('again').exists()\npathlib.Path('again').touch()\n"
    source += "while first:\n    time.sleep(0.1)\nprint('second life', os.environ['SLURM_RESTART_COUNT'])\n"
    with in_background(source, "--on", "slurm", "--requeue", "--time", "10", "--wait") as waiting:
        printed("rank 0 of 1")
        job = RunDir(Path("runs/train")).read_job()
        assert job is not None
        # Slurm itself would send it some seconds before the limit.
        subprocess.run(["scancel", "--signal=USR1", job.id], check=True)
        assert waiting.wait(DEADLINE_S) == 0, Path("out").read_text()
    printed("second life 1")
    assert [attempt.status for attempt in RunDir(Path("runs/train")).attempts()] == [75, 0]
    assert cluster.status()["job"]["reason"] == "COMPLETED"


def test_a_cancelled_run_does_not_go_back_into_the_queue_though_it_stopped_as_asked(cluster: Cluster) -> None:
    source = STOPS.replace("SIGUSR1", "SIGTERM") + WAITS
    with in_background(source, "--on", "slurm", "--requeue", "--wait") as waiting:
        printed("rank 0 of 1")
        assert cluster("cancel", "train").returncode == 0
        assert waiting.wait(DEADLINE_S) not in (0, None)
    assert cluster.status()["job"]["reason"].startswith("CANCELLED")
    assert jobs() == []
