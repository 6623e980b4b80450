"""The queue of another package, tests/spool: with it, a run can do all that it can do with a queue that rankwise knows."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import wait_for
from plans import plan

from rankwise.run.directory import RunDir, write_text

Run = Callable[..., "subprocess.CompletedProcess[str]"]
PACKAGE = Path(__file__).with_name("spool")

PLAIN = "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], 'in', os.environ['SPOOL_JOB_ID'])\n"
STOPS = """
import time
from pathlib import Path
import rankwise
rankwise.init()
begun = Path("begun")
if begun.exists():
    print("went on")
else:
    begun.touch()
    with rankwise.StopSignal() as stop:
        for step, _ in stop.steps(iter(int, 1)):
            time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with this package, as pip installs it."""
    site, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "rankwise_spool.py"):
        (source / name).write_bytes((PACKAGE / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-index", "--target"]
    done = subprocess.run([*pip, str(site), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture
def site(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package is on the path of everything that this test starts."""
    monkeypatch.setenv("PYTHONPATH", str(installed))
    return installed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder without a daemon: jobs wait in it."""
    for name in ("waiting", "running", "done", "cancelled", "stop"):
        (tmp_path / "spool" / name).mkdir(parents=True)
    return tmp_path / "spool"


@pytest.fixture
def spool(site: Path, folder: Path) -> Iterator[Path]:
    daemon = subprocess.Popen([sys.executable, "-m", "rankwise_spool", str(folder), "--slots", "2"])
    yield folder
    daemon.terminate()
    daemon.wait()


def job_of(name: str) -> str:
    job = RunDir(Path("runs", name)).read_job()
    assert job is not None
    return job.id


def state(rankwise: Run, name: str) -> tuple[str, int | None]:
    job = json.loads(rankwise("status", "--json", name).stdout)["job"]
    return job["phase"], job["status"]


def test_a_job_that_is_waited_for_prints_what_it_prints_and_ends_as_it_ends(spool: Path, rankwise: Run) -> None:
    Path("train.py").write_text(PLAIN)
    done = rankwise("run", "--on", "spool", "--spool", "spool", "--priority", "5", "--nproc", "2", "--wait", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"rank 0 of 2 in {job_of('train')}\n"
    assert re.search(r"^rankwise: train.py with spool \(--on\) on 1 node, 2 ranks each, in runs/train$", done.stderr, re.M)
    assert re.search(r"^rankwise: submitted job 94-\d+ of spool: (waiting|running|ended)", done.stderr, re.M)
    assert state(rankwise, "train") == ("ended", 0)
    assert "rank 1 of 2" in rankwise("logs", "--rank", "1", "train").stdout


def test_a_dry_run_prints_the_text_and_starts_nothing(site: Path, folder: Path, rankwise: Run) -> None:
    Path("train.py").write_text("")
    done = rankwise("run", "--on", "spool", "--spool", "spool", "--dry-run", "--setup", "module load x", "train.py")
    assert done.returncode == 0, done.stderr
    here = shlex.quote(str(Path.cwd()))
    lines = done.stdout.splitlines()
    assert lines[:2] == ["#!/bin/bash", "module load x"]
    assert lines[2].startswith(f"cd {here} || ")
    assert lines[-1].endswith(f"-m rankwise.agent {here}/runs/train")
    assert list(folder.glob("*/*")) == []
    assert subprocess.run(["bash", "-n", "runs/train/job.sh"]).returncode == 0


def test_a_job_that_waits_or_runs_is_told_followed_and_cancelled_from_anywhere(
    site: Path, folder: Path, rankwise: Run, tmp_path: Path
) -> None:
    Path("train.py").write_text(STOPS)
    assert rankwise("run", "--on", "spool", "--spool", "spool", "--nproc", "1", "train.py").returncode == 0
    Path("elsewhere").mkdir()
    again = rankwise("run", "--on", "spool", "--spool", "spool", "--nproc", "1", "train.py")
    assert (again.returncode, f"is job {job_of('train')} of spool" in again.stderr) == (2, True)
    run = str(Path("runs/train").absolute())
    told = rankwise("status", run, cwd="elsewhere")
    assert f"job        {job_of('train')} of spool" in told.stdout, told.stderr
    assert state(rankwise, "train") == ("waiting", None)
    done = rankwise("cancel", run, cwd="elsewhere")
    assert done.stdout == f"job {job_of('train')} of spool (waiting) is cancelled\n"
    assert state(rankwise, "train") == ("ended", 143)
    assert list((folder / "waiting").iterdir()) == []
    daemon = subprocess.Popen([sys.executable, "-m", "rankwise_spool", str(folder)])
    try:
        assert rankwise("run", "--on", "spool", "--spool", "spool", "--nproc", "1", "train.py").returncode == 0
        wait_for(Path("begun").exists, "the training")
        assert "is cancelled; its ranks save and stop" in rankwise("cancel", "train").stdout
        wait_for(lambda: state(rankwise, "train")[0] == "ended", "its end")
    finally:
        daemon.terminate()
        daemon.wait()
    assert RunDir(Path("runs/train")).attempts()[-1].outcome.startswith("stopped by SIGTERM after step")


@pytest.mark.stress
def test_a_job_that_its_queue_takes_back_waits_again_and_goes_on(spool: Path, rankwise: Run) -> None:
    Path("train.py").write_text(STOPS)
    words = ("--on", "spool", "--spool", "spool", "--requeue", "--nproc", "1", "--wait", "train.py")
    with subprocess.Popen([sys.executable, "-m", "rankwise", "run", *words], stdout=subprocess.PIPE, text=True) as waiting:
        wait_for(Path("begun").exists, "the training")
        write_text(spool / "stop" / job_of("train"), "requeue\n")  # at once: an empty file would cancel the job
        assert waiting.stdout is not None
        assert waiting.stdout.read().endswith("went on\n")
    assert waiting.returncode == 0
    assert [attempt.status for attempt in RunDir(Path("runs/train")).attempts()] == [75, 0]


def test_two_jobs_run_at_once_and_keep_to_themselves(spool: Path, rankwise: Run) -> None:
    Path("meet.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\nme, other = sys.argv[1:]\nPath(me).touch()\n"
        "while not Path(other).exists():\n    time.sleep(0.01)\nprint(me, 'met', other, os.environ['SPOOL_JOB_ID'])\n"
    )
    for me, other in (("a", "b"), ("b", "a")):
        done = rankwise("run", "--on", "spool", "--spool", "spool", "--nproc", "1", "--name", me, "meet.py", me, other)
        assert done.returncode == 0, done.stderr
    for me, other in (("a", "b"), ("b", "a")):
        wait_for(lambda me=me: state(rankwise, me) == ("ended", 0), f"the end of {me}")
        assert rankwise("logs", me).stdout == f"{me} met {other} {job_of(me)}\n"
    assert job_of("a") != job_of("b")


def test_within_a_job_the_command_starts_the_ranks_there_and_explain_says_whose_it_is(
    site: Path, rankwise: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOOL_JOB_ID", "7")
    told = rankwise("explain").stdout
    assert told.startswith("a single process: rank 0 of 1 (source: spool)\n")
    assert "job 7 of the spool folder" in told
    Path("train.py").write_text(PLAIN)
    done = rankwise("run", "--nproc", "2", "--priority", "3", "train.py")
    assert (done.returncode, done.stdout) == (0, "rank 0 of 2 in 7\n"), done.stderr
    assert "this shell is in a job already: nothing is queued, and --priority has no effect" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--priority 3",
            r"--priority 3: local \(no other .*\) has no option --priority; spool has: use --on spool",
        ),
        ("--on spool", "--on spool: which folder does the daemon watch"),
        ("--on spool --spool nosuch", "--spool .*/nosuch: no daemon has used that folder"),
        ("--on spool --spool spool --priority 100", "--priority 100: give a number from 0 to 99"),
        ("--on spool --partition x", r"--partition x: spool \(--on\) has no option --partition; slurm has"),
        ("--on spooll", "there is no scheduler spooll; did you mean spool\\?"),
    ],
)
def test_its_options_are_checked_as_ours_are(words: str, said: str, site: Path, folder: Path, rankwise: Run) -> None:
    Path("train.py").write_text("")
    done = rankwise("run", *words.split(), "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"rankwise: .*{said}.*\n", done.stderr), done.stderr


def test_its_options_may_be_in_the_site_file_and_are_in_the_help(
    site: Path, folder: Path, rankwise: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    Path("rankwise.toml").write_text(f"on = 'spool'\nspool = '{folder}'\npriority = 9\n")
    Path("train.py").write_text("")
    done = rankwise("run", "train.py")
    assert done.returncode == 0, done.stderr
    assert "with spool (the site file says so)" in done.stderr
    assert [entry.name[:2] for entry in (folder / "waiting").iterdir()] == ["90"]
    shown = rankwise("run", "--help").stdout
    assert "Spool folder:\n  --spool DIR" in shown


def test_the_page_that_says_how_to_write_one_has_a_class_that_works(folder: Path) -> None:
    page = PACKAGE.parents[1].joinpath("docs", "schedulers.md").read_text()
    module: dict[str, Any] = {"__name__": "page"}
    first, *methods = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    exec(first + textwrap.indent("\n".join(methods), "    "), module)
    queue = module["Spool"]()
    assert queue.render(plan(job={"setup": ("module load x",)})).startswith("#!/bin/bash\nmodule load x\ncd /home/me")
    job = {"spool": str(folder), "priority": 3}
    job["id"] = queue.submit("/home/me/job.sh", job)
    assert queue.state(job).phase == "waiting"
    (folder / "waiting" / job["id"]).rename(folder / "done" / job["id"])
    (folder / "done" / job["id"]).write_text("3")
    assert (queue.state(job).phase, queue.state(job).status) == ("ended", 3)
    queue.cancel(job)
    assert [entry.name for entry in (folder / "stop").iterdir()] == [job["id"]]
    env = {"SPOOL_JOB_ID": "7"}
    assert (queue.detect(env), queue.ranks(env).world_size, queue.allocated(env), queue.attached(env)) == (True, 1, 1, True)
    assert (queue.allocated({}), queue.attached({})) == (None, False)


# --- packages that cannot be used


def entry_point(folder: Path, package: str, name: str, module: str, source: str) -> None:
    """A package as pip installs it."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[rankwise.schedulers]\n{name} = {module}:Queue\n")
    (folder / f"{module}.py").write_text(source)


LIKE_SPOOL = "from rankwise_spool import Spool\nfrom rankwise.run.options import Option\n"


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("other", "import nosuch\n", "the scheduler other of the package mine cannot be loaded: ModuleNotFoundError: .*nosuch"),
        ("other", "class Queue: pass\n", "the entry point other of the package mine is mine:Queue, which is not a scheduler"),
        ("spool", LIKE_SPOOL + "class Queue(Spool): pass\n", "two packages have a scheduler spool: .*mine.*; uninstall one"),
        (
            "slurm",
            LIKE_SPOOL + "class Queue(Spool): name = 'slurm'\n",
            "the package mine provides a scheduler slurm, which rankwise has too; type: pip uninstall mine",
        ),
        (
            "other",
            LIKE_SPOOL + "class Queue(Spool):\n    name = 'other'\n    options = (Option('priority', 'Another.'),)\n",
            "priority is an option of both (spool|other) .*package (rankwise-spool|mine)\\) and ",
        ),
    ],
)
def test_a_package_that_cannot_be_used_is_named_in_one_line(
    name: str, source: str, said: str, site: Path, tmp_path: Path, rankwise: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_point(tmp_path / "also", "mine", name, "mine", source)
    monkeypatch.setenv("PYTHONPATH", f"{site}:{tmp_path / 'also'}")
    Path("train.py").write_text("")
    done = rankwise("run", "--nproc", "1", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"rankwise: .*{said}.*\n", done.stderr), done.stderr
