"""A full disk, simulated by a limit on the size of files: the end of the run is still reported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launched import launch

from rankwise.agent import exception_record
from rankwise.ipc.shared_page import Page

__all__ = ["launch"]  # a fixture

FULL = """
import json, os, resource, sys, time
def started(): return json.load(open("runs/script/world.json"))["lives"][-1]["pids"]
def full(pid): resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
if os.environ["RANK"] == "1":
    while not started(): time.sleep(0.01)  # the last that the agent writes there while they run
    full(os.getppid())
    FAULT
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("full(0); raise OSError(28, 'No space left on device')", 1,
         r"rank 1 raised OSError: \[Errno 28\] No space left on device \(script.py:8\)"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL .often the kernel's out-of-memory killer."),
        ("sys.exit(7)", 7, "rank 1 exited with status 7"),
    ],
    ids=["raises", "killed", "left"],
)  # fmt: skip
@pytest.mark.one_in(3)
def test_the_verdict_is_said_with_the_ranks_status_though_it_cannot_be_recorded(
    rankwise, tmp_path: Path, fault: str, status: int, said: str
) -> None:
    (tmp_path / "script.py").write_text(FULL.replace("FAULT", fault))
    done = rankwise("run", "--nproc", "2", "script.py")
    output = done.stdout + done.stderr
    assert done.returncode == status, output
    assert re.search(rf"^rankwise: {said}, on \S+; its output is in \S+/logs/rank-1.log$", output, re.MULTILINE), output
    path = tmp_path / "runs" / "script" / "failure.json"
    told = f"cannot record the outcome of this attempt: cannot write {path}: File too large"
    assert f"rankwise: {told}; exit status {status}" in output
    assert output.count("Traceback") == (fault.startswith("full"))
    assert "before any rank started" not in output


def test_a_restart_that_the_disk_does_not_take_leaves_the_first_failures_verdict_and_status(rankwise, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FULL.replace("FAULT", "sys.exit(7)"))
    done = rankwise("run", "--nproc", "2", "--max-restarts", "3", "script.py")
    assert done.returncode == 7, done.stderr
    assert "rank 1 exited with status 7; restarting all ranks, 1 of 3" in done.stderr
    assert "the ranks are not restarted: cannot write" in done.stderr


def test_the_status_is_the_ranks_own_though_the_full_disk_has_the_output_of_the_run_too(launch) -> None:
    assert launch(FULL.replace("FAULT", "sys.exit(7)")).wait() == 7


@pytest.mark.parametrize("size", [100, 100_000])
def test_an_exception_that_no_disk_takes_is_left_in_memory_as_far_as_there_is_room(size: int) -> None:
    page = Page.create(2)
    record = {"type": "ValueError", "message": "m" * size, "traceback": "t" * size + "end", "notes": ["n" * size], "time": 1.5}
    assert page.last_words(1) == b""
    exception_record.leave_in_memory(record, page.path, *page.last_words_place(1))
    found = json.loads(page.last_words(1))
    assert (found["type"], found["time"], found["message"][:9]) == ("ValueError", 1.5, "m" * 9)
    assert found["traceback"].endswith("tend")
    assert page.last_words(0) == b""
    page.reset()
    assert page.last_words(1) == b""
