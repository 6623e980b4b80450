"""Functions instead of scripts, with the real launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import left_over, wait_for

import rankwise
from rankwise.errors import ConfigError, FunctionError, Stopped
from rankwise.functions import FunctionRun
from rankwise.run.directory import RunDir

has_cloudpickle = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import cloudpickle"], capture_output=True).returncode != 0,
    reason="cloudpickle is not installed (pip install 'rankwise[functions]')",
)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert wait_for(lambda: not left_over(tmp_path), "nothing left in ps")


# --- what the ranks run


class LossError(ValueError):
    pass


def scaled_rank(factor: int, offset: int = 0) -> tuple[int, int]:
    world = rankwise.init()
    import torch

    total = rankwise.all_reduce(torch.tensor(world.rank + 1))
    print(f"rank {world.rank} of {world.world_size}")
    return world.rank * factor + offset, int(total)


def times_rank(factor: int) -> int:
    """Does not import torch, which would take the time of ten of these runs."""
    return factor * int(os.environ["RANK"])


def loads(mark: str) -> None:
    Path(mark).touch()
    time.sleep(100)
    rankwise.Trainer  # noqa: B018


def fails_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise LossError("loss is nan")


def returns_a_lock_on(rank: int) -> Any:
    return threading.Lock() if int(os.environ["RANK"]) == rank else None


def is_killed_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def leaves_without_a_word() -> None:
    sys.exit(0)


def second_time_lucky() -> str:
    rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if restarts == "0" and rank == "1":
        raise LossError("first time")
    return f"{rank} in life {restarts}"


def modes_of_its_files() -> list[int]:
    run = RunDir(Path(os.environ["RANKWISE_RUN_DIR"]))
    return [path.stat().st_mode & 0o777 for path in (run.function, run.call)]


def trains_until_stopped(mark: str) -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)

    def step(model: Any, batch: Any) -> Any:
        Path(mark).touch()
        return (model(batch[0]) ** 2).sum(), len(batch[0])

    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rankwise.Trainer(model, optimizer, step, data, global_batch_size=8, max_steps=10**7).fit()


# --- results


def test_each_rank_returns_in_the_order_of_the_ranks_and_what_they_print_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert rankwise.run_function(scaled_rank, (10,), {"offset": 3}, nproc=2, start_method="fork") == [(3, 3), (13, 3)]
    assert capfd.readouterr().out == "rank 0 of 2\n"
    run = RunDir(Path("runs/scaled_rank"))
    assert run.log(1).read_text() == "rank 1 of 2\n"
    assert run.attempts()[-1].argv == ("-m", "rankwise.functions.worker", "test_run_function.scaled_rank")
    assert not run.function.exists()  # no pickle is left


def test_a_function_starts_in_a_folder_that_has_files_named_like_modules_of_python() -> None:
    for name in ("calendar.py", "platform.py"):  # the launcher and the ranks must not import them
        Path(name).write_text("raise ImportError('imported')")
    assert rankwise.run_function(times_rank, (2,), nproc=2) == [0, 2]


def waits_for(mark: str) -> int:
    while not Path(mark).exists():
        time.sleep(0.01)
    return 5


@pytest.mark.stress
def test_each_call_of_a_name_has_its_own_results_also_if_they_are_asked_for_late(tmp_path: Path) -> None:
    runs = []
    for factor in (1, 2):
        runs.append(rankwise.run_function(times_rank, (factor,), nproc=2, wait=False))
        wait_for(runs[-1].done, "the end")
    assert [run.result() for run in runs] == [[0, 1], [0, 2]]
    first = rankwise.run_function(waits_for, (str(tmp_path / "go"),), nproc=1, wait=False)
    wait_for(lambda: RunDir(first.run_dir).world.exists(), "the first")
    with pytest.raises(rankwise.errors.RunDirError, match="is still running"):
        rankwise.run_function(waits_for, ("never",), nproc=1)
    (tmp_path / "go").touch()
    assert first.result() == [5]


def test_results_that_a_call_of_another_process_has_replaced_are_not_taken_for_ones_own() -> None:
    run = rankwise.run_function(times_rank, (1,), nproc=1, wait=False)
    wait_for(run.done, "the end")
    RunDir(run.run_dir).call.write_bytes(b"of another")
    with pytest.raises(FunctionError, match=r"^the results of .*times_rank were replaced by those of a later call"):
        run.result()
    assert RunDir(run.run_dir).call.exists()  # the other process will read its own


def test_what_travels_is_for_this_user_alone() -> None:
    assert rankwise.run_function(modes_of_its_files, nproc=1) == [[0o700, 0o600]]


def test_a_failure_is_raised_as_it_was_and_told_as_a_scripts(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LossError, match="loss is nan") as caught:
        rankwise.run_function(fails_on, (1,), nproc=2)
    (note,) = caught.value.__notes__
    assert note.startswith("raised on rank 1, on ")
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "raise LossError(" in text)
    assert f'File "{__file__}", line {line}, in fails_on' in note
    assert f"{Path(rankwise.__file__).parent}/" not in note  # no frame of ours
    failure = RunDir(Path("runs/fails_on")).read_failure()
    assert failure is not None
    assert failure.summary == f"rank 1 raised LossError: loss is nan (test_run_function.py:{line})"
    assert failure.traceback is not None
    assert failure.traceback.splitlines()[1] == f'  File "{__file__}", line {line}, in fails_on'
    assert failure.summary in capfd.readouterr().err


def test_an_answer_that_cannot_be_sent_is_named_with_its_rank_and_type() -> None:
    with pytest.raises(FunctionError, match=r"^rank 1 returned a _thread.lock, which cannot be sent back: TypeError: cannot p"):
        rankwise.run_function(returns_a_lock_on, (1,), nproc=2)


def test_a_rank_that_is_killed_is_an_error_of_ours() -> None:
    with pytest.raises(FunctionError, match=r"^rank 1 was killed by SIGKILL.*its output is in .*rank-1.log"):
        rankwise.run_function(is_killed_on, (1,), nproc=2)


def test_a_rank_that_leaves_without_an_answer_is_named() -> None:
    with pytest.raises(FunctionError, match="rank 0 exited without returning anything"):
        rankwise.run_function(leaves_without_a_word, nproc=1)


def test_after_a_restart_the_answers_are_those_of_the_last_attempt() -> None:
    found = rankwise.run_function(second_time_lucky, nproc=2, max_restarts=1)
    assert found == ["0 in life 1", "1 in life 1"]


# --- what is refused before anything runs


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"npoc": 2}, "npoc=2: not a setting of a run; the settings are: nproc, "),
        ({"nproc": 0}, 'run_function(nproc=0): give a whole number of at least 1, or "auto"'),
        ({"dry_run": True}, "dry_run=True: a function has no dry run"),
        ({"array": "0-3"}, "submit each with its own name"),
        ({"node_rank": 1, "nodes": 2}, "node_rank=1: a function is started once, for all its nodes"),
        ({"argv": ("x",)}, "argv=('x',): not a setting of a run"),
        ({"on": "nowhere"}, "there is no scheduler nowhere; choose local"),
        ({"partition": "gpu"}, "has no option --partition"),
        ({"run_dir": 5}, "run_dir=5: give a path"),
    ],
)
def test_a_setting_that_cannot_work_is_an_exception_with_what_to_type(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rankwise.run_function(scaled_rank, (1,), **settings)
    assert said in str(caught.value)


def test_false_is_a_setting_that_a_site_file_does_not_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rankwise.toml").write_text("check-collectives = true\ntee = 'all'\nstart-method = 'spawn'\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert rankwise.run_function(times_rank, (1,), nproc=1, check_collectives=False, dry_run=False, tee=None) == [0]
    config = json.loads(RunDir(Path("runs/times_rank")).config.read_text())
    assert (config["check_collectives"], config["tee"]) == (False, "all")


def test_a_folder_that_was_removed_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("gone").mkdir()
    monkeypatch.chdir("gone")
    Path("../gone").rmdir()
    with pytest.raises(ConfigError, match=r"^the folder that you are in was removed; change to another one$"):
        rankwise.run_function(times_rank, (1,), nproc=1, run_dir=tmp_path / "run")


def test_an_argument_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^args\[1\] \(_thread.lock\) cannot be sent to the ranks: TypeError"):
        rankwise.run_function(scaled_rank, (1, threading.Lock()), nproc=1)
    assert not Path("runs").exists()


def test_without_cloudpickle_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigError, match=r"^the function .*<lambda> cannot .*, or type: pip install 'rankwise\[functions\]'$"):
        rankwise.run_function(lambda: 1, nproc=1)


def test_a_run_belongs_to_one_function() -> None:
    rankwise.run_function(modes_of_its_files, nproc=1, name="one")
    with pytest.raises(
        ConfigError,
        match=r"runs/one belongs to test_run_function\.mode.*, and this is test_run_function\.leave.* name=\"NAME\"",
    ):
        rankwise.run_function(leaves_without_a_word, nproc=1, name="one")


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(rankwise.RankwiseError, match="processes of one job"):
        rankwise.run_function(modes_of_its_files, nproc=1)


# --- a run in the background


@pytest.fixture
def in_background() -> Iterator[Callable[..., FunctionRun]]:
    started: list[FunctionRun] = []

    def start(fn: Callable[..., Any], *args: Any) -> FunctionRun:
        started.append(rankwise.run_function(fn, args, nproc=2, wait=False, start_method="fork"))
        return started[-1]

    yield start
    for run in started:
        run.cancel()
        wait_for(run.done, "its end")


@pytest.mark.stress
def test_a_run_that_is_not_waited_for_can_be_asked_stopped_and_gone_on_with(
    in_background: Callable[..., FunctionRun], tmp_path: Path
) -> None:
    run = in_background(trains_until_stopped, str(tmp_path / "mark"))
    wait_for((tmp_path / "mark").exists, "a step")
    assert not run.done()
    with pytest.raises(TimeoutError, match=r"test_run_function.trains_until_stopped did not finish within 0.01 s"):
        run.result(timeout_s=0.01)
    assert re.search("attempt 1 +2 ranks", run.status())
    run.cancel()
    with pytest.raises(Stopped) as caught:
        run.result()
    assert caught.value.code == 75
    assert run.done()
    assert RunDir(run.run_dir).saved()
    again = in_background(trains_until_stopped, str(tmp_path / "again"))
    wait_for((tmp_path / "again").exists, "a step of the second life")
    again.cancel()
    with pytest.raises(Stopped):
        again.result()
    assert "resuming from step" in RunDir(run.run_dir).log(0).read_text()


def test_a_request_while_a_function_loads_has_lost_nothing(tmp_path: Path) -> None:
    run = rankwise.run_function(loads, (str(tmp_path / "mark"),), nproc=2, wait=False, grace_s=0.5)
    wait_for((tmp_path / "mark").exists, "a rank that loads")
    run.cancel()
    with pytest.raises(Stopped) as caught:
        run.result()
    assert caught.value.code == 75
    assert "before the first step: nothing is lost" in run.status()


def test_a_call_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        rankwise.run_function(trains_until_stopped, (str(tmp_path / "mark"),), nproc=1, timeout_s=0.5)
    assert not left_over(tmp_path)


# --- callers


SCRIPT = """
import rankwise

class Odd(Exception):
    pass

def twice(x):
    if x == 3:
        raise Odd(x)
    return x * 2

try:
    print(rankwise.run_function(twice, (2,), nproc=2))
    rankwise.run_function(twice, (3,), nproc=2)
except Odd as error:
    print("caught", error, "SCRIPT" in error.__notes__[0])
"""


@has_cloudpickle
@pytest.mark.parametrize("how", ["script", pytest.param("-c", marks=pytest.mark.stress)])
def test_functions_of_main_work_from_a_script_and_from_python_c(how: str, tmp_path: Path) -> None:
    source = SCRIPT.replace("SCRIPT", "raise Odd(x)" if how == "script" else "in twice")
    (tmp_path / "train.py").write_text(source)
    words = ["train.py"] if how == "script" else ["-c", source]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=100)
    assert done.stdout == "[4, 4]\ncaught 3 True\n", done.stderr
    where = f"({'train.py' if how == 'script' else '<string>'}:9)"
    assert f"all 2 ranks raised Odd: 3 {where}" in done.stderr


CALLER = """
import sys
sys.path.insert(0, {tests!r})
import rankwise
import test_run_function as functions
if __name__ == "__main__":
    rankwise.run_function(functions.trains_until_stopped, ({mark!r},), nproc=2, start_method="fork")
"""


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        source = CALLER.format(tests=str(Path(__file__).parent), mark=str(tmp_path / "mark"))
        (tmp_path / "caller.py").write_text(source)
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        with open(tmp_path / "out.txt", "wb") as out:
            started.append(
                subprocess.Popen([sys.executable, "caller.py"], env=environment, stdout=out, stderr=out, start_new_session=True)
            )
        wait_for((tmp_path / "mark").exists, "a step")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.stress
def test_ctrl_c_stops_all_ranks_saved_and_is_the_callers(caller: Callable[[], subprocess.Popen[bytes]], tmp_path: Path) -> None:
    process = caller()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT
    run = RunDir(tmp_path / "runs" / "trains_until_stopped")
    assert run.attempts()[-1].status == 130
    assert run.saved()
    assert "KeyboardInterrupt" in (tmp_path / "out.txt").read_text()
    assert "to resume, call it again" in (tmp_path / "out.txt").read_text()


def test_a_caller_that_is_killed_leaves_nothing_running_and_a_checkpoint(
    caller: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    caller().kill()
    wait_for(lambda: not left_over(tmp_path), "an end")
    run = RunDir(tmp_path / "runs" / "trains_until_stopped")
    assert run.attempts()[-1].status == 75
    assert run.saved()


def test_in_a_notebook_what_ranks_print_goes_to_its_stream_and_tracebacks_have_the_source(tmp_path: Path) -> None:
    """As in ipykernel: the stream is not a file, and the file of the function does not exist."""
    pytest.importorskip("cloudpickle")
    source = """
import io, linecache, sys
import rankwise
cell = "def cell():\\n    print('from the cell')\\n    raise RuntimeError('in a cell')\\n"
name = "/tmp/ipykernel_1/12345.py"
linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
exec(compile(cell, name, "exec"))
shown, sys.stdout, sys.stderr = sys.stdout, io.StringIO(), io.StringIO()
try:
    rankwise.run_function(cell, nproc=1)
except RuntimeError as error:
    shown.write(f"{error.__notes__[0]}|{sys.stdout.getvalue()}|{sys.stderr.getvalue()}")
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100)
    note, printed, told = done.stdout.split("|")
    assert "    raise RuntimeError('in a cell')\n" in note
    assert printed == "from the cell\n"
    assert "rank 0 raised RuntimeError: in a cell (12345.py:3)" in told
    assert done.stderr == ""


def test_a_caller_may_have_no_standard_streams() -> None:
    source = "import os, rankwise; open('found', 'w').write(str(rankwise.run_function(os.getenv, ('WORLD_SIZE',), nproc=1)))"
    subprocess.run(["/bin/sh", "-c", 'exec "$1" -c "$2" <&- >&- 2>&-', "sh", sys.executable, source])
    assert Path("found").read_text() == "['1']"


# --- a queue


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm made of a few scripts, whose jobs run here. Returns the folder of its state."""
    folder = tmp_path / "slurm-bin"
    folder.mkdir()
    step = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1",
            "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0", "SLURM_NTASKS": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "node1"}  # fmt: skip
    commands = {
        # The job: job.sh itself; its exit status is stored where scontrol reads it.
        "sbatch": f'(sh "$2" > {folder}/log 2>&1; echo "COMPLETED None $?:0" > {folder}/state) & echo 12',
        "srun": 'while test "${1#-}" != "$1"; do shift; done\n'
        + f'exec env {" ".join(f"{k}={v}" for k, v in step.items())} "$@"',
        "scontrol": f"read -r word reason code < {folder}/state\n"
        'echo "JobId=12 JobState=$word Reason=$reason Dependency=(null) ExitCode=${code:-0:0}"',
        "scancel": f"echo CANCELLED None 0:15 > {folder}/state",
    }
    for name, source in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{source}\n")
        (folder / name).chmod(0o755)
    (folder / "state").write_text("RUNNING None 0:0\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_a_function_that_is_queued_answers_when_its_job_has_ended(queue: Path) -> None:
    run = rankwise.run_function(times_rank, (10,), nproc=2, on="slurm", wait=False)
    assert run.result(timeout_s=60) == [0, 10]
    job = RunDir(run.run_dir).read_job()
    assert job is not None
    assert (job.scheduler, job.id) == ("slurm", "12")


def test_a_job_that_ends_before_it_began_is_told_with_its_log(queue: Path) -> None:
    (queue / "sbatch").write_text(f"#!/bin/sh\necho 'FAILED NonZeroExitCode 1:0' > {queue}/state; echo 12\n")
    with pytest.raises(FunctionError, match=r"never started; job 12; its output is in .*job-12.log"):
        rankwise.run_function(scaled_rank, (10,), nproc=2, on="slurm")


def test_a_call_is_given_up_its_job_is_cancelled(queue: Path) -> None:
    (queue / "sbatch").write_text("#!/bin/sh\necho 12\n")
    (queue / "state").write_text("PENDING Resources 0:0\n")
    with pytest.raises(TimeoutError):
        rankwise.run_function(times_rank, (10,), nproc=2, on="slurm", timeout_s=4)
    assert (queue / "state").read_text().startswith("CANCELLED")
    assert json.loads(RunDir(Path("runs/times_rank")).queued.read_text())["id"] == "12"
