"""Faults of one machine, each as a user meets it: the right cause is reported, soon, and nothing is left."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import LONG_STEPS
from launched import DEADLINE_S, FORKED, launch, wait_for

from rankwise import cli
from rankwise.host import machine, processes
from rankwise.launch import command_line, script_lint
from rankwise.run.directory import RunDir

__all__ = ["launch"]  # a fixture

MORE = pytest.mark.stress(dose="whole")

TOGETHER = """
import os, signal, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(1, 1000000):
    if rank == 1 and step == 60:
        FAULT
    dist.all_reduce(torch.ones(4))
"""


def fault(statement: str) -> str:
    return TOGETHER.replace("FAULT", statement)


CUT_IN_A_GATHER = """
import os, time, numpy as np, rankwise
if os.environ["RANK"] == "1":
    with rankwise.HDF5Writer("data.h5") as writer:
        for n in range(100):
            writer.add(x=np.zeros(10_000))
    dataset = rankwise.HDF5Dataset("data.h5")
    dataset[[3, 4]]
    time.sleep(4)  # the agent has looked by then
    _, rows = dataset._columns["x"]._rows[0]._now()  # behind the look at its size, which comes before each gather
    os.truncate("data.h5", 50_000)
    print(rows.sum())
time.sleep(600)
"""


def test_a_file_that_is_cut_within_a_gather_is_named_with_sigbus(launch) -> None:
    run = launch(CUT_IN_A_GATHER)
    assert run.wait() == 128 + signal.SIGBUS
    said = f"{run.folder / 'data.h5'} was truncated to 50 kB while it was mapped"
    assert f"rank 1 was killed by SIGBUS (script.py:12): {said}" in run.output()


@pytest.mark.parametrize(
    ("statement", "status", "said"),
    [
        ("raise ValueError('loss is nan')", 1, "rank 1 raised ValueError: loss is nan (script.py:7)"),
        ("sys.exit(0)", 1, "rank 1 exited with status 0 while rank "),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL"),
    ],
    ids=["raises", "exit 0", "SIGKILL"],
)
@pytest.mark.one_in(3)
def test_the_rank_that_is_the_cause_is_named_though_its_peers_die_of_it(launch, statement: str, status: int, said: str) -> None:
    run = launch(fault(statement), options=("--nproc", "3"))
    ranks = run.pids()
    assert run.wait() == status
    output = run.output()
    assert said in output
    assert "on " + socket.gethostname() in output.splitlines()[-2]
    assert json.loads(run.run.failure.read_text())["rank"] == 1
    assert output.count("Traceback") <= 1
    assert "Connection" not in output  # the messages of the ranks that fail later are in their logs
    attempt = run.run.attempts()[-1]
    assert attempt.ended is not None
    assert not [pid for pid in ranks if processes.start_time(pid)]


MODELS = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, WIDTH)
        self.extra = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(COUNT))
    def forward(self, x):
        x = self.body(x)
        return self.extra[0](x) if USED else x
model = DistributedDataParallel(Net())
for step in range(5):
    model(torch.ones(2, 4)).sum().backward()
"""
IN_INIT, IN_STEP = "(script.py:14)", "(script.py:16)"


@pytest.mark.parametrize(
    ("width", "count", "used", "said"),
    [
        ("4 + (rank == 1)", "1", "1", f"parameter body.weight (Linear) has shape [5, 4] here {IN_INIT}, on "),
        pytest.param(
            "4", "1 + (rank == 1)", "1", f"its model differs from that of rank 0: 6 parameters instead of 4 {IN_INIT}, on ",
            marks=pytest.mark.stress,
        ),
        pytest.param(
            "4", "1", "rank != 1", f"did not use extra.0.weight (Linear), extra.0.bias (Linear) {IN_STEP}; DDP waits",
            marks=pytest.mark.stress,
        ),
    ],
    ids=["another shape", "another number of parameters", "an unused parameter"],
)  # fmt: skip
def test_a_model_that_differs_on_one_rank_is_one_line_with_the_rank_and_the_parameter(
    launch, width: str, count: str, used: str, said: str
) -> None:
    run = launch(MODELS.replace("WIDTH", width).replace("COUNT", count).replace("USED", used), options=("--nproc", "3"))
    assert run.wait() == 1
    verdict = run.output().splitlines()[-2]
    assert verdict.startswith("rankwise: rank 1 raised RuntimeError: ")
    assert said in verdict
    assert json.loads(run.run.failure.read_text())["rank"] == 1
    assert run.output().count("Traceback") == 1


def test_an_exception_of_a_loader_worker_is_told_with_its_own_line_and_what_was_noted_on_it(launch) -> None:
    run = launch(
        """
import os, time
from torch.utils.data import DataLoader
class Files:
    def __len__(self): return 8
    def __getitem__(self, index):
        try:
            return {0: 0, 1: 1}[index]
        except KeyError as error:
            error.add_note(f"sample {index}")
            raise
if os.environ["RANK"] == "1":
    for batch in DataLoader(Files(), num_workers=1): pass
time.sleep(600)
"""
    )
    assert run.wait() == 1
    assert "rankwise: rank 1 raised KeyError: 2 (script.py:8, in loader worker 0); sample 2, on " in run.output()
    assert "Caught KeyError in DataLoader worker" in run.output()  # the complete traceback is printed too


def test_the_same_error_on_all_ranks_is_told_as_one_of_all(launch) -> None:
    run = launch("import os, time\nopen(os.environ['RANK'], 'w')\nwhile len([n for n in os.listdir() if n in '01']) < 2: pass\n"
                 "import no_such_module")  # fmt: skip
    assert run.wait() == 1
    assert "all 2 ranks raised ModuleNotFoundError: No module named 'no_such_module' (script.py:4), on " in run.output()


def test_the_same_status_on_all_ranks_is_told_as_one_of_all(launch) -> None:
    run = launch("import os, sys\nopen(os.environ['RANK'], 'w')\nwhile len([n for n in os.listdir() if n in '01']) < 2: pass\n"
                 "sys.exit(3)")  # fmt: skip
    assert run.wait() == 3
    assert "all 2 ranks exited with status 3, on " in run.output()


def test_a_question_asked_on_a_rank_without_the_terminal_is_told_to_be_that(launch) -> None:
    run = launch("import os, time\nif os.environ['RANK'] == '1': input('go on? ')\ntime.sleep(600)")
    assert run.wait() == 1
    assert (
        "rank 1 raised EOFError: EOF when reading a line (script.py:2); only rank 0 can read from the terminal" in run.output()
    )


def test_a_script_of_a_package_that_is_run_by_its_path_is_told_how_to_run_it(rankwise, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "train.py").write_text("from . import data")
    done = rankwise("run", "--nproc", "1", "pkg/train.py")
    assert done.returncode == 1
    assert "the script belongs to a package; type `rankwise run -m pkg.train`" in done.stderr


def test_a_crash_leaves_the_python_stack_in_the_ranks_log(launch) -> None:
    run = launch("import os, time\nif os.environ['RANK'] == '1':\n    import ctypes; ctypes.string_at(0)\ntime.sleep(600)")
    assert run.wait() == 139
    log = run.run.log(1).read_text()
    assert "Fatal Python error: Segmentation fault" in log
    assert 'script.py", line 3' in log
    output = run.output()
    assert "rankwise: rank 1 was killed by SIGSEGV (script.py:3), on " in output
    assert "  Fatal Python error: Segmentation fault\n    File " in output
    assert "Extension modules" not in output


def test_what_is_told_of_a_failure_is_not_taken_from_the_log_of_an_earlier_attempt(launch) -> None:
    script = "import os, signal, sys, time\nif os.environ['RANK'] == '1':\n    {}\ntime.sleep(600)"
    said = "print('  what():  of the first attempt', file=sys.stderr); "
    for statement in (said + "os.abort()", said + "sys.exit(3)"):
        assert launch(script.format(statement)).wait() in (134, 3)
    run = launch(script.format("os.kill(os.getpid(), signal.SIGABRT)\n"))
    assert run.wait() == 134
    assert "of the first attempt" not in run.output()
    run = launch(script.format("os.write(1, b'of the second'); os._exit(4)"))
    assert run.wait() == 4
    assert "of the first attempt" not in run.output()
    assert "  of the second\nrankwise: rank 1 exited with status 4" in run.output()


def test_what_a_c_plus_plus_library_said_before_it_aborted_is_the_reason(launch) -> None:
    run = launch(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('terminate called\\n  what():  12 vs 4: collective mismatch', file=sys.stderr)\n"
        "    os.abort()\ntime.sleep(600)"
    )
    assert run.wait() == 134
    assert "rank 1 was killed by SIGABRT (script.py:4): 12 vs 4: collective mismatch" in run.output()


KILLED_WORKER = """
import os, torch, torch.distributed as dist
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
batches = iter(DataLoader(torch.ones(2000).expand(100000, -1), num_workers=2, batch_size=8))
for step in range(10000):
    next(batches)
    dist.all_reduce(torch.ones(4))
    if step == 30 and dist.get_rank() == 1:
        os.kill(batches._workers[0].pid, 9)
"""


@pytest.mark.parametrize("attempt", [0, *(pytest.param(n, marks=MORE if n > 3 else pytest.mark.stress) for n in range(1, 20))])
def test_a_loader_worker_that_is_killed_is_the_cause_and_not_the_rank_that_lost_its_peer(launch, attempt: int) -> None:
    run = launch(KILLED_WORKER)
    assert run.wait() == 1
    assert "rankwise: rank 1 raised RuntimeError: DataLoader worker (pid " in run.output()
    assert "is killed by signal: Killed. (script.py:" in run.output()


HANDLER_AT_THE_CALL = """
import sys

has_left = False  # the script

def raise_as_a_handler_may(frame, event, arg):
    global has_left
    has_left = has_left or event == "return" and frame.f_code.co_name == "run"
    if has_left and event in ("call", "c_call") and (WHICH or frame.f_code.co_name == "leave"):
        raise RuntimeError("SAID")

sys.setprofile(raise_as_a_handler_may)
raise ConnectionResetError(104, "Connection reset by peer")
"""


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "DataLoader worker (pid 5) is killed by signal: Killed.",
            "RuntimeError: DataLoader worker (pid 5) is killed by signal",
        ),
        ("something else", "ConnectionResetError: [Errno 104] Connection reset by peer"),
    ],
)
def test_a_handler_that_raises_when_a_rank_begins_to_report_its_exception_hides_no_reason(
    launch, said: str, reason: str, first: bool
) -> None:
    run = launch(HANDLER_AT_THE_CALL.replace("SAID", said).replace("WHICH", str(first)), options=("--nproc", "1"))
    assert run.wait() == 1
    assert f"rankwise: rank 0 raised {reason}" in run.output()
    assert "(script.py:13)" in run.output()


def test_tensors_of_different_shape_are_told_with_the_lines_of_both_ranks_and_the_flag_that_names_the_shapes(launch) -> None:
    run = launch(TOGETHER.replace("FAULT", "dist.all_reduce(torch.ones(800))").replace("ones(4)", "ones(400)"))
    assert run.wait() == 134
    assert "rank 0 was killed by SIGABRT (script.py:8): in all_reduce it received " in run.output()
    assert (
        "; rankwise run --check-collectives shows which ranks, with their shapes and lines; rank 1 was in all_reduce"
        in run.output()
    )


def test_a_dead_ranks_loader_worker_does_not_keep_its_peers_waiting(launch) -> None:
    run = launch(
        """
import os, time, torch, torch.distributed as dist
from torch.utils.data import DataLoader
class Stuck:
    def __len__(self): return 8
    def __getitem__(self, index):
        open(f"stuck-{os.environ['RANK']}", "w").close()
        time.sleep(600)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    iterator = iter(DataLoader(Stuck(), num_workers=2))
    while not os.path.exists("stuck-1"): time.sleep(0.01)
    os.kill(os.getpid(), 9)
dist.all_reduce(torch.ones(1))
"""
    )
    run.pids()
    wait_for(lambda: (run.folder / "stuck-1").exists(), "a worker")
    assert run.wait() == 137  # otherwise the other ranks would wait for half an hour
    assert "rank 1 was killed by SIGKILL" in run.output()


def test_an_exception_in_a_thread_of_the_script_ends_nothing(launch) -> None:
    run = launch(
        "import threading\ndef f(): raise ValueError('in a thread')\nt = threading.Thread(target=f); t.start(); t.join()"
    )
    assert run.wait() == 0
    assert "ValueError: in a thread" in run.output()


def test_the_launcher_stopped_and_continued_loses_nothing(launch) -> None:
    run = launch("import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('done')")
    run.pids()
    run.process.send_signal(signal.SIGSTOP)
    (run.folder / "go").touch()
    run.process.send_signal(signal.SIGCONT)
    assert run.wait() == 0
    assert "done" in run.output()


def test_sigusr1_to_the_launcher_is_a_stop_request_and_orphans_nobody(launch) -> None:
    run = launch("import time; time.sleep(600)")
    run.pids()
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait() == 128 + signal.SIGUSR1
    assert "ended by SIGUSR1" in run.output()


def test_a_failed_run_starts_again_as_often_as_asked_and_goes_on_from_its_checkpoint(launch) -> None:
    source = """
import os, torch, rankwise
from torch.utils.data import TensorDataset
model = torch.nn.Linear(4, 1)
def step(model, batch):
    return ((model(batch[0])) ** 2).sum(), len(batch[0])
def die(state):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and state.step == 20 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
trainer = rankwise.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), step, TensorDataset(torch.randn(64, 4)),
                           global_batch_size=8, max_steps=40, checkpoints=rankwise.Checkpoints(every_s=0),
                           actions=[die, rankwise.actions.Log(1)])
trainer.fit()
"""
    run = launch(source, options=("--nproc", "2", "--max-restarts", "2"))
    assert run.wait() == 0
    assert "rank 1 was killed by SIGKILL at step 20" in run.output()
    assert "restarting all ranks, 1 of 2" in run.output()
    assert "resuming from step" in run.output()
    assert [attempt.status for attempt in run.run.attempts()] == [137, 0]
    assert not run.run.failure.exists()
    assert {record["step"] for record in run.run.read_metrics()} == set(range(1, 41))


@pytest.mark.parametrize(
    ("step_s", "options"),
    [
        (1.0, ("--nproc", "2")),
        pytest.param(1.0, FORKED, marks=pytest.mark.stress),
        pytest.param(5.0, ("--nproc", "2"), marks=pytest.mark.stress),
    ],
    ids=["1 s", "1 s, the warm process killed", "5 s"],
)
def test_a_failed_run_starts_again_though_others_are_in_a_long_step(launch, step_s: float, options: tuple[str, ...]) -> None:
    """The signal that ends the other ranks is not a request to stop."""
    run = launch(LONG_STEPS, str(step_s), options=(*options, "--max-restarts", "1"))
    if options == FORKED:
        ranks = run.pids()
        [warm] = {*processes.children(run.agent())} - {*ranks}
        os.kill(warm, signal.SIGKILL)
    assert run.wait() == 0, run.output()
    assert [attempt.status for attempt in run.run.attempts()] == [137, 0]
    assert "rank 1 was killed by SIGKILL at step 2" in run.output()
    assert "stopped by" not in run.output()


def test_a_request_to_stop_a_run_that_fails_too_is_not_answered_by_another_start(launch, tmp_path: Path) -> None:
    source = LONG_STEPS.replace("os.kill(os.getpid(), 9)", "time.sleep(600)")
    run = launch(source, "1", options=("--nproc", "2", "--max-restarts", "1"))
    [_, second] = run.pids()
    wait_for(lambda: "step 2" in run.run.log(0).read_text(), "the step")
    run.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "all ranks stop after the current step" in run.output(), "the request")
    os.kill(second, signal.SIGKILL)
    assert run.wait() == 137
    assert len(run.run.attempts()) == 1


def test_restarts_end_when_they_are_used_up(launch) -> None:
    run = launch("raise SystemExit(5)", options=("--nproc", "2", "--max-restarts", "2"))
    assert run.wait() == 5
    assert [attempt.status for attempt in run.run.attempts()] == [5, 5, 5]
    assert run.output().count("restarting all ranks") == 2


def test_the_warm_process_killed_before_the_ranks_are_there_does_no_harm(launch) -> None:
    run = launch("print('ran')", options=FORKED)
    agent = run.agent()
    [warm] = wait_for(lambda: processes.children(agent), "the warm process")
    os.kill(warm, signal.SIGKILL)
    assert run.wait() == 0
    assert run.run.log(1).read_text() == "ran\n"
    assert "each rank imports torch separately" in run.output()


@pytest.mark.stress  # nothing else depends on it then
def test_the_warm_process_killed_while_the_ranks_run_is_told_and_does_no_harm(launch) -> None:
    run = launch("import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)", options=FORKED)
    ranks = run.pids()
    [warm] = set(processes.children(run.agent())) - set(ranks)
    os.kill(warm, signal.SIGKILL)
    wait_for(lambda: "the warm process was killed by SIGKILL; the ranks that are running do not need it" in run.output(), "it")
    (run.folder / "go").touch()
    assert run.wait() == 0


@pytest.mark.parametrize(
    "moment", [2, *(pytest.param(n, marks=MORE if n in (1, 3, 4) else pytest.mark.stress) for n in (0, 1, 3, 4, 5))]
)
def test_the_warm_process_killed_while_it_forks_leaves_nobody(launch, moment: int) -> None:
    run = launch("print('ran')", options=("--nproc", "4", "--start-method", "fork"))
    agent = run.agent()
    warm = wait_for(lambda: processes.children(agent), "the warm process")[0]
    wait_for(
        lambda: processes.children(warm) or processes.start_time(warm) is None or len(processes.children(agent)) > moment,
        "forks",
    )
    processes.send(warm, signal.SIGKILL)
    assert run.wait() == 0
    assert [run.run.log(rank).read_text().count("ran") for rank in range(4)] == [1] * 4


def test_all_ranks_shown_line_by_line_none_lost_none_torn(launch) -> None:
    run = launch(
        "import os\nfor i in range(10000): print('line', i, 'of', os.environ['RANK'], 'x' * (i % 50))",
        options=("--nproc", "4", "--tee", "all"),
    )
    assert run.wait() == 0
    lines = [line for line in run.output().splitlines() if line.startswith("[rank ")]
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] line {i} of {rank} {'x' * (i % 50)}" for i in range(10000)]
    assert len(lines) == 40000


def test_a_slow_console_slows_no_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("for i in range(20000): print('x' * 100)\nopen('printed', 'w').close()\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "rankwise", "run", "--nproc", "1", str(script)], cwd=tmp_path, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    wait_for(lambda: (tmp_path / "printed").exists(), "the rank, though nobody reads its 2 MB")
    with process.stdout as console:
        assert len(console.read()) == 20000 * 101
    assert process.wait() == 0


def test_a_command_that_is_no_python_runs_on_every_rank(launch, rankwise, tmp_path: Path) -> None:
    done = rankwise(
        "run", "--nproc", "2", "--name", "c", "--", "sh", "-c", 'echo "$RANK of $WORLD_SIZE: $*"', "x", "--nproc", "a b"
    )
    assert done.returncode == 0
    assert (tmp_path / "runs" / "c" / "logs" / "rank-1.log").read_text() == "1 of 2: --nproc a b\n"
    assert "process group" not in done.stderr  # other commands are not known


def test_the_script_of_another_interpreter_runs_with_that_interpreter(rankwise, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "other")], check=True)
    (tmp_path / "script.py").write_text("import sys; print(sys.prefix, sys.argv, sys.flags.optimize)")
    python = tmp_path / "other" / "bin" / "python"
    words = ("--nproc", "1", "--start-method", "fork", "--", str(python), "-O", "script.py", "--lr", "1")
    done = rankwise("run", *words)
    assert done.returncode == 0
    assert done.stdout == f"{tmp_path / 'other'} ['script.py', '--lr', '1'] 1\n"
    assert "cannot be imported once for all ranks" in done.stderr  # there is no torch in it


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.one_in(2)
def test_an_interpreter_that_is_a_script_must_become_python(rankwise, tmp_path: Path, method: str) -> None:
    (tmp_path / "script.py").write_text("print('ran', flush=True)")
    python = tmp_path / "python3"
    words = ("run", "--nproc", "2", "--start-method", method, "--", str(python), "script.py")
    python.write_text(f'#!/bin/sh\n"{sys.executable}" "$@"\nexit $?\n')
    python.chmod(0o755)
    done = rankwise(*words)
    assert done.returncode == 1
    assert "rankwise: the interpreter is a script that starts Python as another process" in done.stdout + done.stderr
    assert "ran\n" not in done.stdout
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    done = rankwise(*words, "--fresh")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_a_module_runs_as_under_python_m(rankwise, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "train.py").write_text(
        "import sys; print(__name__, __package__, sys.argv[1:], sys.path[0] == sys.argv[2])"
    )
    done = rankwise("run", "--nproc", "1", "-m", "pkg.train", "--x", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"__main__ pkg ['--x', '{tmp_path}'] True\n"
    assert (tmp_path / "runs" / "pkg.train").is_dir()


@pytest.mark.parametrize(("first", "said"), [("1 / 0", "raised ZeroDivisionError"), ("raise SystemExit(3)", "exit status 3")])
def test_a_package_that_fails_is_imported_and_told_by_the_ranks(rankwise, tmp_path: Path, first: str, said: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text(first)
    (tmp_path / "pkg" / "train.py").write_text("")
    done = rankwise("run", "--nproc", "1", "-m", "pkg.train")
    assert done.returncode == {"1 / 0": 1}.get(first, 3)
    assert said in done.stderr
    assert "click" not in done.stderr


@pytest.mark.parametrize("verb", [("run", "x.py"), ("status",), ("logs", "x"), ("checkpoint", "ls")])
def test_a_folder_that_was_removed_is_one_line(tmp_path: Path, verb: tuple[str, ...]) -> None:
    (tmp_path / "gone").mkdir()
    words = [sys.executable, "-m", "rankwise", *verb]
    code = f"import os, shutil; shutil.rmtree(os.getcwd()); os.execv({words[0]!r}, {words})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "gone", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "rankwise: the folder that you are in was removed; change to another one\n")


def test_a_folder_that_is_removed_while_the_script_is_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")

    def read() -> None:
        with command_line._printed():
            (tmp_path / "gone").rmdir()
            script_lint.examine("train.py")

    with pytest.raises(SystemExit, match="2"):
        read()
    assert capsys.readouterr().err == "rankwise: the folder that you are in was removed; change to another one\n"


@pytest.mark.parametrize("file", ["world.json", "metrics.jsonl", "failure.json"])
def test_a_private_file_of_another_users_run_is_one_line_and_is_not_to_be_removed(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "train")
    run.prepare(fresh=False)
    for name in ("world.json", "plan.json", "metrics.jsonl"):
        (run.path / name).write_text('{"lives": []}\n')
    opened = Path.open

    def refused(path: Path, *args: Any, **more: Any) -> Any:  # root may read any file, so no mode refuses it
        if path.name == file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **more)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(SystemExit, match="1"):
        cli.main(["report", str(run.path)])
    told = f"rankwise: permission denied: {run.path / file}; ask its owner, or type this as its owner\n"
    assert capsys.readouterr().err == told


def test_a_modules_own_names_do_not_replace_those_by_which_its_failure_is_told(rankwise, tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text("def _where(error):\n    return 'elsewhere'\n\n\nraise ValueError('no data')\n")
    done = rankwise("run", "--nproc", "1", "-m", "named")
    assert "rank 0 raised ValueError: no data (named.py:5)" in done.stderr
    assert "fork_server.py" not in done.stderr


@pytest.mark.parametrize("way", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("text", "why"),
    [("#!/no/such/python\n", "its first line names a program that is not there"), ("garbage", "Exec format error")],
)
def test_a_python_that_cannot_be_started_is_one_line(rankwise, tmp_path: Path, way: str, text: str, why: str) -> None:
    (tmp_path / "script.py").write_text("print('never')")
    (tmp_path / "python3").write_text(text)
    (tmp_path / "python3").chmod(0o755)
    done = rankwise("run", "--nproc", "2", "--start-method", way, "--", "./python3", "script.py")
    assert done.returncode == 2
    assert f" cannot start ./python3, which is to run the script: {why}; repair or replace it\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-m", "no.such"), "there is no module no.such"),
        (("-m", "json"), "json is a package without __main__.py and cannot be run"),
        (("--", "nothere"), "there is no command nothere"),
        (("--", "script.py"), "for a Python script, type: rankwise run script.py"),
        (("--gpus", "0", "script.py"), "this machine has no GPU"),
        (("--gpus", "0,0", "script.py"), "each once"),
        (("--nproc", "0", "script.py"), "give a number of ranks, at least 1"),
        (("--tee", "some", "script.py"), "choose main or all"),
        (("--start-method", "thread", "script.py"), "choose fork or spawn"),
        (("--max-restarts", "-1", "script.py"), "give the maximum number of restarts, 0 or more"),
        (("--config", "none.toml", "script.py"), "none.toml: cannot be read: No such file"),
        (("--config", "script.py", "script.py"), "script.py:1:6: not valid TOML"),
        (("--run-dir", "script.py/x", "script.py"), "choose another with --run-dir"),
        (("broken.py",), "broken.py:2: syntax error"),
    ],
)
def test_what_cannot_run_is_one_line_and_status_2_before_anything_is_started(rankwise, tmp_path: Path, words, said) -> None:
    if said == "this machine has no GPU" and machine.gpus({}):
        pytest.skip("this machine has a GPU")
    (tmp_path / "script.py").write_text("print('never')")
    (tmp_path / "broken.py").write_text("x = 1\nif x:\n")
    done = rankwise("run", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == (3 if "broken.py" in words else 1)  # the line, and a mark below it
    assert not (tmp_path / "runs").exists()
    assert done.stdout == ""


def test_a_config_file_sets_what_the_command_line_does_not(rankwise, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; print(os.environ['WORLD_SIZE'])")
    (tmp_path / "run.toml").write_text('nproc = 3\nname = "from-file"\ngrace = 5\nmax-restarts = 1\n')
    done = rankwise("run", "--config", "run.toml", "script.py")
    assert done.stdout == "3\n"
    assert (tmp_path / "runs" / "from-file").is_dir()
    assert rankwise("run", "--config", "run.toml", "--nproc", "1", "script.py").stdout == "1\n"
    (tmp_path / "run.toml").write_text("nprocs = 3\n")
    wrong = rankwise("run", "--config", "run.toml", "script.py")
    assert wrong.returncode == 2
    assert "run.toml:1: nprocs is not a setting of a run; did you mean nproc?" in wrong.stderr
    (tmp_path / "run.toml").write_text("nproc = 'two'\n")
    assert "--config run.toml:1: --nproc two: give a number" in rankwise("run", "--config", "run.toml", "script.py").stderr


def test_ranks_that_never_met_are_said_to_be_separate_runs(launch) -> None:
    run = launch("print('alone')")
    assert run.wait() == 0
    assert SEPARATE in run.output()


def test_ranks_that_print_their_help_are_not(rankwise, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import argparse; argparse.ArgumentParser(description='Trains.').parse_args()")
    done = rankwise("run", "--nproc", "2", "script.py", "--help")
    assert "Trains." in done.stdout
    assert "on its own" not in done.stdout + done.stderr


SEPARATE = "; no rank called a collective: the script ran 2 times, each time on its own (to train one model together, it needs"
TORCH = "import torch, torch.distributed as dist; dist.init_process_group('gloo');"
OURS = "import torch, rankwise; rankwise.init();"
END = "dist.destroy_process_group()"


@pytest.mark.parametrize("script", [TORCH + END, TORCH, OURS, "import torch, rankwise; rankwise.init(backend='gloo')"])
@pytest.mark.one_in(2)
def test_ranks_that_connect_and_send_nothing_are_too(script: str, launch) -> None:
    run = launch(script)
    assert run.wait() == 0
    assert SEPARATE in run.output()


@pytest.mark.parametrize(
    "script",
    [TORCH + "dist.barrier();" + END, TORCH + "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))",
     OURS + "rankwise.barrier()", OURS + "torch.distributed.all_reduce(torch.ones(1))"],
)  # fmt: skip
@pytest.mark.one_in(2)
def test_ranks_that_send_something_are_not(script: str, launch) -> None:
    run = launch(script)
    assert run.wait() == 0
    assert "on its own" not in run.output()


def test_breakpoint_in_rank_0_talks_to_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nx = 6\nif os.environ['RANK'] == '0': breakpoint()\nprint('after', x)\n")
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-m", "rankwise", "run", "--nproc", "2", "script.py"])
    seen = b""

    def read_until(text: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + DEADLINE_S
        while text not in seen:
            assert time.monotonic() < deadline, seen
            seen += os.read(terminal, 4096)

    read_until(b"(Pdb) ")
    os.write(terminal, b"x = x * 7\n")
    os.write(terminal, b"continue\n")
    read_until(b"after 42")
    assert os.waitpid(pid, 0)[1] == 0
    os.close(terminal)


def test_an_explicit_port_is_used_and_a_taken_one_is_refused_before_anything_is_started(
    launch, rankwise, tmp_path: Path
) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        (tmp_path / "script.py").write_text("print('never')")
        refused = rankwise("run", "--nproc", "2", "--master-port", port, "script.py")
    assert refused.returncode == 2
    assert f"--master-port {port}: address already in use (by pid {os.getpid()}, " in refused.stderr
    assert "never" not in refused.stdout
    run = launch(
        "import os, torch.distributed as dist; dist.init_process_group('gloo'); print('port', os.environ['MASTER_PORT'])",
        options=("--nproc", "2", "--master-port", port),
    )
    assert run.wait() == 0, run.output()
    assert f"port {port}" in run.output()


def test_the_port_at_which_nodes_started_by_hand_meet_is_refused_in_one_line_where_it_is_taken(
    rankwise, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["--nnodes", "2", "--node_rank", "0", "--nproc_per_node", "1", "--master_addr", "127.0.0.1"]
        done = rankwise("run", *words, "--master_port", str(port), "train.py")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"rankwise: --master-port {port}: address already in use (by pid ")
    assert last.endswith("; choose another, the same on all nodes")


def test_of_two_launchers_that_ask_for_one_port_at_once_the_second_is_refused(launch, rankwise, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    first = launch("import time; time.sleep(600)", options=("--nproc", "1", "--master-port", port))
    first.pids()
    second = rankwise("run", "--nproc", "1", "--name", "second", "--master-port", port, str(tmp_path / "script.py"))
    assert second.returncode == 2
    assert f"--master-port {port}" in second.stderr


def test_a_launcher_that_torchrun_has_started_several_times_refuses_to_make_several_runs(rankwise, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('alone')")
    triple = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    env = {**os.environ, **triple, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    refused = rankwise("run", "--nproc", "1", "script.py", env=env)
    assert refused.returncode == 2
    assert "each would start a separate run" in refused.stderr
    assert rankwise("run", "--nproc", "1", "--allow-independent", "script.py", env=env).stdout == "alone\n"


def test_launchers_that_mpirun_has_started_together_are_one_run_and_one_that_never_comes_is_named(
    rankwise, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])")
    tasks = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "17"}
    first, second = (
        {**os.environ, **tasks, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank} for rank in ("0", "1")
    )
    alone = rankwise("run", "--join-timeout", "1", "script.py", env=first)
    assert alone.returncode == 1
    assert "rankwise: node 1 of 2 did not join within 1 s; the first node listens on " in alone.stderr
    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(lambda env: rankwise("run", "--tee", "all", "script.py", env=env), (first, second)))
    assert [done.returncode for done in ended] == [0, 0]
    assert sorted(ended[0].stdout.splitlines()) == ["[rank 0] 0 2", "[rank 1] 1 2"]


MPICH = """
import signal, sys
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda *_: sys.exit(0))
open("joining", "w").close()
signal.pause()
"""


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_run_that_is_stopped_while_its_agents_join_has_not_succeeded_though_mpich_exits_with_0(
    launch, tmp_path: Path, signum: int, status: int
) -> None:
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(MPICH)}\n")
    mpirun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{mpirun.parent}:{os.environ['PATH']}"}
    run = launch("print('started')", options=("--on", "mpich", "-H", "a,b", "--nproc", "1"), env=environment)
    wait_for((tmp_path / "joining").exists, "mpirun")
    run.process.send_signal(signum)
    assert run.wait() == status
    assert run.output().endswith("rankwise: stopped before any rank had started\n")


def test_an_error_of_ours_is_told_once_though_every_rank_raises_it(launch) -> None:
    source = "import rankwise\nraise rankwise.RankwiseError('lr=-1: give a learning rate above 0')"
    run = launch(source, options=("--nproc", "2", "--start-method", "spawn"))  # it needs no torch
    assert run.wait() == 2
    output = run.output()
    assert output.count("lr=-1: give a learning rate above 0") == 1
    assert "rankwise: all 2 ranks raised RankwiseError: lr=-1: give a learning rate above 0 (script.py:2), on " in output
    assert "Traceback" not in output


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.one_in(2)
def test_a_dataset_that_raises_at_one_index_is_told_with_the_sample_on_the_rank_that_drew_it(launch, workers: int) -> None:
    script = f"""
import torch, rankwise
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, index):
        if index == 7:
            raise KeyError("no file for it")
        return torch.ones(3)
model = torch.nn.Linear(3, 1)
step = lambda model, x: (model(x).sum(), len(x))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = rankwise.Loader(Rows(), global_batch_size=4, num_workers={workers})
rankwise.Trainer(model, optimizer, step, loader, max_epochs=1).fit()
"""
    run = launch(script)
    assert run.wait() == 1
    output = run.output()
    failure = run.run.read_failure()
    assert failure is not None
    assert "raised KeyError: 'no file for it'" in failure.summary
    assert "in sample 7 of Rows" in failure.summary
    assert failure.summary in output
    assert "Connection" not in output
