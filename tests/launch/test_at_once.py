"""Many runs that start at the same moment on one machine, and two that need the same run directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launched import left_over, wait_for

from rankwise.run.directory import RunDir

RUN = [sys.executable, "-m", "rankwise", "run", "--start-method", "spawn", "--nproc", "2"]

# Rank 0 listens at the run's port, like torch's store, until all runs have theirs. Rank 1 must find its own rank 0 there.
MEET = """
import os, socket, sys, time
run, total = os.environ["TORCHELASTIC_RUN_ID"], int(sys.argv[1])
here = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", here[1]))
        listener.listen()
        open(f"bound-{run}", "w").close()
        connection, _ = listener.accept()
        connection.sendall(run.encode())
        connection.close()
        while sum(name.startswith("bound-") for name in os.listdir()) < total:
            time.sleep(0.05)
else:
    while True:
        try:
            connection = socket.create_connection(here)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    with connection:
        found = connection.recv(100).decode()
    assert found == run, f"{found} instead of {run}"
"""


@pytest.mark.parametrize("runs", [4, pytest.param(20, marks=pytest.mark.stress)])
def test_runs_that_start_at_once_do_not_collide(runs: int) -> None:
    Path("train.py").write_text(MEET)
    started = []
    try:
        for number in range(runs):
            with open(f"out-{number}.txt", "w") as out:
                words = [*RUN, "--name", f"r{number}", "train.py", str(runs)]
                started.append(subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL))
        statuses = [run.wait(timeout=120) for run in started]
    finally:
        for run in started:
            run.kill()
            run.wait()
    assert statuses == [0] * runs, "".join(path.read_text() for path in Path.cwd().glob("out-*"))
    assert {path.name for path in Path("runs").iterdir()} == {f"r{number}" for number in range(runs)}
    assert wait_for(lambda: not left_over(Path.cwd()), "nothing left in ps")


def test_the_second_run_of_a_directory_is_refused_at_once_with_who_holds_it() -> None:
    Path("train.py").write_text("import time\ntime.sleep(600)\n")
    first = subprocess.Popen([*RUN, "train.py"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        run = RunDir(Path("runs/train"))
        wait_for(lambda: run.world.exists() and run.attempts()[-1].pids, "the ranks")
        second = subprocess.run([*RUN, "train.py"], capture_output=True, text=True, timeout=200)
        assert first.poll() is None  # nothing waited for it
    finally:
        first.terminate()
        first.wait()
    assert second.returncode == 2
    assert second.stderr.splitlines()[-1].startswith(f"rankwise: the run in runs/train is still running: pid {first.pid} on ")
    assert second.stderr.splitlines()[-1].endswith(" cancel runs/train")
    assert len(run.attempts()) == 1
