"""PBS and LSF, from their manuals: the text of a job, the variables of their processes, scripts instead of their commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from environments import Env, openmpi
from plans import golden, hostile, plan

from rankwise.dist.world import discover
from rankwise.errors import ConfigError, NotJoinedError
from rankwise.run.directory import RunDir, write_json, write_text
from rankwise.schedulers.job import State
from rankwise.schedulers.lsf import Lsf
from rankwise.schedulers.pbs import _MISSING, Pbs

pbs, lsf = Pbs(), Lsf()
QUEUES = {"pbs": pbs, "lsf": lsf}
Run = Callable[..., "subprocess.CompletedProcess[str]"]

ASKED: dict[str, Any] = {
    "gpus_per_node": "4", "cpus_per_task": 32, "mem": "64gb", "time": "10:00:00", "queue": "gpu", "account": "phd",
    "setup": ("module load cuda",),
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "pbs": {**ASKED, "qsub_args": ("-m abe",)},
    "lsf": {**ASKED, "gpus_per_node": "a100:4", "requeue": True, "bsub_args": ("-x",)},
}

# By their manuals: what the script of a job finds, and what a process finds that pbsdsh or blaunch has started.
PBS_SCRIPT: Env = {"PBS_JOBID": "12.head", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_TASKNUM": "1", "PBS_NODENUM": "0"}
PBS_TASK: Env = {**PBS_SCRIPT, "PBS_TASKNUM": "2", "PBS_NODENUM": "1"}
LSF_SCRIPT: Env = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "host1 4", "LSB_JOBINDEX": "0"}
LSF_SEVERAL: Env = {**LSF_SCRIPT, "LSB_MCPU_HOSTS": "host1 4 host2 4"}
LSF_TASK: Env = {**LSF_SEVERAL, "LSF_PM_TASKID": "2"}


@pytest.mark.parametrize("name", QUEUES)
def test_a_job_is_one_text(name: str) -> None:
    assert QUEUES[name].render(plan(job=MORE[name])) == golden(f"{name}.sh")
    assert QUEUES[name].render(plan(nodes=1, min_nodes=1, job={}, nproc=0)) == golden(f"{name}-plain.sh")


@pytest.mark.parametrize("name", QUEUES)
def test_no_folder_and_no_name_means_anything_to_a_shell_or_to_the_queue(name: str) -> None:
    text = QUEUES[name].render(hostile())
    assert text == golden(f"{name}-hostile.sh")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("pbs", {"min_nodes": 1}, "--nodes 1:2: PBS gives a job a fixed number of nodes"),
        ("pbs", {"job": {"gpus_per_node": "a100:4"}}, "--gpus-per-node a100:4: PBS has no names of GPU types"),
        ("pbs", {"job": {"time": "UNLIMITED"}}, "--time UNLIMITED: PBS has no such limit"),
        ("lsf", {"job": {"time": "UNLIMITED"}}, "--time UNLIMITED: LSF has no such limit"),
        ("pbs", {"job": {"time": "x"}}, "--time x: give minutes"),
        ("pbs", {"job": {"queue": "a b"}}, "-q 'a b': PBS takes only letters"),
        ("lsf", {"job": {"account": 'a"b'}}, "-A 'a\"b': LSF takes only letters"),
        ("lsf", {"job": {"bsub_args": ("-x\nrm",)}}, "--bsub-arg"),
    ],
)
def test_what_the_queue_cannot_be_asked_for_is_named(name: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        QUEUES[name].render(plan(**changes))


@pytest.mark.parametrize("name", QUEUES)
def test_the_ranks_stop_before_the_limit(name: str) -> None:
    assert QUEUES[name].stop_after_s({"time": "1:00:00"}, 120.0) == 3480
    assert QUEUES[name].stop_after_s({"time": "2"}, 120.0) == 60
    assert QUEUES[name].stop_after_s({}, 120.0) == 0


# --- which rank this is


@pytest.mark.parametrize(("env", "source"), [(PBS_SCRIPT, "pbs"), (LSF_SCRIPT, "lsf")])
def test_a_job_of_one_host_is_a_single_process(env: Env, source: str) -> None:
    world = discover(env)
    assert (world.source, world.world_size) == (source, 1)
    assert QUEUES[source].allocated(env) == 1


def test_the_hosts_of_a_job_are_counted(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("host1\nhost2\nhost2\n")
    env = {**PBS_SCRIPT, "PBS_NODEFILE": str(tmp_path / "nodes")}
    assert [pbs.allocated(each) for each in (env, {**env, "PBS_NODEFILE": "/nosuch"}, PBS_TASK, {})] == [2, 1, None, None]
    assert [lsf.allocated(each) for each in (LSF_SEVERAL, LSF_TASK, {})] == [2, None, None]
    with pytest.raises(NotJoinedError, match=r"one process of a PBS job of 2 hosts.*rankwise run script.py.*allow_independent"):
        discover(env)


@pytest.mark.parametrize("env", [PBS_TASK, LSF_TASK, LSF_SEVERAL, {**PBS_SCRIPT, "PBS_NUM_NODES": "2"}], ids=str)
def test_a_process_that_would_train_alone_is_refused_and_an_mpirun_within_is_believed_first(env: Env) -> None:
    with pytest.raises(NotJoinedError, match=r"^[A-Z_]+=.*: .*train alone; .*rankwise run -H HOST1,HOST2.*allow_independent"):
        discover(env)
    assert discover({**env, **openmpi(2, 3, 0, 1)}).rank == 2


def test_a_launcher_is_not_started_in_each_of_them(rankwise: Run) -> None:
    Path("train.py").write_text("print('trained')\n")
    for env in (PBS_TASK, LSF_TASK):
        done = rankwise("run", "--nproc", "1", "train.py", env={"PATH": "/usr/bin", **env})
        assert (done.returncode, done.stdout) == (2, "")
        assert re.search("has started this process, and (PBS|LSF) does not say how many", done.stderr)


# --- the job's text is run here: pbsdsh and blaunch start the given command

TRAIN = """
import os, pathlib, time
print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], os.environ['A'], flush=True)
pathlib.Path('printed-' + os.environ['RANK']).touch()
while len([*pathlib.Path().glob('printed-*')]) < 2:
    time.sleep(0.01)
raise SystemExit(3)
"""
PBSDSH = '#!/bin/sh\n[ "$1" = -n ] || exit 9\nnode=$2; shift 3\nexec env PBS_TASKNUM=$((node + 1)) PBS_NODENUM=$node "$@"\n'
BLAUNCH = '#!/bin/sh\n[ "$1" = host2 ] || exit 9\nshift\nexec env LSF_PM_TASKID=2 "$@"\n'


@pytest.mark.parametrize(
    ("name", "env", "log"), [("pbs", PBS_SCRIPT, "job-12.head.log"), ("lsf", LSF_SEVERAL, "job-7.log")], ids=list(QUEUES)
)
def test_the_agents_of_a_job_find_each_other(name: str, env: Env, log: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for command, text in (("pbsdsh", PBSDSH), ("blaunch", BLAUNCH)):
        write_text(tmp_path / "bin" / command, text, mode=0o755)
    Path("train.py").write_text(TRAIN)
    run = RunDir(tmp_path / "runs a" / "train")
    run.prepare(fresh=False)
    job = {"setup": ("export A=b",)}
    planned = plan(str(tmp_path), "runs a/train", on=name, nproc=1, fork=False, job=job, tee="all")
    write_json(run.plan, planned.record())
    write_text(run.job, QUEUES[name].render(planned), mode=0o755)
    env = {**env, "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", str(run.job)], env=env, capture_output=True, text=True)
    printed = (run.logs / log).read_text()
    assert done.returncode == 3, printed  # the job's status is that of the head
    assert (done.stdout, done.stderr) == ("", "")
    assert "rank 0 of 2 b" in printed
    assert "rank 1 of 2 b" in printed
    assert run.attempts()[-1].ranks == 2


# --- their commands


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A command of the queue that prints this text and exits with this status; its arguments are in `asked`."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def make(name: str, prints: str, status: int = 0, says: str = "") -> None:
        (tmp_path / "printed").write_text(prints)
        text = f"#!/bin/sh\necho {name} \"$@\" >> {tmp_path}/asked\ncat {tmp_path}/printed\necho '{says}' >&2\nexit {status}\n"
        write_text(tmp_path / "bin" / name, text, mode=0o755)

    return make


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (
            {"job_state": "Q", "comment": "Not Running: Not enough free nodes"},
            State("waiting", "Q: Not Running: Not enough free nodes"),
        ),
        ({"job_state": "Q", "comment": "Can Never Run: too few GPUs"}, State("stuck", "Q: Can Never Run: too few GPUs")),
        ({"job_state": "R"}, State("running", "R")),
        ({"job_state": "F", "Exit_status": 0}, State("ended", "F", 0)),
        ({"job_state": "F", "Exit_status": 271}, State("ended", "F", 143)),
        ({"job_state": "F", "Exit_status": -29}, State("ended", "F", 1)),
        ({"job_state": "F"}, State("ended", "F")),
    ],
)
def test_the_state_of_a_job_of_pbs(found: dict[str, Any], state: State, command: Callable[..., None]) -> None:
    command("qstat", json.dumps({"Jobs": {"12.head": found}}))
    assert pbs.state({"id": "12.head"}) == state


@pytest.mark.parametrize(
    ("printed", "state"),
    [
        ("PEND|-|New job is waiting for scheduling;\n", State("waiting", "PEND: New job is waiting for scheduling;")),
        ("RUN|-|-\n", State("running", "RUN")),
        ("DONE|-|-\n", State("ended", "DONE", 0)),
        ("EXIT|143|-\n", State("ended", "EXIT", 143)),
        ("EXIT|-|-\n", State("ended", "EXIT", 1)),
    ],
)
def test_the_state_of_a_job_of_lsf(printed: str, state: State, command: Callable[..., None]) -> None:
    command("bjobs", printed)
    assert lsf.state({"id": "7"}) == state


def test_a_job_that_the_queue_has_forgotten_or_whose_commands_are_not_there_is_not_known(
    command: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setenv("PATH", "/nosuch")
        assert pbs.state({"id": "1"}).reason == f"qstat: No such file or directory; {_MISSING}"
    command("qstat", "", 153, "qstat: Unknown Job Id 1.head")
    command("bjobs", "", 255, "Job <7> is not found")
    assert pbs.state({"id": "1"}) == State("unknown", "qstat: Unknown Job Id 1.head")
    assert lsf.state({"id": "7"}) == State("unknown", "Job <7> is not found")


def test_a_job_is_submitted_and_a_refusal_is_one_line(command: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("the text\n")
    command("qsub", "1234.head\n")
    assert pbs.submit(str(tmp_path / "job.sh"), {}) == "1234.head"
    command("bsub", "Job <1234> is submitted to queue <normal>.\n")
    assert lsf.submit(str(tmp_path / "job.sh"), {}) == "1234"
    command("qsub", "", 1, "qsub: Unknown queue")
    command("bsub", "", 255, "gpu: No such queue. Job not submitted.")
    with pytest.raises(ConfigError, match=r"^PBS refuses the job: qsub: Unknown queue$"):
        pbs.submit(str(tmp_path / "job.sh"), {})
    with pytest.raises(ConfigError, match=r"^LSF refuses the job: gpu: No such queue. Job not submitted.$"):
        lsf.submit(str(tmp_path / "job.sh"), {})


def test_a_job_that_runs_is_asked_to_stop_and_not_killed(command: Callable[..., None], tmp_path: Path) -> None:
    for name in ("qsig", "qdel", "bkill"):
        command(name, "")
    command("qstat", json.dumps({"Jobs": {"12.head": {"job_state": "R"}}}))
    pbs.cancel({"id": "12.head"})
    command("qstat", json.dumps({"Jobs": {"12.head": {"job_state": "Q"}}}))
    pbs.cancel({"id": "12.head"})
    lsf.cancel({"id": "7"})
    asked = [line for line in (tmp_path / "asked").read_text().splitlines() if not line.startswith("qstat")]
    assert asked == ["qsig -s TERM 12.head", "qdel 12.head", "bkill -s TERM 7"]
