"""Slurm's jobs: their text, and the questions to Slurm about them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plans
import pytest
from environments import SLURM_BATCH, SLURM_BATCH_ONE, SLURM_SALLOC, SLURM_STEP, Env

from rankwise.errors import ConfigError
from rankwise.run.plan import Plan
from rankwise.schedulers import slurm_text
from rankwise.schedulers.job import State, limit_s
from rankwise.schedulers.slurm import Slurm

slurm = Slurm()

GOLDEN = Path(__file__).with_name("golden")


def plan(**changes: Any) -> Plan:
    return plans.plan("/home/u", **{"on": "slurm", "nproc": 0, "threads": 0, **changes})


EVERYTHING = {
    "gpus_per_node": "a100:4", "partition": "gpu,long", "time": "1-12:00:00", "nodelist": "node[1-2]", "cpus_per_task": 32,
    "mem": "64G", "account": "phd", "qos": "high", "constraint": "a100|h100", "dependency": "afterok:12",
    "setup": ("module load cuda", "source ~/venv/bin/activate"), "sbatch_args": ("--exclusive", "--comment=a b", "-L x"),
}  # fmt: skip
HOSTILE = "a b/;$(touch x) %j 'it\\'s' \"here\""


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("plain", plan()),
        ("everything", plan(min_nodes=1, max_restarts=3, job=EVERYTHING)),
        (
            "hostile",
            plan(
                nodes=1, min_nodes=1, nproc=2, cwd=f"/home/{HOSTILE}", run_dir=f"/home/{HOSTILE}/runs/;$(touch x)",
                name=";$(touch x)", job={"setup": ('export A="$(date)"; echo `hostname`',), "partition": "a b"},
            ),
        ),
        ("within", plan(nproc=4, run_dir="/home/u/100%", job={"within": True})),
        ("requeue", plan(job={"requeue": True, "time": "20:00:00"})),
        ("array", plan(nodes=1, min_nodes=1, job={"array": "0-7%2"})),
        ("array-pattern", plan(nodes=1, min_nodes=1, run_dir="/home/u/runs/100%", job={"array": "0-7%2"})),
    ],
)  # fmt: skip
def test_the_text_of_a_job_is_the_golden_one(name: str, asked: Plan) -> None:
    path = GOLDEN / f"slurm-{name}.sh"
    assert slurm.render(asked) == path.read_text().replace("@PYTHON@", shlex.quote(sys.executable))
    assert subprocess.run(["bash", "-n", path], capture_output=True).returncode == 0


def test_a_shell_that_runs_a_hostile_job_runs_no_part_of_its_names(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE
    folder.mkdir(parents=True)
    (tmp_path / "srun").write_text('#!/bin/sh\nfor word; do echo "$word"; done')
    (tmp_path / "srun").chmod(0o755)
    text = slurm.render(plan(cwd=str(folder), run_dir=str(folder / "runs/`touch y`"), name="$(touch x)"))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=env)
    assert done.stdout.splitlines()[-1] == str(folder / "runs/`touch y`")
    assert [path.name for path in tmp_path.rglob("*") if path.name in ("x", "y")] == []


@pytest.mark.parametrize("there", [1, 2, 3])
def test_from_min_to_max_nodes_there_is_an_agent_on_each_that_the_job_was_given_and_no_more_than_max(there: int) -> None:
    text = slurm.render(plan(min_nodes=1, cwd="/")).replace("exec srun", "echo")
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env={"SLURM_JOB_NUM_NODES": str(there)})
    counted = min(there, 2)
    assert f"--nodes={counted} --ntasks={counted} --ntasks-per-node=1" in done.stdout


@pytest.mark.parametrize("status", [0, 1, 75])
def test_a_stopped_run_goes_back_into_the_queue_once_it_is_saved_and_only_then(status: int, tmp_path: Path) -> None:
    for name, source in (("srun", f"exit {status}"), ("scontrol", 'echo scontrol "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{source}\n")
        (tmp_path / name).chmod(0o755)
    text = slurm.render(plan(cwd="/", job={"requeue": True}))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (status, "scontrol requeue 12\n" if status == 75 else "")


@pytest.mark.parametrize(
    ("argument", "instead"),
    [("--array=0-3", "--array"), ("-N3", "--nodes"), ("-c 8", "--cpus-per-task"), ("--output=x.log", "--run-dir")],
)
def test_an_option_of_sbatch_that_the_rest_of_the_script_depends_on_is_refused(argument: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"^--sbatch-arg '{argument}': .*; use {instead} instead$"):
        slurm.render(plan(job={"sbatch_args": (argument,)}))


def test_the_first_failure_ends_the_job_only_where_nothing_starts_again_and_no_node_may_be_lost() -> None:
    assert "--kill-on-bad-exit=1" in slurm.render(plan())
    for asked in (plan(max_restarts=1), plan(min_nodes=1)):
        text = slurm.render(asked)
        assert "--kill-on-bad-exit=0 --no-kill" in text
        assert "#SBATCH --no-kill\n" in text


@pytest.mark.parametrize(
    ("asked", "cores"),
    [
        ({"nproc": 4}, 4),
        ({"job": {"gpus_per_node": "a100:8"}}, 8),
        ({"nproc": 2, "job": {"gpus_per_node": "8"}}, 2),
        ({"nproc": 4, "job": {"cpus_per_task": 16}}, 16),
        ({}, None),
    ],
)
def test_each_node_is_asked_for_a_core_a_rank_unless_told_otherwise(asked: dict[str, Any], cores: int | None) -> None:
    text = slurm.render(plan(**asked))
    assert text.count(f"--cpus-per-task={cores}") == (0 if cores is None else 2)
    assert text.count("--cpus-per-task") == (0 if cores is None else 2)


@pytest.mark.parametrize(
    "job",
    [
        {"setup": ("a\nb",)}, {"partition": "a\nb"}, {"sbatch_args": ("exclusive",)}, {"sbatch_args": ("--a=b\n--c",)},
        {"sbatch_args": ("-p a\nrm",)}, {"time": "-5"},
    ],
)  # fmt: skip
def test_a_value_that_is_no_line_of_a_job_is_an_error(job: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        slurm.render(plan(job=job))


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("10", 600), ("10:30", 630), ("20:00:00", 72000), ("1-0", 86400), ("1-2:30", 95400), ("1-2:30:05", 95405),
     ("366-0", 31622400), ("UNLIMITED", None)],
)  # fmt: skip
def test_a_limit_of_time_is_read_as_slurm_reads_it(time: str, seconds: int | None) -> None:
    assert limit_s(time) == seconds


@pytest.mark.parametrize(
    "time", ["-5", "0", "0:0", "99999999999", "infinite", "367-0", "10h", "", "1:2:3:4", "1-", "1-2:3:4:5", " 5", "٣"]
)
def test_a_limit_of_nonsense_is_refused_before_slurm_takes_it_for_eight_thousand_years(time: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--time {re.escape(time)}: give minutes, h:m:s, or d-h:m:s"):
        limit_s(time)


@pytest.mark.parametrize(
    ("time", "grace_s", "lead"), [("20:00:00", 120.0, 150), (None, 60.0, 90), ("4", 120.0, 60), ("UNLIMITED", 1.5, 32)]
)
def test_the_warning_before_the_limit_leaves_the_grace_but_at_most_a_quarter_of_a_short_job(
    time: str | None, grace_s: float, lead: int
) -> None:
    job = {"requeue": True, **({"time": time} if time is not None else {})}
    assert f"#SBATCH --signal=USR1@{lead}\n" in slurm.render(plan(grace_s=grace_s, job=job))


@pytest.mark.parametrize(
    ("array", "tasks"), [("0-3", "0 1 2 3"), ("1,3,5", "1 3 5"), ("3-9:3%2", "3 6 9"), ("7", "7"), ("2,1-3", "1 2 3")]
)
def test_the_tasks_of_an_array(array: str, tasks: str) -> None:
    assert slurm_text.array_tasks(array) == tuple(tasks.split())


@pytest.mark.parametrize("array", ["", "5-1", "a", "0-3%", "0-3%0", "1,,2", "0-1000", "0-999999999", "1-9:0", "-1"])
def test_an_array_of_nonsense_or_of_too_many_is_refused(array: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--array {re.escape(array)}: "):
        slurm_text.array_tasks(array)


# --- where


@pytest.mark.parametrize(
    ("env", "nodes"),
    [(SLURM_SALLOC, 2), (SLURM_BATCH, 2), (SLURM_BATCH_ONE, 1), ({"SLURM_JOB_ID": "1"}, 1), (SLURM_STEP[0], None), ({}, None)],
)
def test_a_shell_of_a_job_holds_its_nodes_and_a_task_of_a_step_holds_none(env: Env, nodes: int | None) -> None:
    assert slurm.allocated(env) == nodes
    assert slurm.attached(env) is (nodes is not None)


# --- questions to Slurm, which is a script here; tests/cluster asks the real one


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Creates a command that prints this, and exits with this status."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def answer(command: str, out: str = "", error: str = "", status: int = 0) -> None:
        path = tmp_path / "bin" / command
        path.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(out)}\necho {shlex.quote(error)} >&2\nexit {status}\n")
        path.chmod(0o755)

    return answer


@pytest.mark.parametrize("out", ["12", "12;cluster"])
def test_a_job_is_known_by_its_number(answers: Callable[..., None], out: str) -> None:
    answers("sbatch", out)
    assert slurm.submit("job.sh", {}) == "12"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "sbatch: error: invalid partition specified: x\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            "Slurm refuses the job: Invalid partition name specified (--partition=x); to list them: sinfo -o %P; "
            "then use --partition NAME",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            "Slurm refuses the job: Requested node configuration is not available (--nodes=2 --gres=gpu:9 --mem=x); ask ",
        ),
        ("sbatch: error: Invalid --mem specification", "Slurm refuses the job: Invalid --mem specification (--mem=x); give"),
        (
            "sbatch: error: QOSMaxSubmitJobPerUserLimit\n"
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size "
            "and/or time limits)",
            "time limits) (--nodes=2); it is more than your account or quality of service allows; your jobs: squeue -u $USER; ",
        ),
        ("sbatch: unrecognized option '--nonsense'\nTry \"sbatch --help\"", "job: unrecognized option '--nonsense'"),
        ("sbatch: error: something new", "Slurm refuses the job: something new"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_with_what_was_asked_and_what_to_type(answers: Callable[..., None], said: str, told: str) -> None:
    Path("job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:9\n#SBATCH --partition=x\n#SBATCH --mem=x\n")
    answers("sbatch", error=said, status=1)
    with pytest.raises(ConfigError) as caught:
        slurm.submit("job.sh", {})
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_slurm_there_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ConfigError, match=r"^sbatch: No such file or directory; type the command on a machine that has Slurm; --dry-run"
    ):
        slurm.submit("job.sh", {})
    assert slurm.state({"id": "12"}).phase == "unknown"
    with pytest.raises(ConfigError, match=r"^scancel: "):
        slurm.cancel({"id": "12"})


def shown(word: str, reason: str = "None", code: str = "0:0", nodes: str = "(null)") -> str:
    return (
        f"JobId=12 JobName=train UserId=u(1) JobState={word} Reason={reason} Dependency=(null) Requeue=1 ExitCode={code} "
        f"RunTime=00:00:01 ReqNodeList=(null) ExcNodeList=(null) NodeList={nodes} BatchHost=node1 NumNodes=1"
    )


@pytest.mark.parametrize(
    ("answer", "phase", "status", "reason"),
    [
        (shown("PENDING", "Resources"), "waiting", None, "PENDING (Resources)"),
        (shown("PENDING"), "waiting", None, "PENDING"),
        (
            shown("PENDING", "PartitionConfig"),
            "stuck",
            None,
            "PENDING (PartitionConfig): the partition does not have or allow that many nodes",
        ),
        (shown("RUNNING", nodes="node[1-2]"), "running", None, "RUNNING on node[1-2]"),
        (shown("COMPLETING", nodes="node1"), "running", None, "COMPLETING on node1"),
        (shown("COMPLETED"), "ended", 0, "COMPLETED"),
        (shown("FAILED", "NonZeroExitCode", "3:0"), "ended", 3, "FAILED (NonZeroExitCode)"),
        (shown("FAILED", "JobLaunchFailure", "0:53"), "ended", 181, "FAILED (JobLaunchFailure)"),
        (shown("CANCELLED", code="0:15"), "ended", 143, "CANCELLED"),
        (shown("CANCELLED"), "ended", 1, "CANCELLED"),
        (shown("TIMEOUT", "TimeLimit"), "ended", 1, "TIMEOUT (TimeLimit)"),
    ],
)
def test_what_became_of_a_job(answers: Callable[..., None], answer: str, phase: str, status: int | None, reason: str) -> None:
    answers("scontrol", answer)
    state = slurm.state({"id": "12"})
    assert (state.phase, state.status) == (phase, status)
    assert state.reason.startswith(reason)


def test_a_job_that_slurm_has_forgotten_is_unknown(answers: Callable[..., None]) -> None:
    answers("scontrol", error="slurm_load_jobs error: Invalid job id specified", status=1)
    assert slurm.state({"id": "12"}) == State("unknown", "Slurm no longer knows it")


def test_a_job_that_cannot_be_cancelled_is_an_error(answers: Callable[..., None]) -> None:
    answers("scancel")
    slurm.cancel({"id": "12"})
    answers("scancel", error="scancel: error: Kill job error on job id 12: Access/permission denied", status=1)
    with pytest.raises(
        ConfigError, match=r"^Slurm did not cancel job 12: Kill job error on job id 12: Access/permission denied$"
    ):
        slurm.cancel({"id": "12"})
