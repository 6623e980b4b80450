"""Runs submitted to a queue, with a Slurm made of a few scripts; tests/cluster/test_slurm_jobs.py has the real one."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rankwise.run.directory import Job, RunDir

Run = Callable[..., "subprocess.CompletedProcess[str]"]

SCRIPT = "import os\nos.environ['X'] = '1'\nprint('one of', os.environ['WORLD_SIZE'])\n"


class FakeSlurm:
    """sbatch returns job number 12; scontrol prints the lines in `state` one after the other, the last one forever; scancel is
    recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.says("PENDING Resources")
        here = shlex.quote(str(folder))
        self.command("sbatch", f'cp "$2" {here}/submitted; echo 12')
        self.command("scancel", f'echo "$@" >> {here}/cancelled')
        self.command(
            "scontrol",
            f"cd {here}; read -r word reason code < state; test $(wc -l < state) -gt 1 && sed -i 1d state\n"
            'test "$word" = GONE && { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }\n'
            'echo "JobId=12 JobState=$word Reason=${reason:-None} Dependency=(null) ExitCode=${code:-0:0}"',
        )
        (folder / "env").write_text("")

    def command(self, name: str, source: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{source}\n")
        (self.folder / name).chmod(0o755)

    def says(self, *states: str) -> None:
        (self.folder / "state").write_text("".join(f"{state}\n" for state in states))

    @property
    def cancelled(self) -> str:
        path = self.folder / "cancelled"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    found = FakeSlurm(tmp_path / "slurm-bin")
    monkeypatch.setenv("PATH", f"{found.folder}:{os.environ['PATH']}")
    Path("train.py").write_text(SCRIPT)
    return found


@pytest.mark.parametrize("gpus", ["8", "a100:8"])
def test_how_many_ranks_there_will_be_in_all_is_said(rankwise: Run, gpus: str) -> None:
    Path("train.py").write_text(SCRIPT)
    done = rankwise("run", "--on", "slurm", "--nodes", "2", "--gpus-per-node", gpus, "--dry-run", "train.py")
    assert "on 2 nodes, 8 ranks each (16 in all), in runs/train" in done.stderr


def train() -> RunDir:
    return RunDir(Path("runs/train"))


# --- a dry run


def test_what_a_jobs_script_cannot_hold_is_named_by_the_option_that_was_typed(rankwise: Run) -> None:
    Path("train.py").write_text(SCRIPT)
    words = ["run", "--on", "slurm", "--dry-run"]
    assert rankwise(*words, "--name", "a\nb", "train.py").stderr.startswith("rankwise: --name 'a\\nb': ")
    assert rankwise(*words, "--run-dir", "a\nb", "train.py").stderr.startswith("rankwise: --run-dir ")
    assert sorted(path.name for path in Path().iterdir()) == ["train.py"]


def test_a_dry_run_needs_no_scheduler_prints_the_script_alone_and_leaves_what_a_job_needs(
    rankwise: Run, tmp_path: Path
) -> None:
    Path("train.py").write_text(SCRIPT)
    env = {"PATH": "/nowhere", "HOME": str(tmp_path)}
    words = ["--on", "slurm", "--nodes", "2", "--partition", "gpu", "--dry-run", "train.py", "--lr", "1"]
    done = rankwise("run", *words, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == train().job.read_text()
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=train\n#SBATCH --nodes=2\n")
    assert done.stderr.startswith("rankwise: train.py with slurm (--on) on 2 nodes, one rank per device, in ")
    plan = json.loads(train().plan.read_text())
    assert (plan["on"], plan["nodes"], plan["min_nodes"], plan["nproc"], plan["threads"]) == ("slurm", 2, 2, 0, 0)
    assert (plan["job"], plan["launcher_pid"], plan["argv"]) == ({"partition": "gpu"}, 0, ["train.py", "--lr", "1"])
    assert sorted(path.name for path in train().path.iterdir()) == ["config.json", "job.sh", "logs", "plan.json", "telemetry"]
    assert os.access(train().job, os.X_OK)


def test_a_job_has_the_name_of_the_run_also_if_its_folder_has_another(rankwise: Run) -> None:
    Path("train.py").write_text(SCRIPT)
    done = rankwise("run", "--on", "slurm", "--dry-run", "--name", "sweep", "--run-dir", "out/7", "train.py")
    assert "#SBATCH --job-name=sweep\n" in done.stdout
    assert Path("out/7/job.sh").read_text() == done.stdout


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("-H a:2,b:3", "with ssh (-H names hosts) on 2 nodes (a:2, b:3), 5 ranks in all, in runs/train"),
        (
            "-H a,b,c,d,e",
            "with ssh (-H names hosts) on 5 nodes (a, b, c, d, ...), one rank per device, in runs/train",
        ),
        (
            "--on sge --pe mpi --slots 8",
            "with sge (--on) on the nodes of its 8 slots, one rank per slot, in runs/train",
        ),
        ("--on sge", "with sge (--on) on 1 node, one rank per device, in runs/train"),
    ],
)
def test_the_first_line_says_how_many_ranks_where(words: str, where: str, rankwise: Run) -> None:
    Path("train.py").write_text(SCRIPT)
    assert rankwise("run", *words.split(), "--dry-run", "train.py").stderr == f"rankwise: train.py {where}\n"


def test_a_dry_run_of_this_machine_prints_its_script_too_and_starts_nothing(rankwise: Run) -> None:
    Path("train.py").write_text(SCRIPT)
    done = rankwise("run", "--dry-run", "--nproc", "1", "train.py")
    assert (done.returncode, done.stdout) == (0, train().job.read_text())
    assert not train().world.exists()
    assert json.loads(train().plan.read_text())["launcher_pid"] == 0


@pytest.mark.parametrize(
    ("more", "after_s"), [([], 3480.0), (["--stop-after", "10m"], 600.0), (["--stop-after", "2h"], 3480.0)]
)
def test_a_job_whose_limit_gives_no_notice_of_use_is_stopped_by_its_head_in_time(
    rankwise: Run, more: list[str], after_s: float
) -> None:
    Path("train.py").write_text("")
    words = ["--on", "sge", "--pe", "mpi", "--slots", "4", "-l", "h_rt=1:00:00", *more, "--dry-run", "train.py"]
    done = rankwise("run", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("runs/train/plan.json").read_text())["stop_after_s"] == after_s


def test_a_dry_run_never_moves_an_older_run_aside(rankwise: Run, fake: FakeSlurm) -> None:
    assert rankwise("run", "--nproc", "1", "train.py").returncode == 0
    assert rankwise("run", "--on", "slurm", "--fresh", "--dry-run", "train.py").returncode == 0
    assert [path.name for path in Path("runs").iterdir()] == ["train"]
    assert train().world.exists()


# --- a submission


def test_a_submitted_run_is_known_by_its_job(rankwise: Run, fake: FakeSlurm) -> None:
    done = rankwise("run", "--on", "slurm", "--time", "10", "train.py")
    assert (done.returncode, done.stdout) == (0, "12\n")
    assert done.stderr.splitlines()[1:] == [
        "rankwise: submitted job 12 of slurm: PENDING (Resources)",
        "rankwise: to follow it: rankwise status train, rankwise logs -f train; to stop it: rankwise cancel train",
    ]
    assert (fake.folder / "submitted").read_text() == train().job.read_text()
    job = train().read_job()
    assert job is not None
    assert (job.scheduler, job.id) == ("slurm", "12")
    assert not train().lease.exists()  # the agent takes it
    assert train().code.read_text().startswith("python ")


def test_a_run_whose_job_waits_or_runs_is_neither_submitted_nor_started_again(rankwise: Run, fake: FakeSlurm) -> None:
    assert rankwise("run", "--on", "slurm", "train.py").returncode == 0
    for state in ("PENDING Priority", "RUNNING"):
        fake.says(state)
        for words in (["--on", "slurm"], ["--nproc", "1"], ["--on", "slurm", "--dry-run"], ["--on", "slurm", "--fresh"]):
            again = rankwise("run", *words, "train.py")
            assert (again.returncode, again.stdout) == (2, "")
            assert "rankwise: the run in runs/train is job 12 of slurm, submitted " in again.stderr
            assert "rankwise cancel train; for another run: --name NAME" in again.stderr
    for state in ("COMPLETED", "GONE"):
        fake.says(state)
        assert rankwise("run", "--on", "slurm", "train.py").returncode == 0


def test_a_job_that_would_never_start_is_cancelled_and_is_an_error(rankwise: Run, fake: FakeSlurm) -> None:
    fake.says("PENDING None", "PENDING PartitionConfig")
    done = rankwise("run", "--on", "slurm", "--nodes", "9", "train.py")
    assert (done.returncode, done.stdout, fake.cancelled) == (2, "", "12\n")
    assert "job 12 of slurm would never start, and was cancelled: PENDING (PartitionConfig): " in done.stderr


def test_what_slurm_refuses_is_no_job(rankwise: Run, fake: FakeSlurm) -> None:
    fake.command("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1")
    done = rankwise("run", "--on", "slurm", "--qos", "best", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("rankwise: Slurm refuses the job: Invalid qos specification (--qos=best); ")
    assert train().read_job() is None
    assert not train().lease.exists()


def test_nonsense_is_refused_before_anything_is_written(rankwise: Run, fake: FakeSlurm) -> None:
    for words in (["--time", "-5"], ["--array", "5-1"], ["--array", "0-3", "--wait"], ["--partition", "a\nb"]):
        done = rankwise("run", "--on", "slurm", *words, "train.py")
        assert (done.returncode, done.stdout) == (2, "")
        assert not Path("runs").exists()


def test_a_site_file_spares_the_researcher_all_but_the_nodes(
    rankwise: Run, fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configuration").mkdir()
    (tmp_path / "configuration" / "rankwise.toml").write_text(
        "on = 'slurm'\npartition = 'gpu'\ngpus-per-node = 4\ntime = '20:00:00'\nsetup = ['module load cuda']\npe = 'mpi'\n"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    done = rankwise("run", "--nodes", "2", "train.py")
    assert done.returncode == 0, done.stderr
    assert "train.py with slurm (the site file says so) on 2 nodes" in done.stderr
    text = train().job.read_text()
    for line in ("#SBATCH --partition=gpu", "#SBATCH --gres=gpu:4", "#SBATCH --time=20:00:00", "module load cuda"):
        assert f"\n{line}\n" in text
    here = rankwise("run", "--on", "local", "--nproc", "1", "--name", "here", "train.py")
    assert (here.returncode, here.stdout) == (0, "one of 1\n")


def test_each_task_of_an_array_is_a_run(rankwise: Run, fake: FakeSlurm) -> None:
    done = rankwise("run", "--on", "slurm", "--array", "3,5", "train.py")
    assert (done.returncode, done.stdout) == (0, "12\n")
    assert "rankwise: submitted job 12 of slurm, 2 runs, runs/train-3 to train-5: PENDING (Resources)" in done.stderr
    assert sorted(path.name for path in Path("runs").iterdir()) == ["train-3", "train-5"]
    for number in ("3", "5"):
        run = RunDir(Path(f"runs/train-{number}"))
        plan = json.loads(run.plan.read_text())
        assert (plan["run_dir"], plan["name"]) == (str(run.path.absolute()), f"train-{number}")
        job = run.read_job()
        assert job is not None
        assert job.id == f"12_{number}"
    assert re.search(
        r'-m rankwise\.agent \S+/runs/train-"\$SLURM_ARRAY_TASK_ID"\n$', RunDir(Path("runs/train-3")).job.read_text()
    )


# --- waiting for it


def test_waiting_shows_what_the_job_prints_and_gives_its_exit_status(rankwise: Run, fake: FakeSlurm) -> None:
    """This Slurm runs the job itself, inside sbatch: srun is a script that skips its own options."""
    fake.command("srun", 'while test "${1#--}" != "$1"; do shift; done; exec "$@"')
    log = "$(sed -n 's/^#SBATCH --chdir=//p' \"$2\")/logs/job-12.log"
    fake.command("sbatch", f'cd "$(dirname "$2")"; OMP_NUM_THREADS=1 bash "$2" > "{log}" 2>&1; echo 12')
    Path("train.py").write_text(SCRIPT + "raise SystemExit(3)\n")
    fake.says("PENDING None", "RUNNING", "FAILED NonZeroExitCode 3:0")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = rankwise("run", "--on", "slurm", "--nproc", "1", "--wait", "train.py", env=env)
    assert (done.returncode, done.stdout) == (3, "one of 1\n"), done.stderr


def test_a_job_that_ends_before_it_begins_is_a_failure_with_its_reason(rankwise: Run, fake: FakeSlurm) -> None:
    fake.says("PENDING Resources", "CANCELLED None 0:15")
    done = rankwise("run", "--on", "slurm", "--wait", "train.py")
    assert done.returncode == 143
    assert done.stderr.splitlines()[-1] == (
        "rankwise: job 12: CANCELLED, exit status 143 before any rank started; it printed nothing"
    )


def test_a_job_that_its_scheduler_will_never_start_is_not_waited_for_without_end(rankwise: Run, fake: FakeSlurm) -> None:
    never = "PENDING DependencyNeverSatisfied"
    fake.says("PENDING Resources", "RUNNING", never, "PENDING Priority", "RUNNING", never, never)
    done = rankwise("run", "--on", "slurm", "--wait", "train.py")
    assert (done.returncode, fake.cancelled) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "rankwise: stopped waiting: job 12 cannot start before it is repaired, and stays in the queue; to remove it, type: "
        "rankwise cancel train"
    )


def test_a_job_whose_folder_no_node_sees_says_so_and_what_to_type(rankwise: Run, fake: FakeSlurm) -> None:
    fake.command("scontrol", "echo 'JobId=12 JobState=FAILED Reason=JobLaunchFailure Dependency=(null) ExitCode=0:53'")
    done = rankwise("run", "--on", "slurm", "--wait", "train.py")
    assert done.returncode == 181
    last = done.stderr.splitlines()[-1]
    assert "its first node could not start the job: it does not see the run directory" in last
    assert "use --run-dir PATH with a folder that all nodes share" in last
    assert "its output is in" not in last


SAVES = """
import os, signal, sys, time
from rankwise.dist.world import agent_row, discover
row = agent_row(discover(os.environ))
row.join()
row.flag, step = signal.SIGTERM, 1
while row.pass_gate(step):
    step += 1
    time.sleep(0.01)
sys.exit(75)
"""


@pytest.mark.parametrize(("source", "job", "status"), [(SAVES, 0, 75), ("raise SystemExit(75)", 75, 75)])
@pytest.mark.one_in(2)
def test_a_stop_that_has_saved_is_no_failed_job_and_still_the_status_of_who_waits(
    rankwise: Run, fake: FakeSlurm, source: str, job: int, status: int
) -> None:
    fake.command("srun", 'while test "${1#--}" != "$1"; do shift; done; exec "$@"')
    log = "$(sed -n 's/^#SBATCH --chdir=//p' \"$2\")/logs/job-12.log"
    fake.command(
        "sbatch", f'cd "$(dirname "$2")"; OMP_NUM_THREADS=1 bash "$2" > "{log}" 2>&1; echo $? > {fake.folder}/left; echo 12'
    )
    fake.command(
        "scontrol", f'echo "JobId=12 JobState=COMPLETED Reason=None Dependency=(null) ExitCode=$(cat {fake.folder}/left):0"'
    )
    Path("train.py").write_text(f"import os\nos.environ['X'] = '1'\n{source}\n")
    done = rankwise("run", "--on", "slurm", "--nproc", "1", "--wait", "train.py", env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, (fake.folder / "left").read_text()) == (status, f"{job}\n"), done.stdout + done.stderr
    assert train().attempts()[-1].status == 75
    assert "Ctrl-C" not in train().job_log("12").read_text()


def test_ctrl_c_ends_the_waiting_and_not_the_job(fake: FakeSlurm) -> None:
    # A background process of a shell ignores SIGINT: then Python does not raise KeyboardInterrupt.
    source = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); import rankwise.cli; rankwise.cli.main()"
    )
    command = [sys.executable, "-c", source, "run", "--on", "slurm", "--wait", "train.py"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        while "to follow it" not in (line := waiting.stderr.readline()):
            assert line
        waiting.send_signal(2)
        rest = waiting.stderr.read()
    assert waiting.returncode == 130
    assert rest.splitlines()[-1] == (
        "rankwise: stopped following; job 12 continues. To follow it: rankwise logs -f train; to stop it: rankwise cancel train"
    )
    assert fake.cancelled == ""
    assert train().read_job() is not None


def test_a_job_record_is_whole_or_an_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.read_job() is None
    job = Job("slurm", "12", 1.5, "here")
    run.write_job(job)
    assert run.read_job() == job
    run.write_job(None)
    run.write_job(None)
    assert run.read_job() is None
