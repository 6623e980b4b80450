"""Standard streams that are closed, full, or missing: the command runs, or says why not, and its exit status is right."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import scripts_on_ranks

from rankwise.run.directory import RunDir

COMMAND = f"{shlex.quote(sys.executable)} -m rankwise"
NO_SPACE = "rankwise: cannot write to the standard output: No space left on device\n"


def in_shell(line: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL, env={**os.environ, **env}
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.one_in(2)
def test_a_run_without_a_standard_stream_is_a_run_like_any_other(closed: str) -> None:
    Path("train.py").write_text(
        "import os, sys\nprint(sys.stdin.read(), os.environ['RANK'])\nif os.environ['RANK'] == '1': sys.exit(3)\n"
        "import time; time.sleep(600)"
    )
    done = in_shell(f"{COMMAND} run --nproc 2 train.py {closed}")
    assert done.returncode == 3
    assert ("rank 1 exited with status 3" in done.stderr) == ("2>" not in closed)
    run = RunDir(Path("runs/train"))
    assert run.log(1).read_text() == " 1\n"  # nothing else was written to it
    failure = run.read_failure()
    assert failure is not None
    assert failure.rank == 1


def test_python_is_not_asked_to_look_into_the_exit_status_as_an_error() -> None:
    Path("train.py").write_text("import sys; sys.exit(3)")
    done = in_shell(f"{COMMAND} run --nproc 1 train.py", PYTHONINSPECT="1")
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)
    assert done.stderr.endswith("exit status 3\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("verb", ["explain", "--help", "run --dry-run train.py"])
def test_what_cannot_be_printed_is_said_in_one_line_with_status_1(verb: str, unbuffered: str) -> None:
    Path("train.py").touch()
    done = in_shell(f"{COMMAND} {verb} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    assert done.stderr.endswith(NO_SPACE)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["status", "report"])
def test_a_failure_that_names_a_file_which_is_not_utf_8_is_printed(verb: str) -> None:
    run = RunDir(Path("runs/train"))
    run.prepare(fresh=False)
    attempt = run.begin_attempt(1, ("train.py",))
    outcome = f"rank 0 raised ValueError: {os.fsdecode(b'caf' + bytes([0xE9]) + b'.wav')}"
    run.update_attempt(attempt, ended=time.time(), status=1, outcome=outcome)
    done = in_shell(f"{COMMAND} {verb} train", PYTHONIOENCODING="utf-8:strict")
    assert (done.stderr, done.returncode) == ("", 0)
    assert "ValueError: caf\\udce9.wav" in done.stdout


def test_logs_that_cannot_be_printed_are_said_to_be_that() -> None:
    run = RunDir(Path("runs/train"))
    run.prepare(fresh=False)
    run.begin_attempt(1, ("train.py",))
    run.log(0).write_text("a line\n")
    done = in_shell(f"{COMMAND} logs > /dev/full")
    assert (done.returncode, done.stderr) == (1, NO_SPACE)
    done = in_shell(f"{COMMAND} logs >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_has_gone_is_no_error_to_be_told() -> None:
    done = in_shell(f"{COMMAND} run --help | true; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode in (0, 1), done.stderr) == (True, "")


def test_a_usage_error_that_nobody_can_be_told_has_its_status() -> None:
    assert in_shell(f"{COMMAND} nonsense 2> /dev/full").returncode == 2
    assert in_shell(f"{COMMAND} nonsense 2>&-").returncode == 2


def test_ranks_whose_output_cannot_be_shown_go_on_and_that_is_said_once() -> None:
    Path("train.py").write_text("for i in range(3): print(i, flush=True)")
    done = in_shell(f"{COMMAND} run --nproc 1 train.py > /dev/full")
    assert done.returncode == 0
    assert (
        done.stderr.count("the output of the ranks can no longer be shown here (No space left on device); it is in their logs")
        == 1
    )
    assert RunDir(Path("runs/train")).log(0).read_text() == "0\n1\n2\n"


TEE = """
import sys
class Tee:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        self.stream.write(text)
    def flush(self):
        self.stream.flush()
sys.stdout, sys.stderr = Tee(sys.stdout), Tee(sys.stderr)
import torch, rankwise
data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
model = torch.nn.Linear(3, 1)
def step(model, batch):
    x, y = batch
    return ((model(x) - y) ** 2).sum(), len(y)
rankwise.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), step, data, batch_size=4, max_steps=3).fit()
rankwise.Loader(data, batch_size=-1)
"""


def test_a_script_may_replace_the_streams_by_objects_that_only_write() -> None:
    Path("train.py").write_text(TEE)
    [done] = scripts_on_ranks(1, "train.py")
    assert "done: 3 steps" in done.stdout
    assert "\nerror: Loader(batch_size=-1): give a whole number of at least 1" in done.stdout
    assert (done.returncode, "Traceback" in done.stdout) == (1, False)
