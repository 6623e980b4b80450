"""`rankwise run` as the user sees it: real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster_runs import GATE
from launched import DEADLINE_S, FORKED, launch, left_over, wait_for
from ranks import scripts_on_ranks

from rankwise.host import processes
from rankwise.ipc.shared_page import Page
from rankwise.run.directory import RunDir

__all__ = ["launch"]  # a fixture

TRAIN = """
import sys, time, torch, rankwise
from torch.utils.data import TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
def step(model, batch):
    time.sleep(PAUSE)
    return ((model(batch[0]) - batch[1]) ** 2).sum(), len(batch[0])
trainer = rankwise.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), step, data,
                           global_batch_size=8, max_steps=STEPS, actions=[rankwise.actions.Log(1)])
state = trainer.fit()
print("weights", model.weight.tolist())
"""


def train(pause_s: float | str = 0.0, steps: int = 40) -> str:
    return TRAIN.replace("PAUSE", str(pause_s)).replace("STEPS", str(steps))


def test_files_in_the_current_folder_named_like_modules_of_python_are_not_imported(tmp_path: Path) -> None:
    for name in ("secrets", "platform", "random", "socket", "uuid", "selectors"):
        (tmp_path / f"{name}.py").write_text("raise ImportError(f'{__file__} was imported')")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("import secrets; print(len(secrets.token_hex(4)))")
    words = [sys.executable, "-m", "rankwise", "run", "--nproc", "1", "src/train.py"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


def test_every_variable_of_the_command_reaches_the_ranks_whatever_its_name(launch, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(".")
    own = {"BASH_FUNC_module%%": "() {  echo module $*\n}", "a.b-c": "1", "PWD": str(tmp_path / "link")}
    run = launch("import os, json; print(json.dumps(dict(os.environ)))", options=("--nproc", "1"), env={**os.environ, **own})
    assert run.wait() == 0
    found = json.loads(run.run.log(0).read_text())
    assert {name: found.get(name) for name in own} == own


def test_an_environment_that_is_larger_than_a_pipe_reaches_the_ranks(launch) -> None:
    large = {f"LARGE_{number}": "x" * 100_000 for number in range(12)}
    run = launch(
        "import os; print(sum(len(value) for name, value in os.environ.items() if name.startswith('LARGE_')))",
        options=("--nproc", "1", "--start-method", "spawn"), env={**os.environ, **large},
    )  # fmt: skip
    assert (run.wait(), run.run.log(0).read_text()) == (0, "1200000\n")


def test_a_rank_finds_the_whole_of_torchruns_contract(launch) -> None:
    run = launch("import os, json; print(json.dumps({k: v for k, v in os.environ.items()}))", options=("--nproc", "3"))
    assert run.wait() == 0
    for rank in range(3):
        env = json.loads(run.run.log(rank).read_text())
        assert {k: env[k] for k in ("RANK", "LOCAL_RANK", "ROLE_RANK")} == dict.fromkeys(
            ("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)
        )
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
            assert env[name] == "3"
        assert env["GROUP_RANK"] == "0"
        assert env["GROUP_WORLD_SIZE"] == "1"
        assert env["TORCHELASTIC_RESTART_COUNT"] == env["TORCHELASTIC_MAX_RESTARTS"] == "0"
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert 0 < int(env["MASTER_PORT"]) < 65536
        assert env["TORCHELASTIC_RUN_ID"]
        assert env["RANKWISE_RUN_DIR"] == str(run.run.path)
        assert [name for name in env if name.startswith("RANKWISE_")] == ["RANKWISE_RUN_DIR"]
        assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))


def test_rank_0_is_on_the_console_and_every_rank_in_its_log(launch) -> None:
    run = launch("import os, sys; print('out of', os.environ['RANK']); print('err of', os.environ['RANK'], file=sys.stderr)")
    assert run.wait() == 0
    assert "out of 0\nerr of 0\n" in run.output()
    assert "out of 1" not in run.output()
    assert run.run.log(1).read_text() == "out of 1\nerr of 1\n"


def test_logs_of_a_second_attempt_follow_those_of_the_first(launch) -> None:
    for _ in range(2):
        assert launch("print('hello')").wait() == 0
    run = launch("print('hello')")
    assert run.wait() == 0
    assert re.sub(r"=== next attempt, .*\n", "", run.run.log(0).read_text()) == "hello\n" * 3
    assert run.run.log(0).read_text().count("=== next attempt, ") == 2
    assert [attempt.life for attempt in run.run.attempts()] == [1, 2, 3]
    assert "attempt 3" in run.output()
    assert run.output().count("hello") == 1


def test_a_rank_that_raises_ends_the_others_and_is_named_with_its_traceback(launch) -> None:
    run = launch("import os, time\nif os.environ['RANK'] == '1': raise ValueError('loss is nan')\ntime.sleep(600)")
    assert run.wait() == 1
    lines = run.output().splitlines()
    assert "rank 1 raised ValueError: loss is nan (script.py:2)" in lines[-2]
    assert "rank-1.log" in lines[-1]
    assert "Traceback (most recent call last):" in run.output()
    assert "fork_server.py" not in run.output()
    failure = json.loads(run.run.failure.read_text())
    assert (failure["rank"], failure["exit_code"], failure["signal"]) == (1, 1, None)
    assert failure["exception"] == "ValueError: loss is nan"
    assert failure["traceback"].endswith("ValueError: loss is nan\n")


@pytest.mark.parametrize(
    ("death", "status", "said"),
    [
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL (often the kernel's out-of-memory killer"),
        ("import ctypes; ctypes.string_at(0)", 139, "rank 1 was killed by SIGSEGV"),
        ("os.abort()", 134, "rank 1 was killed by SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGXCPU)", 152, "rank 1 was killed by SIGXCPU (its CPU time limit"),
        ("sys.exit(3)", 3, "rank 1 exited with status 3"),
        ("resource.setrlimit(resource.RLIMIT_AS, (1 << 28, -1)); x = bytearray(1 << 32)", 1, "raised MemoryError"),
    ],
)
@pytest.mark.one_in(2)
def test_the_exit_status_is_that_of_the_rank_that_is_the_cause(launch, death: str, status: int, said: str) -> None:
    run = launch(f"import os, resource, signal, sys, time\nif os.environ['RANK'] == '1': {death}\ntime.sleep(600)")
    assert run.wait() == status
    assert said in run.output()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.one_in(2)
def test_the_path_of_the_script_stays_right_when_it_changes_its_folder(launch, tmp_path: Path, method: str) -> None:
    (tmp_path / "out").mkdir()
    lines = ["import inspect, os", "os.chdir('out')", "print(__file__, inspect.getsource(inspect.currentframe())[:6])", "1 / 0"]
    run = launch("\n".join(lines), options=("--nproc", "1", "--start-method", method))
    assert run.wait() == 1
    assert run.run.log(0).read_text().splitlines()[0] == f"{tmp_path / 'script.py'} import"
    assert "    1 / 0\n" in run.output()
    assert "rank 0 raised ZeroDivisionError: division by zero (script.py:4)" in run.output()


def test_what_a_process_raises_that_the_script_has_forked_is_not_the_ranks(launch) -> None:
    lines = [
        "import os, sys", "if (child := os.fork()) == 0: raise ValueError('of the child')",
        "print('child', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))", "sys.exit(3)",
    ]  # fmt: skip
    run = launch("\n".join(lines), options=("--nproc", "1"))
    assert run.wait() == 3
    assert "ValueError: of the child" in run.run.log(0).read_text()
    assert "child 1\n" in run.output()
    assert "rank 0 exited with status 3" in run.output()
    assert "raised" not in run.output()


BLAS = """
import ctypes, numpy, re, torch
[path] = {line.split(maxsplit=5)[-1].rstrip() for line in open("/proc/self/maps") if re.search("openblas", line)}
print("threads", ctypes.CDLL(path).scipy_openblas_get_num_threads64_(), torch.get_num_threads())
"""


def test_numpy_has_as_many_threads_as_the_first_line_says_also_in_a_forked_rank(launch) -> None:
    run = launch(BLAS, options=(*FORKED[:1], "1", *FORKED[2:]), env={**os.environ, "OMP_NUM_THREADS": "3"})
    assert run.wait() == 0
    assert ", 3 threads each" in run.output()
    assert run.run.log(0).read_text() == "threads 3 3\n"


def test_another_node_says_where_the_reason_is(launch, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    source = "import os, time\nif os.environ['RANK'] == '0' and not os.path.exists('wait'): os._exit(9)\ntime.sleep(600)"
    for killed in (False, True):
        if killed:
            (tmp_path / "wait").touch()
            shutil.rmtree(tmp_path / "runs")
        words = ("--nproc", "1", "--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--node-rank")
        first = launch(source, options=(*words, "0"))
        command = [sys.executable, "-m", "rankwise", "run", *words, "1", "script.py"]
        second = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if killed:
            first.pids()
            for pid in (first.process.pid, first.agent()):
                processes.send(pid, signal.SIGKILL)
        try:
            said = second.communicate(timeout=DEADLINE_S)[1]
        finally:
            second.kill()
        first.wait()  # the next one uses its port
        assert second.returncode == (1 if killed else 9)
        assert f"rankwise: the run has ended with exit status {second.returncode}; the reason is in the output of the" in said
        assert ("rankwise: the first node was lost: " in said) == killed


def test_a_rank_that_ignores_sigterm_is_killed_soon(launch) -> None:
    run = launch(
        "import os, signal, time, pathlib\n"
        "if os.environ['RANK'] == '0':\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    pathlib.Path('deaf').touch()\n"
        "else:\n    while not os.path.exists('deaf'): time.sleep(0.01)\n    os._exit(3)\n"
        "time.sleep(600)"
    )
    wait_for((run.folder / "deaf").exists, "the rank that ignores it")
    assert run.wait() == 3  # it is asked to stop after 3 s; by itself it would take ten minutes


def test_a_failure_of_an_earlier_attempt_is_forgotten_by_the_next(launch) -> None:
    assert launch("raise SystemExit(4)").wait() == 4
    run = launch("print('well')")
    assert run.wait() == 0
    assert not run.run.failure.exists()


def test_a_rank_is_a_normal_script(launch, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 7\n")
    run = launch(
        """
import atexit, multiprocessing, os, pickle, sys, threading, time
import beside
class Thing: pass
def child(queue): queue.put(__name__)
def late():
    time.sleep(0.05)
    print("a thread was waited for")
if __name__ == "__main__":
    assert sys.modules["__main__"].__dict__ is globals()
    assert __file__ == sys.argv[0] and sys.argv[1:] == ["--nproc", "x", "a b"], sys.argv
    assert sys.path[0] == os.path.dirname(os.path.realpath(__file__))
    assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        assert queue.get() == ("__main__" if method == "fork" else "__mp_main__")
        process.join()
    atexit.register(print, "atexit ran")
    threading.Thread(target=late).start()
    left_open = open(f"unflushed-{os.environ['RANK']}", "w")
    left_open.write("x" * 100)
    print("value", beside.value)
""",
        "--nproc", "x", "a b",
    )  # fmt: skip
    assert run.wait() == 0, run.output()
    for rank in range(2):
        assert run.run.log(rank).read_text() == "value 7\na thread was waited for\natexit ran\n"
        assert (tmp_path / f"unflushed-{rank}").read_text() == "x" * 100


def test_random_numbers_differ_between_ranks_where_they_do_in_fresh_processes(launch) -> None:
    run = launch("import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())")
    assert run.wait() == 0
    first, second = (run.run.log(rank).read_text().split() for rank in range(2))
    assert set(first).isdisjoint(second)


def test_a_script_that_sets_variables_before_it_imports_torch_is_obeyed_and_that_is_said(launch) -> None:
    run = launch(
        "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\nprint('threads', torch.get_num_threads())",
        options=("--nproc", "1", "--start-method", "fork"),
    )
    assert run.wait() == 0
    assert "line 2 sets environment variables before torch is imported: each rank imports torch separately" in run.output()
    assert run.run.log(0).read_text() == "threads 2\n"


@pytest.mark.stress
def test_a_folder_named_like_a_library_beside_the_script_does_no_harm(launch, tmp_path: Path) -> None:
    (tmp_path / "sympy").mkdir()
    (tmp_path / "sympy" / "__init__.py").write_text("raise ImportError('this is no sympy')")
    run = launch("import torch; torch.optim; print('ran')", options=("--nproc", "1"))
    assert run.wait() == 0
    assert "ran" in run.output()
    assert "this is no sympy" in run.output()


def test_the_warm_process_has_one_thread(launch, tmp_path: Path) -> None:
    run = launch(
        "import os, time\nopen(f'ready-{os.environ[\"RANK\"]}', 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n",
        options=FORKED,
    )
    wait_for(lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists(), "ranks")
    ranks = run.pids()
    [warm] = [pid for pid in processes.children(run.agent()) if pid not in ranks]
    assert len(os.listdir(f"/proc/{warm}/task")) == 1
    (tmp_path / "go").touch()
    assert run.wait() == 0


@pytest.mark.stress
@pytest.mark.parametrize(
    "start",
    [
        pytest.param("", id="forked"),
        pytest.param("import os; os.environ['X'] = 'cold'\n", id="by itself"),
    ],
)
def test_dropping_a_model_after_its_group_was_destroyed_cannot_dead_lock_in_gloo(launch, start: str) -> None:
    run = launch(
        start
        + """
import os, torch, torch.distributed as dist
from torch.distributed import destroy_process_group
def main():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    before = len(os.listdir("/proc/self/task"))
    destroy_process_group()
    return before
before = main()
print("threads joined:", before - len(os.listdir("/proc/self/task")), dist.is_initialized())
"""
    )
    assert run.wait() == 0, run.output()
    assert run.run.log(1).read_text() == "threads joined: 0 False\n"  # to join them sometimes hangs


@pytest.mark.parametrize("victim", ["launcher", "agent", "warm", "everything"])
def test_nothing_is_left_whoever_is_killed(launch, tmp_path: Path, victim: str) -> None:
    run = launch(
        "import os, subprocess, time\nsubprocess.Popen(['sleep', '612'], start_new_session=True, env={**os.environ})\n"
        "open(f'ready-{os.environ[\"RANK\"]}', 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n",
        options=FORKED if victim in ("warm", "everything") else ("--nproc", "2"),
    )
    wait_for(lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists(), "ranks")
    ranks = run.pids()
    agent = run.agent()
    victims = {"launcher": [run.process.pid], "agent": [agent], "warm": sorted({*processes.children(agent)} - {*ranks})}
    assert len(victims["warm"]) == (victim in ("warm", "everything"))
    for pid in victims.get(victim, [*processes.descendants(run.process.pid), run.process.pid]):
        processes.send(pid, signal.SIGKILL)
    if victim == "warm":
        (tmp_path / "go").touch()
        assert run.wait() == 0  # the ranks have started and do not need it any more
    elif victim == "agent":
        assert run.wait() == 128 + 9
        assert "the agent was killed by SIGKILL" in run.output()
    else:
        run.process.wait()
    wait_for(lambda: not left_over(tmp_path), "an empty ps")


def test_ctrl_c_stops_all_ranks_after_the_same_step_and_the_resumed_run_ends_as_one_that_was_never_stopped(launch) -> None:
    Path("whole.py").write_text(train(steps=100))
    weights = re.search(r"weights .*", scripts_on_ranks(2, "whole.py")[0].stdout)
    run = launch(train(pause_s=0.02, steps=100))
    wait_for(lambda: run.steps() >= 5, "some steps")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    [saved] = run.run.checkpoints.iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert f"stopped by SIGINT after step {step}; to resume, type: rankwise run --nproc 2 " in run.output()
    assert "Traceback" not in run.output()
    again = launch(train(steps=100))
    assert again.wait() == 0
    assert f"resuming from step {step} " in again.output()
    steps = [record["step"] for record in again.run.read_metrics()]
    assert steps == list(range(1, 101))
    assert {record["life"] for record in again.run.read_metrics() if record["step"] > step} == {2}
    assert weights is not None
    assert weights[0] in again.output()


@pytest.mark.stress
def test_a_signal_to_one_rank_stops_all_and_saves(launch) -> None:
    run = launch(train(pause_s=0.02, steps=100), options=("--nproc", "3"))
    wait_for(lambda: run.steps() >= 3, "some steps")
    os.kill(run.pids()[1], signal.SIGTERM)
    assert run.wait() == 75
    assert "stopped by SIGTERM after step" in run.output()
    assert len(list(run.run.checkpoints.glob("step-*"))) == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.one_in(2)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(launch, tmp_path: Path, signum: int) -> None:
    run = launch(GATE, options=("--nproc", "3"))
    wait_for(lambda: len(list(tmp_path.glob("joined-*"))) == 3, "the loop")
    os.kill(run.pids()[1], signum)
    assert run.wait() == (130 if signum == signal.SIGINT else 75)
    assert len({(tmp_path / f"stopped-{rank}").read_text() for rank in range(3)}) == 1


LOADS = """
import os, time, rankwise
rank = os.environ["RANK"]
open(f"loading-{rank}", "w").close()
while not os.path.exists("go"): time.sleep(0.01)
"""


def loading(run, tmp_path: Path) -> None:
    wait_for(lambda: (tmp_path / "loading-0").exists() and (tmp_path / "loading-1").exists(), "ranks that load")
    run.pids()


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.stress)])
def test_a_request_while_the_script_loads_is_answered_at_its_first_step(launch, tmp_path: Path, signum: int) -> None:
    run = launch(LOADS + train(pause_s=0.01, steps=100_000))
    loading(run, tmp_path)
    run.process.send_signal(signum)
    name = signal.Signals(signum).name
    said = f"{name}: ranks 0, 1 will stop at the first step within 120 s"
    wait_for(lambda: said in run.output(), "what it says", run.output)
    (tmp_path / "go").touch()
    assert run.wait() == 75, run.output()
    [saved] = run.run.saved()
    assert f"stopped by {name} after step {int(saved.removeprefix('step-'))}; to resume" in run.output()


def test_a_grace_that_ends_while_the_script_loads_has_lost_nothing(launch, tmp_path: Path) -> None:
    run = launch(LOADS + "rankwise.Trainer", options=("--start-method", "spawn", "--nproc", "2", "--grace", "0.5"))
    loading(run, tmp_path)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75
    assert "stopped by SIGTERM before the first step: nothing is lost" in run.output()
    assert not run.run.failure.exists()


def test_a_rank_that_is_ended_before_it_can_remember_takes_those_that_load_along(launch, tmp_path: Path) -> None:
    source = LOADS.replace("import os, time, rankwise", "import os, time\nif os.environ['RANK'] == '0': import rankwise")
    run = launch(source + "rankwise.Trainer", options=("--start-method", "spawn", "--nproc", "2"))
    loading(run, tmp_path)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75  # at once, although the grace is two minutes
    assert "stopped by SIGTERM before the first step: nothing is lost" in run.output()


def test_a_script_that_fails_while_it_loads_has_failed_though_a_stop_was_asked_for(launch, tmp_path: Path) -> None:
    source = LOADS + "if rank == '1': raise ValueError('no data')\ntime.sleep(600)\nrankwise.Trainer"
    run = launch(source, options=("--start-method", "spawn", "--nproc", "2"))
    loading(run, tmp_path)
    run.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "will stop at the first step" in run.output(), "the request to be passed on")
    (tmp_path / "go").touch()
    assert run.wait() == 1
    assert "rank 1 raised ValueError: no data" in run.output()


@pytest.mark.parametrize("moment", ["the run directory", "the agent"])
def test_ctrl_c_as_a_run_begins_ends_it_without_a_traceback_of_ours(launch, moment: str) -> None:
    run = launch("import time; time.sleep(600)")
    wait_for(run.run.path.exists if moment == "the run directory" else run.agent, moment)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert str(Path(processes.__file__).parent) not in run.output()  # a traceback of ours
    assert "was killed by" not in run.output()


def test_ctrl_c_while_the_command_itself_is_imported_ends_it_without_a_word(tmp_path: Path) -> None:
    """In the first import after ours."""
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "rankwise", "run", "x.py"], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_reaches_what_a_rank_waits_for_and_it_is_said_how_long_that_may_take(launch, tmp_path: Path) -> None:
    source = """
import multiprocessing, time
def work():
    open("works", "w").close()
    time.sleep(600)
process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join()
"""
    run = launch(source, options=("--nproc", "1"))
    wait_for((tmp_path / "works").exists, "the process of its own")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130  # although the grace is two minutes
    assert "SIGINT is passed on to rank 0, which must exit within 120 s" in run.output()
    assert "interrupted again" not in run.output()


def test_ranks_that_hang_when_they_are_asked_to_stop_are_reported_soon(launch, tmp_path: Path) -> None:
    run = launch(GATE.replace("time.sleep(0.01 * (1 + world.rank))", "time.sleep(600)"))
    wait_for(lambda: len(list(tmp_path.glob("joined-*"))) == 2, "the loop")
    run.process.send_signal(signal.SIGINT)
    wait_for(lambda: "so no rank can stop yet: rank 0 is at script.py:" in run.output(), "the report")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130


def test_a_script_without_our_parts_gets_the_signal_itself_on_every_rank(launch, tmp_path: Path) -> None:
    run = launch(
        "import os, signal, sys, time\n"
        "def handler(*_):\n    print('heard'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, handler)\nopen(f'ready-{os.environ[\"RANK\"]}', 'w').close()\ntime.sleep(600)"
    )
    wait_for(lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists(), "ranks")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0
    assert [run.run.log(rank).read_text() for rank in range(2)] == ["heard\n"] * 2


def test_a_second_ctrl_c_kills(launch, tmp_path: Path) -> None:
    run = launch(
        "import os, signal, time\nsignal.signal(signal.SIGINT, lambda *_: print('no'))\n"
        "open(f'ready-{os.environ[\"RANK\"]}', 'w').close()\nwhile True: time.sleep(600)"
    )
    wait_for(lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists(), "ranks")
    run.process.send_signal(signal.SIGINT)
    wait_for(lambda: "no" in run.run.log(1).read_text(), "the first to be heard")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "interrupted again" in run.output()


def test_ranks_that_do_not_stop_within_the_grace_are_killed(launch, tmp_path: Path) -> None:
    run = launch(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(f'ready-{os.environ[\"RANK\"]}', 'w').close()\ntime.sleep(600)",
        options=("--nproc", "2", "--grace", "0.5"),
    )
    wait_for(lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists(), "ranks")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 137
    assert run.output().count("did not stop within 0.5 s: killed") == 1
    assert "ranks 0, 1 did not stop" in run.output()
    assert "out-of-memory" not in run.output()


@pytest.mark.stress  # the grace: above, with ranks that import no torch
def test_a_training_that_does_not_stop_within_the_grace_is_not_mistaken_for_a_failure(launch) -> None:
    run = launch(train(pause_s=20.0, steps=100), options=("--nproc", "2", "--grace", "0.5"))
    wait_for(lambda: run.run.attempts() and run.pids() and "global batch" in run.output(), "the loop")
    run.process.send_signal(signal.SIGTERM)
    status = run.wait()
    assert status in (137, 143)  # 143 if it arrived before the first step
    assert not run.run.failure.exists()
    assert "out-of-memory" not in run.output()


def test_a_stop_while_torch_is_being_imported_ends_the_run_at_once(launch) -> None:
    run = launch("import time; time.sleep(600)", options=FORKED)
    wait_for(lambda: run.run.world.exists(), "the agent")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130


def test_a_run_that_nohup_has_started_goes_on_when_the_terminal_closes(launch, tmp_path: Path) -> None:
    wait = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\nprint('went on')"
    run = launch(wait, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    for pid in (*run.pids(), run.agent(), run.process.pid):
        processes.send(pid, signal.SIGHUP)
    time.sleep(0.3)
    (tmp_path / "go").touch()
    assert run.wait() == 0
    assert run.run.log(1).read_text() == "went on\n"


def test_the_run_directory_of_a_live_run_is_refused_with_who_holds_it(launch, rankwise, tmp_path: Path) -> None:
    run = launch("import time; time.sleep(600)")
    run.pids()
    second = rankwise("run", "--nproc", "2", str(tmp_path / "script.py"), cwd=tmp_path)
    assert second.returncode == 2
    assert f"is still running: pid {run.process.pid} on " in second.stderr
    assert "--name" in second.stderr
    fresh = rankwise("run", "--fresh", str(tmp_path / "script.py"), cwd=tmp_path)
    assert fresh.returncode == 2
    assert run.process.poll() is None


def test_fresh_moves_the_older_run_aside(launch, tmp_path: Path) -> None:
    first = launch("print('first')")
    assert first.wait() == 0
    run = launch("print('second')", options=("--nproc", "2", "--fresh"))
    assert run.wait() == 0
    assert "the older run was moved to runs/script." in run.output()
    assert run.run.log(0).read_text() == "second\n"
    assert [attempt.life for attempt in run.run.attempts()] == [1]
    assert len(list((tmp_path / "runs").iterdir())) == 2


SEVERAL = """
import sys, torch, rankwise

def step(model, batch):
    return model(batch).sum(), len(batch)

def trained(seed, steps, **given):
    torch.manual_seed(seed)
    model = given.pop("model", None) or torch.nn.Linear(1, 1)
    data = [torch.ones(1)] * 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = rankwise.Trainer(model, optimizer, step, data, global_batch_size=4, max_steps=steps, **given).fit()
    print("trained", seed, state.step, model.bias.item(), flush=True)
    return model

for fold in (1, 2):
    trained(fold, 3, checkpoints=rankwise.Checkpoints(f"{sys.argv[1]}/fold-{fold}"))
first = trained(3, 3)
trained(4, 6, model=first)
trained(5, 3)
"""


@pytest.mark.stress
def test_models_that_one_script_trains_have_separate_checkpoints_or_are_refused(launch, tmp_path: Path) -> None:
    trained: list[list[str]] = []
    for options in ((), ("--fresh",), ()):
        run = launch(SEVERAL, str(tmp_path / "folds"), options=("--nproc", "1", *options))
        assert run.wait() == 2
        assert "runs/script/checkpoints has the checkpoints of another model that this script has trained" in run.output()
        trained.append(re.findall(r"trained (\d \d .*)", run.run.log(0).read_text()))
    assert [line[:3] for line in trained[1]] == ["1 3", "2 3", "3 3", "4 6"]
    assert trained[1] == trained[0]  # by --fresh everything is trained again, each part once
    assert trained[2][:4] == trained[1]
    assert [line[:3] for line in trained[2][4:]] == ["1 3", "2 3", "3 6", "4 6"]  # resumed, and already done
    for fold in ("fold-1", "fold-2"):
        there = {path.name for path in (tmp_path / "folds" / fold).iterdir() if path.name[0] != "."}
        assert there == {"old-1", "step-00000003"}


IN_A_THREAD = """
import os, signal, sys, threading
import torch, rankwise

def train():
    model = torch.nn.Linear(1, 1)
    loss = lambda model, batch: (model(batch).sum(), len(batch))
    kill = lambda state: state.step == 3 and rankwise.is_main() and os.kill(os.getpid(), signal.SIGTERM)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = rankwise.Trainer(model, optimizer, loss, [torch.ones(1)] * 8, global_batch_size=4, max_steps=400, actions=[kill])
    try:
        trainer.fit()
    except rankwise.errors.Stopped as stopped:
        print("stopped after", trainer.state.step, "status", stopped.code, flush=True)

thread = threading.Thread(target=train)
thread.start()
thread.join()
print("and now", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("never", flush=True)
"""


@pytest.mark.stress  # a stop that is heard in the main thread: tests/stop
def test_a_training_in_a_thread_stops_by_a_signal_and_afterwards_a_signal_has_its_usual_effect(launch) -> None:
    run = launch(IN_A_THREAD, options=("--nproc", "2"))
    run.wait()
    logs = [run.run.log(rank).read_text() for rank in range(2)]
    steps = [re.findall(r"stopped after (\d+) status 75\nand now\n$", log) for log in logs]
    assert steps[0] == steps[1] != [], logs
    assert 3 <= int(steps[0][0]) < 400


USES = """
import os
import torch, rankwise
rankwise.init()
if "FAILS" in os.environ and not os.path.exists("failed"):
    open("failed", "w").close()
    raise OSError("before the first use")
model = torch.nn.Linear(1, 1)
for name in ("one", "two"):
    checkpoints = rankwise.Checkpoints(f"{name}/ck", background=False)
    step = checkpoints.resume({"model": model})
    print(name, "resumed from", step, flush=True)
    checkpoints.save({"model": model}, step + 1)
    if os.environ.get("KILLED") == name:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.stress
def test_a_run_from_scratch_sets_aside_each_folder_of_checkpoints_at_its_first_use_in_any_attempt(launch, tmp_path) -> None:
    def steps(*options: str, status: int = 0, **environ: str) -> list[int]:
        run = launch(USES, options=("--nproc", "1", *options), env={**os.environ, **environ})
        assert run.wait() == status
        return [int(step) for step in re.findall(r"resumed from (\d)", run.run.log(0).read_text())]

    assert steps() == [0, 0]
    assert steps() == [0, 0, 1, 1]
    assert steps("--fresh", "--max-restarts", "1", FAILS="1") == [0, 0]
    assert steps("--fresh", status=137, KILLED="one") == [0]
    assert steps() == [0, 1, 0]


@pytest.mark.stress  # a checkpoint of a killed run: tests/checkpoint; the resume: above
def test_a_run_killed_with_everything_goes_on_from_its_last_checkpoint(launch) -> None:
    saves = "max_steps=100, checkpoints=rankwise.Checkpoints(every_s=0.1)"
    run = launch(train(pause_s=0.02, steps=100).replace("max_steps=100", saves))
    wait_for(lambda: list(run.run.checkpoints.glob("step-*")), "a checkpoint")
    for pid in [*processes.descendants(run.process.pid), run.process.pid]:
        processes.send(pid, signal.SIGKILL)
    run.process.wait()
    again = launch(train(steps=100))
    assert again.wait() == 0
    assert "resuming from step" in again.output()
    assert {record["step"] for record in again.run.read_metrics()} == set(range(1, 101))


def test_a_console_that_closes_does_not_touch_the_run(launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("for i in range(20000): print('line', i)\n")
    command = f"{shlex.quote(sys.executable)} -m rankwise run --nproc 2 {script} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0
    log = (tmp_path / "runs" / "script" / "logs" / "rank-0.log").read_text()
    assert log == "".join(f"line {i}\n" for i in range(20000))


def test_two_ranks_reach_the_losses_of_one_with_the_same_global_batch(tmp_path: Path) -> None:
    losses = []
    for n in (1, 2):
        (tmp_path / str(n)).mkdir()
        os.chdir(tmp_path / str(n))
        Path("script.py").write_text(train())
        assert [done.returncode for done in scripts_on_ranks(n, "script.py")] == [0] * n
        losses.append([record["loss"] for record in RunDir(Path("runs", "script")).read_metrics()])
    assert len(losses[0]) == 40
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_same_script_runs_as_plain_python(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(train(steps=10))
    [done] = scripts_on_ranks(1, "script.py")
    assert done.returncode == 0, done.stdout
    assert "done: 10 steps" in done.stdout
    assert (tmp_path / "runs" / "script" / "checkpoints" / "step-00000010" / "manifest.json").exists()
    assert not (tmp_path / "runs" / "script" / "lease.json").exists()


def test_ctrl_c_to_plain_python_stops_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(train(pause_s=0.02, steps=200))
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    run = RunDir(tmp_path / "runs" / "script")
    wait_for(lambda: len(run.read_metrics()) > 3, "some steps")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert f"to resume, type:\n  {shlex.quote(sys.executable)} script.py\n" in out
    assert err == ""


def test_an_error_of_the_users_is_one_message_in_a_rank_too(launch) -> None:
    run = launch("import rankwise\nrankwise.Loader(None, batch_size=1)")
    assert run.wait() == 2
    assert "Traceback" not in run.output()
    assert "NoneType has no length; give a dataset with __len__" in run.output()
    assert "script.py:2" in run.output()


def test_the_page_vanishes_with_the_agent() -> None:
    page = Page.create(2)
    assert Path(page.path).exists()


def test_a_run_belongs_to_one_script_and_other_arguments_are_said(launch, rankwise, tmp_path: Path) -> None:
    assert launch("print('first')", "--lr", "0.1").wait() == 0
    (tmp_path / "other.py").write_text("print('other')")
    refused = rankwise("run", "--nproc", "1", "--name", "script", "other.py")
    assert refused.returncode == 2
    assert "the run in runs/script belongs to " in refused.stderr
    assert "--name NAME" in refused.stderr
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "script.py").write_text("print('other')")
    refused = rankwise("run", "--nproc", "1", "two/script.py")
    assert refused.returncode == 2
    assert re.search(r"belongs to \S*script.py, and this is two/script.py; give this run another name", refused.stderr)
    again = launch("print('first')", "--lr", "0.01")
    assert again.wait() == 0
    assert "--lr 0.1`, now as `" in again.output()
    assert launch("print('first')", "--lr", "0.01").wait() == 0


@pytest.mark.stress
def test_a_second_ctrl_c_in_a_training_is_no_failure(launch) -> None:
    run = launch(train(pause_s="3.0 if trainer.state.step else 0.0", steps=100))
    wait_for(lambda: run.steps() >= 1, "a step")
    run.process.send_signal(signal.SIGINT)
    wait_for(
        lambda: "SIGINT: all ranks stop after the current step, and save, within 120 s\n" in run.output(),  # no terminal
        "an answer",
    )
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "killed by a second Ctrl-C" in run.output()
    assert not run.run.failure.exists()


def test_a_rank_that_leaves_without_an_exception_has_its_last_lines_shown(launch) -> None:
    run = launch("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('need a data folder')\ntime.sleep(600)")
    assert run.wait() == 1
    assert "  need a data folder\nrankwise: rank 1 exited with status 1" in run.output()


def test_forgetting_to_join_is_an_error_and_no_lonely_training() -> None:
    attached = "rankwise.AllReduce().attach(model, torch.optim.SGD(model.parameters()))"
    Path("train.py").write_text(f"import rankwise, torch\nmodel = torch.nn.Linear(2, 2)\n{attached}")
    for rank in scripts_on_ranks(2, "train.py"):
        assert rank.returncode == 1
        assert "has not joined the others; call rankwise.init() first" in rank.stdout


LISTENS = """
import psutil, rankwise, torch.distributed as dist
for again in range(2):
    world = rankwise.init()
    rankwise.barrier()
    found = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == world.master_port and not c.raddr}
    print("store", sorted(found), flush=True)
    dist.destroy_process_group()
"""


def test_the_store_of_a_run_on_one_machine_listens_on_loopback_alone_and_once_more_after_it_was_destroyed(launch) -> None:
    run = launch(LISTENS)
    assert run.wait() == 0, run.output()
    assert run.run.log(0).read_text() == "store ['127.0.0.1']\n" * 2
    assert run.run.log(1).read_text() == "store []\n" * 2
