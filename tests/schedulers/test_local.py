"""The scheduler for a machine without one: this machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankwise.run.plan import Host, Plan
from rankwise.schedulers import foreground
from rankwise.schedulers.local import ThisMachine

local = ThisMachine()

GOLDEN = Path(__file__).with_name("golden") / "local.sh"
HOSTILE = 'a b/$(touch x);it\'s "here"'
DEADLINE_S = 120.0


def plan(folder: str) -> Plan:
    return Plan(
        version=2,
        run_id="x",
        run_dir=f"{folder}/runs/`touch y` & *",
        argv=("train.py",),
        interpreter=(sys.executable,),
        cwd=folder,
        name="train",
        on="local",
        nodes=1,
        min_nodes=1,
        hosts=(Host("a", 2), Host("b", 0)),
        node_rank=-1,
        job={"partition": "main"},
        master_addr="",
        nproc=2,
        threads=1,
        fork=True,
        stop_after_s=0.0,
        grace_s=1.0,
        stall_warn_s=120.0,
        check_collectives=False,
        tee="main",
        environment={"CUDA_VISIBLE_DEVICES": "0,2"},
        master_port=0,
        join_timeout_s=300.0,
        node_wait_s=30.0,
        max_restarts=3,
        launcher_pid=0,
    )


def test_the_text_that_starts_a_run_is_the_golden_one() -> None:
    assert local.render(plan(f"/home/{HOSTILE}")) == GOLDEN.read_text().replace("@PYTHON@", shlex.quote(sys.executable))


def test_a_shell_runs_no_part_of_a_hostile_path(tmp_path: Path) -> None:
    """The agent starts in this folder, looks for its plan in exactly this run directory, and finds none."""
    folder = tmp_path / HOSTILE
    folder.mkdir(parents=True)
    asked = plan(str(folder))
    done = subprocess.run(["/bin/sh", "-c", local.render(asked)], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"rankwise: {asked.run_dir}/plan.json: ")
    assert [path.name for path in tmp_path.rglob("*") if path.name in ("x", "y")] == []
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_gone_ends_the_job_before_anything_starts(tmp_path: Path) -> None:
    done = subprocess.run(["/bin/sh", "-c", local.render(plan(str(tmp_path / "gone")))], capture_output=True, text=True)
    assert done.returncode == 2
    assert "rankwise" not in done.stderr


def test_it_takes_what_nobody_else_claims_as_a_single_process() -> None:
    assert local.detect({})
    assert local.detect({"RANK": "1"})
    ranks = local.ranks({"RANK": "1"})
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size, ranks.node_rank) == (0, 1, 0, 1, 0)
    assert ranks.master_addr is None


def ended(job: str) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while local.state({"id": job}).phase != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return True


def test_a_job_runs_in_a_session_of_its_own_until_it_is_cancelled(tmp_path: Path) -> None:
    job_sh = tmp_path / "job.sh"
    job_sh.write_text(f"touch {shlex.quote(str(tmp_path / 'started'))}\nexec sleep 600\n")
    job = local.submit(str(job_sh), {})
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert local.state({"id": job}).phase == "running"
        assert os.getsid(int(job)) == int(job) != os.getsid(0)
        local.cancel({"id": job})
        assert ended(job)  # a zombie has ended
    finally:
        os.kill(int(job), signal.SIGKILL)
        status = os.waitpid(int(job), 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert local.state({"id": job}).phase == "ended"  # so has one that was reaped


def test_a_job_that_is_submitted_is_not_forgotten_with_a_warning(tmp_path: Path) -> None:
    source = "import os; from rankwise.schedulers import LOCAL; os.waitpid(int(LOCAL.submit('/dev/null', {})), 0)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", source], capture_output=True, text=True)
    assert done.stderr == ""


def test_the_text_is_read_by_the_shell_that_its_first_line_names(tmp_path: Path) -> None:
    job_sh = tmp_path / "job.sh"
    for line, shell in (("#!/bin/bash", "bash"), ("#!/bin/bash -e", "bash -e"), ("", "sh")):
        job_sh.write_text(f'{line}\ntr "\\0" " " < /proc/$$/cmdline > {shlex.quote(str(tmp_path / "said"))}\n')
        assert os.waitpid(int(local.submit(str(job_sh), {})), 0)[1] == 0
        assert (tmp_path / "said").read_text() == f"/bin/{shell} {job_sh} "


def test_what_is_bound_to_its_launcher_ends_with_it(tmp_path: Path) -> None:
    job_sh = tmp_path / "job.sh"
    job_sh.write_text("#!/bin/bash\nexec sleep 600\n")
    source = (
        "from rankwise import schedulers\nfrom rankwise.schedulers import foreground\n"
        f"print(foreground.start(schedulers.queue('openmpi'), {str(job_sh)!r}), flush=True)\ninput()"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        job = launcher.stdout.readline().strip()
        assert local.state({"id": job}).phase == "running"
        assert os.getsid(int(job)) == int(job)
        launcher.kill()
    assert ended(job)


def test_words_that_the_locale_does_not_have_reach_the_agent_through_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LC_ALL=C PYTHONUTF8=0 rankwise run --name ü`. From a folder with such letters, Python itself does not start there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text(local.render(plan(str(tmp_path))))
    assert foreground._command(str(tmp_path / "job.sh"))[0] == sys.executable

    def ascii_alone(text: str) -> bytes:
        raise UnicodeEncodeError("ascii", text, 0, 1, "ordinal not in range(128)")

    monkeypatch.setattr(os, "fsencode", ascii_alone)
    assert foreground._command(str(tmp_path / "job.sh")) == ["/bin/sh", str(tmp_path / "job.sh")]
