"""`rankwise run --on sge` over the two hosts of a real Grid Engine: numbers, ends, restarts, deleted jobs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from cluster_runs import (
    FOR_EVER,
    GATE,
    LONG_STEPS,
    RUN,
    SUM,
    TELL,
    TORCH,
    TRAIN,
    Launched,
    has_started_again,
    launch,
    samples,
    steps,
    told,
    write,
)
from clusters import Start, sge

__all__ = ["launch", "sge"]  # fixtures

pytestmark = pytest.mark.cluster

New = Callable[..., Launched]
OPTIONS = ["--on", "sge", "--pe", "mpi", "--slots", "3", "--wait"]
QUEUED = [*RUN, *OPTIONS]
WITH_TORCH = [*TORCH, *OPTIONS]


def test_a_queued_run_over_two_hosts_has_a_rank_a_slot(sge: Start, launch: New) -> None:
    status, out = launch(*WITH_TORCH, write(TELL + SUM)).wait()
    assert status == 0, out
    found = list(told().values())
    first, second = found[0][0], found[-1][0]
    assert {first, second} == {"node1", "node2"}
    split = [numbers[0] for numbers in found].count(first)  # Grid Engine chooses which host has two slots
    assert [numbers[1:] for numbers in found] == [
        [str(rank), "3", str(local), str(size), str(node), "2"]
        for rank, (local, size, node) in enumerate(
            [(local, split, 0) for local in range(split)] + [(local, 3 - split, 1) for local in range(3 - split)]
        )
    ]
    assert "rank 0" in out.splitlines()


def test_a_rank_that_dies_by_a_signal_is_named_before_grid_engine_ends_the_job(sge: Start, launch: New) -> None:
    source = f"import os\nif os.environ['RANK'] == '2':\n    os.kill(os.getpid(), {int(signal.SIGSEGV)})\n" + FOR_EVER
    run = launch(*QUEUED, write(source))
    status, out = run.wait()
    assert status == 128 + signal.SIGSEGV, out
    assert run.failure().rank == 2
    assert f"rankwise: {run.failure().summary}, on {run.failure().host}" in out.splitlines()


def test_a_failed_run_starts_again_though_others_are_in_a_long_step(sge: Start, launch: New) -> None:
    has_started_again(launch(*QUEUED, "--max-restarts", "1", write(LONG_STEPS), "1"))


def test_a_starter_that_is_killed_before_its_agent_has_come_is_a_lost_node_and_said_at_once(sge: Start, launch: New) -> None:
    folder = Path("bin").absolute()
    folder.mkdir()
    (folder / "qrsh").write_text(f"#!/bin/sh\ntouch {folder}/called\nkill -9 $$\n")
    (folder / "qrsh").chmod(0o755)
    run = launch(*QUEUED, "--setup", f"export PATH={folder}:$PATH", write(FOR_EVER))
    status, out = run.wait()
    assert status == 1, out
    [line] = [line for line in out.splitlines() if " did not start: " in line]
    assert re.fullmatch(r"rankwise: node 1 \(node[12]\) did not start: qrsh was killed by SIGKILL", line), line
    [log] = run.run.logs.glob("job-*.log")
    assert log.stat().st_mtime - (folder / "called").stat().st_mtime < 5


def test_a_run_that_is_deleted_stops_all_ranks_after_one_step(sge: Start, launch: New) -> None:
    run = launch(*QUEUED, "--requeue", write(GATE))
    run.at_the_gate()
    job = run.run.read_job()
    assert job is not None
    subprocess.run(["qdel", job.id], check=True, capture_output=True)
    _, out = run.wait()
    assert len({path.read_text() for path in run.run.path.parents[1].glob("stopped-*")}) == 1
    assert len(run.run.attempts()) == 1, out  # a deleted job is not queued again
    assert run.attempt().outcome.startswith("stopped by SIGUSR2 after step ")


ALIKE = GATE.replace("0.01 * (1 + world.rank)", "0.02")  # no rank waits for another one


def test_what_grid_engine_sends_to_all_of_a_job_reaches_the_ranks_and_ends_no_agent(sge: Start, launch: New) -> None:
    """In a job of two hosts, a user's own s_rt makes Grid Engine send SIGUSR2, and kill some seconds later: the head acts
    earlier."""
    run = launch(*QUEUED, "-l", "h_rt=80,s_rt=20", write(ALIKE))
    status, out = run.wait()
    assert status == 75, out
    assert len({path.read_text() for path in run.run.path.parents[1].glob("stopped-*")}) == 1
    assert run.attempt().outcome.startswith("stopped by SIG")


def test_a_run_that_must_go_before_its_end_goes_on_in_its_second_attempt(sge: Start, launch: New) -> None:
    run = launch(*WITH_TORCH, "--requeue", write(TRAIN), "60")
    run.until(lambda: len(steps()) > 5, "steps")
    for process in psutil.process_iter():  # Grid Engine does this at s_rt
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "rankwise.agent" in words and str(run.run.path) in words:
            os.kill(process.pid, signal.SIGUSR1)
            break
    status, out = run.wait()
    assert status == 0, out
    assert steps() == list(range(1, 61))
    assert samples() == list(range(240))
    assert [attempt.status for attempt in run.run.attempts()] == [75, 0]


@pytest.mark.stress(dose="whole")  # tests/agent/test_nodes.py stops nodes by the clock
def test_a_training_over_two_hosts_that_comes_to_its_limit_saves_before_and_goes_on_in_its_next_attempt(
    sge: Start, launch: New
) -> None:
    """At s_rt Grid Engine would kill the task on the other host. Each attempt has as much time as the first, half of it for
    training."""
    run = launch(*WITH_TORCH, "-l", "h_rt=40", "--requeue", write(TRAIN), "300")
    run.until(lambda: run.run.world.exists() and len(run.run.attempts()) > 1, "a second life")
    first = run.run.attempts()[0]
    assert {part.host for part in first.parts} == {"node1", "node2"}
    assert (first.status, first.outcome.rpartition(" ")[0]) == (75, "stopped by SIGTERM after step")
    status, out = run.wait()
    assert status == 0, out
    assert steps() == list(range(1, 301))
    assert samples() == list(range(1200))


@pytest.mark.stress(dose="whole")  # as with Slurm, and a deleted run is above
def test_a_training_that_is_deleted_is_saved_after_its_last_step_and_goes_on_when_it_is_typed_again(
    sge: Start, launch: New
) -> None:
    """Every job of ours has -notify: SIGUSR2 arrives before the end."""
    words = [*WITH_TORCH, write(TRAIN), "60"]
    run = launch(*words)
    run.until(lambda: len(steps()) > 5, "steps")
    job = run.run.read_job()
    assert job is not None
    subprocess.run(["qdel", job.id], check=True, capture_output=True)
    run.wait()
    stopped_at = steps()[-1]
    assert (run.attempt().status, run.attempt().outcome) == (75, f"stopped by SIGUSR2 after step {stopped_at}")
    assert max(path.name for path in run.run.checkpoints.glob("step-*")) == f"step-{stopped_at:08d}"
    status, out = launch(*words).wait()
    assert status == 0, out
    assert steps() == list(range(1, 61))
    assert samples() == list(range(240))
