"""What is printed about a run, its logs, and the request to end it: for runs on this machine, and for jobs of a fake Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from launched import Launched, launch, wait_for

from rankwise.errors import RunDirError
from rankwise.launch import status
from rankwise.run.directory import Failure, Job, RunDir, write_json
from rankwise.run.lease import Holder

__all__ = ["launch"]  # a fixture

Run = Callable[..., "subprocess.CompletedProcess[str]"]

WAITS = "import os\nos.environ['X'] = '1'\nprint('rank', os.environ['RANK'], flush=True)\nimport time\nwhile 1: time.sleep(1)\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "runs" / "train")
    found.prepare(fresh=False)
    write_json(found.plan, {})
    return found


@pytest.fixture
def queued(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Turns the run into that of job 12, with the given state in Slurm."""
    run.write_job(Job("slurm", "12", time.time(), "here"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def says(line: str) -> None:
        for name, source in (("scontrol", f"echo '{line}'"), ("scancel", f'echo "$@" >> {tmp_path}/cancelled')):
            (tmp_path / name).write_text(f"#!/bin/sh\n{source}\n")
            (tmp_path / name).chmod(0o755)

    return says


PENDING = "JobState=PENDING Reason=Resources Dependency=(null) ExitCode=0:0"
RUNNING = "JobState=RUNNING Reason=None Dependency=(null) ExitCode=0:0 NodeList=node[1-2]"
FAILED = "JobState=FAILED Reason=NonZeroExitCode Dependency=(null) ExitCode=3:0"


# --- status


def test_a_run_that_waits_in_a_queue_has_not_begun(rankwise: Run, run: RunDir, queued: Callable[[str], None]) -> None:
    queued(PENDING)
    lines = rankwise("status", "train").stdout.splitlines()
    assert lines[0] == f"run        train, in {run.path}"
    assert lines[1].startswith("job        12 of slurm, submitted ")
    assert lines[1].endswith(": PENDING (Resources)")
    assert lines[2:] == ["attempt 1  not started yet"]


def test_a_run_is_told_in_a_line_a_fact_and_as_a_record(rankwise: Run, run: RunDir, queued: Callable[[str], None]) -> None:
    queued(RUNNING)
    attempt = run.begin_attempt(4, ("train.py",))
    run.metrics.write_text('{"life": 1, "step": 50, "loss": 2.5}\n{"life": 1, "step": 100, "loss": 2.25, "lr": 0.1}\n'
                           '{"life": 1, "step": 100, "eval_loss": 2.125}\n')  # fmt: skip
    told = rankwise("status").stdout.splitlines()  # the only run there is
    assert told[1].endswith(": RUNNING on node[1-2]")
    assert told[2].startswith(f"attempt 1  4 ranks, first on {attempt.host}, started ")
    assert ", running for " in told[2]
    assert told[3].startswith("step       100, loss 2.25, lr 0.1, eval_loss 2.125, written ")
    found = json.loads(rankwise("status", "--json", "train").stdout)
    assert (found["alive"], found["job"]["phase"], found["job"]["id"], found["last"]["step"]) == (True, "running", "12", 100)
    queued(FAILED)
    run.update_attempt(attempt, ended=attempt.started + 5, status=3, outcome="rank 1 exited with status 3")
    run.write_failure(Failure(1, "node2", "rank 1 exited with status 3", 3, log="logs/rank-1.log"))
    told = rankwise("status", "train").stdout.splitlines()
    assert told[1].endswith(": FAILED (NonZeroExitCode), exit status 3")
    assert told[2].endswith(", took 5.0 s, exit status 3: rank 1 exited with status 3")
    assert told[4] == "failed     rank 1 exited with status 3, on node2; see logs/rank-1.log"
    assert not json.loads(rankwise("status", "--json", "train").stdout)["alive"]


def test_a_run_whose_scheduler_has_forgotten_it_is_told_from_its_own_record(rankwise: Run, run: RunDir) -> None:
    run.write_job(Job("another", "7", 0.0, "here"))
    run.begin_attempt(1, ("train.py",))
    told = rankwise("status", "train").stdout
    assert ": there is no scheduler another here: neither rankwise nor an installed package" in told
    assert "; it was killed, or its machine went down" in told


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
def test_a_run_that_is_not_there_is_an_error_that_names_those_that_are(verb: str, rankwise: Run, run: RunDir) -> None:
    done = rankwise(verb, "other")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "rankwise: there is no run other; the runs here: train\n"
    assert rankwise(verb, "trian").stderr == "rankwise: there is no run trian; did you mean train?\n"
    Path("folder").mkdir()
    assert rankwise(verb, "folder").stderr.startswith("rankwise: folder is not the folder of a run (no world.json, no plan")
    another = RunDir(run.path.with_name("another"))
    another.prepare(fresh=False)
    write_json(another.plan, {})
    hidden = RunDir(run.path.with_name(".train-node-1"))  # of another node of a run that was started by hand
    hidden.prepare(fresh=False)
    write_json(hidden.plan, {})
    assert rankwise(verb).stderr == f"rankwise: which run? the runs here: another, train; type: rankwise {verb} RUN\n"


def test_a_run_of_this_machine_is_told_and_ended(launch: Callable[..., Launched], rankwise: Run) -> None:
    alive = launch(WAITS)
    alive.pids()
    wait_for(lambda: alive.run.log(1).exists() and "rank 1" in alive.run.log(1).read_text(), "the second rank")
    found = json.loads(rankwise("status", "--json", "script").stdout)
    assert (found["alive"], found["job"], found["writer"]["pid"]) == (True, None, alive.process.pid)
    assert ", running for " in rankwise("status", "script").stdout
    done = rankwise("cancel", "script")
    assert done.stdout == (f"pid {alive.process.pid} is asked to stop: all ranks stop after the current step, and save\n")
    assert alive.wait() != 0
    assert alive.run.attempts()[-1].outcome == "ended by SIGTERM"
    assert not json.loads(rankwise("status", "--json", "script").stdout)["alive"]
    again = rankwise("cancel", "script")
    assert (again.returncode, again.stdout) == (0, "runs/script is not running; its last attempt: ended by SIGTERM\n")


# --- cancel


def test_a_queued_run_is_cancelled_by_its_scheduler(
    rankwise: Run, run: RunDir, queued: Callable[[str], None], tmp_path: Path
) -> None:
    queued(PENDING)
    assert rankwise("cancel", "train").stdout == "job 12 of slurm (PENDING (Resources)) is cancelled\n"
    queued(RUNNING)
    told = rankwise("cancel", "train").stdout
    assert told == "job 12 of slurm (RUNNING on node[1-2]) is cancelled; its ranks save and stop\n"
    assert (tmp_path / "cancelled").read_text() == "12\n12\n"
    queued(FAILED)
    assert rankwise("cancel", "train").stdout == "runs/train is not running; it never started\n"


def test_a_run_of_another_machine_is_ended_there(rankwise: Run, run: RunDir) -> None:
    write_json(run.lease, asdict(Holder("node7", "boot", 1, 1, time.time(), "x")))
    done = rankwise("cancel", "train")
    assert (done.returncode, done.stdout) == (2, "")
    assert "rankwise: runs/train runs on node7 (pid 1), and this is " in done.stderr
    assert done.stderr.endswith("; type on node7: rankwise cancel train\n")


def test_a_run_of_another_user_is_ended_by_that_user(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(run.lease, asdict(Holder.this_process()))
    monkeypatch.setattr(status.processes, "send", lambda *_: False)
    with pytest.raises(RunDirError, match=rf"runs as another user \(pid {os.getpid()}\); type as that user: rankwise cancel "):
        status.cancel(run)


def test_a_writer_elsewhere_that_was_not_heard_of_is_shown_with_since_when(rankwise: Run, run: RunDir) -> None:
    write_json(run.lease, asdict(Holder("node7", "boot", 1, 1, time.time(), "x")))
    assert "no heartbeat" not in rankwise("status", "train").stdout
    os.utime(run.lease, (time.time(), time.time() - 3600))
    assert ", no heartbeat for 1:00:0" in rankwise("status", "train").stdout


# --- logs


def test_logs_are_those_of_rank_0_of_another_or_of_all(rankwise: Run, run: RunDir) -> None:
    run.log(0).write_text("a\nb")
    run.log(1).write_text("c\n")
    run.log(10).write_text("d\n")
    assert rankwise("logs", "train").stdout == "a\nb\n"
    assert rankwise("logs", "--rank", "1").stdout == "c\n"
    assert sorted(rankwise("logs", "--all").stdout.splitlines()) == ["[rank 0] a", "[rank 0] b", "[rank 10] d", "[rank 1] c"]
    missing = rankwise("logs", "--rank", "3")
    assert (missing.returncode, missing.stderr) == (
        2,
        "rankwise: runs/train has no log of rank 3; there are logs of: 0, 1, 10\n",
    )
    assert rankwise("logs", "--rank", "3", "--all").returncode == 2


def test_what_a_job_printed_before_any_rank_began_is_shown(rankwise: Run, run: RunDir, queued: Callable[[str], None]) -> None:
    queued(FAILED)
    assert rankwise("logs", "train").returncode == 2
    run.job_log("12").write_text("srun: error: Unable to create step\n")
    done = rankwise("logs", "train")
    assert done.stdout == "srun: error: Unable to create step\n"
    assert done.stderr == "rankwise: no rank has started yet; this is the output of job 12\n"


def test_a_run_that_has_ended_is_not_waited_for(rankwise: Run, run: RunDir, queued: Callable[[str], None]) -> None:
    queued(FAILED)
    run.log(0).write_text("a\n")
    assert rankwise("logs", "-f", "train").stdout == "a\n"


def test_what_comes_is_shown_until_the_run_has_ended(launch: Callable[..., Launched], tmp_path: Path) -> None:
    source = "import os\nos.environ['X'] = '1'\nimport pathlib, time\nprint('begun', flush=True)\n"
    alive = launch(
        source + "while not pathlib.Path('go').exists(): time.sleep(0.01)\nprint('done')\n", options=("--nproc", "1")
    )
    alive.pids()
    command = [sys.executable, "-m", "rankwise", "logs", "-f", "script"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "begun\n"
        (tmp_path / "go").touch()
        assert following.stdout.read() == "done\n"
    assert following.returncode == 0
    assert alive.wait() == 0


def test_the_logs_of_all_ranks_are_followed_also_of_those_that_begin_later(run: RunDir) -> None:
    lease = run.take()  # it is running
    command = [sys.executable, "-m", "rankwise", "logs", "--all", "-f", "train"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        for rank in (0, 1):
            run.log(rank).write_text("begun\n")
            assert following.stdout.readline() == f"[rank {rank}] begun\n"
        lease.release()
        assert following.stdout.read() == ""
    assert following.returncode == 0
