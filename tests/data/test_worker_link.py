"""What goes between the training process and its loader workers, and what each notices of the death of the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import wait_for
from ranks import on_ranks
from test_ring import Rows, batches
from torch.utils.data import DataLoader, _utils
from torch.utils.data._utils import worker

from rankwise.data.prefetch import _Nothing
from rankwise.data.ring import Ring
from rankwise.data.worker_link import WorkerContext, WorkerLink, _Flag, _limit


def answers(message: Any, empty: Any) -> Any:
    return ["answer to", message]


def started(work: Callable[[Any, Any], Any], workers: int = 1, method: str = "fork") -> tuple[Any, WorkerContext]:
    context = WorkerContext(multiprocessing.get_context(method), work, failed=repr)
    sampler: Any = []
    watch = iter(DataLoader(_Nothing(), batch_sampler=sampler, num_workers=workers, multiprocessing_context=context))
    context.started()
    return watch, context


@pytest.fixture
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks every 5 s whether the other process is there, and ends a worker that does not end itself within 5 s."""
    monkeypatch.setattr(worker, "MP_STATUS_CHECK_INTERVAL", 1000.0)
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 1000.0)


@pytest.mark.usefixtures("rarely")
def test_each_worker_answers_its_own_messages_in_order_and_ends_with_the_loop() -> None:
    watch, context = started(answers, workers=2)
    for number in range(7):
        for link in context.links:
            link.ask([number])
    for number in range(7):
        for link in context.links:
            assert link.outstanding == 7 - number
            assert link.take() == ["answer to", [number]]
    del watch
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.one_in(3)
def test_workers_may_be_started_in_any_way(method: str) -> None:
    (found,) = on_ranks(1, asked_after_a_start, method, timeout_s=240)
    assert found == ["answer to", [5]]


def asked_after_a_start(method: str) -> Any:
    watch, context = started(answers, method=method)
    context.links[0].ask([5])
    found = context.links[0].take()
    del watch
    return found


def sleeps(message: Any, empty: Any) -> Any:
    time.sleep(message[0])
    return message


def test_a_wait_with_a_limit_ends_there_and_the_answer_comes_later() -> None:
    watch, context = started(sleeps)
    context.links[0].ask([1.0])
    with pytest.raises(TimeoutError):
        context.links[0].take(timeout_s=0.05)
    assert context.links[0].take() == [1.0]
    del watch


def long_answers(message: Any, empty: Any) -> Any:
    return torch.full((50,), message[0])


@pytest.mark.usefixtures("rarely")
def test_neither_side_waits_for_the_other_if_both_have_much_to_send() -> None:
    watch, context = started(long_answers)
    for number in range(2000):
        context.links[0].ask([number])
    assert [int(context.links[0].take()[0]) for _ in range(1000)] == list(range(1000))
    del watch  # the worker waits until its next answer is taken
    assert multiprocessing.active_children() == []


# --- a worker that dies


def named(message: Any, empty: Any) -> Any:
    """Some answers need the worker's help when they are unpickled."""
    if message[0] == "exit":
        os._exit(message[1])
    return torch.ones(2, requires_grad=True)


def in_a_thread(call: Callable[[], Any]) -> str:
    """The exception of `call` in a thread that gets no signal: torch raises its own error in a handler of the main thread."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    (error,) = raised
    assert type(error) is RuntimeError, repr(error)
    return str(error)


def died(way: str) -> list[str]:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as some scripts do, so that `| head` ends them
    found = []

    def loop() -> None:
        watch, context = started(named, workers=2)
        link = context.links[1]
        worker = link._process
        link.ask([0])
        if way == "killed":
            link.take()
            worker.kill()
            worker.join()
            link.ask([0])
        elif way == "killed, answer unread":
            while not multiprocessing.connection.wait([link._here], timeout=60):
                pass
            worker.kill()
        else:
            link.take()
            link.ask(["exit", int(way)])
        found.append(str(worker.pid))
        link.take()
        del watch

    return [in_a_thread(loop), *found]


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("killed", "is killed by signal: Killed. "),
        ("killed, answer unread", "is killed by signal: Killed. "),
        ("0", "exited unexpectedly with exit code 0; num_workers=0 shows where"),
        ("3", "exited unexpectedly with exit code 3; num_workers=0 shows where"),
    ],
)
def test_a_worker_that_died_is_an_error_that_says_how(way: str, text: str) -> None:
    ((said, pid),) = on_ranks(1, died, way)
    assert said == f"DataLoader worker (pid {pid}) {text}"


def test_a_worker_that_is_killed_is_the_error_that_torch_makes_of_it() -> None:
    (said,) = on_ranks(1, of_a_killed_worker)
    assert said.startswith("DataLoader worker (pid")


def of_a_killed_worker() -> str:
    found = batches(Rows(100_000))
    next(found)
    os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    try:
        for _ in found:
            pass
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_worker_that_is_killed_at_any_place_leaves_no_lock() -> None:
    """multiprocessing's Event is read under a lock, and a worker reads it before each request."""
    context = multiprocessing.get_context("fork")
    over = _Flag()
    for _ in range(30):
        reader, writer = context.Pipe(duplex=False)
        worker = context.Process(target=reads_for_ever, args=(over, writer))
        worker.start()
        assert reader.recv() == "reads"
        worker.kill()
        worker.join()
        assert over.is_set() is False
    over.set()
    assert over.is_set() is True


def reads_for_ever(over: Any, writer: Any) -> None:
    over.is_set()
    writer.send("reads")
    while not over.is_set():
        pass


# --- a training process that dies


def trains(writer: Any, is_working: bool) -> None:
    watch, context = started(long_answers, workers=2)
    for link in context.links:
        link.ask([1])
        link.take()
        for _ in range(2000 * is_working):
            link.ask([1])  # more than the socket holds of answers
    writer.send([process.pid for process in multiprocessing.active_children()])
    time.sleep(600)
    del watch


@pytest.mark.usefixtures("rarely")
@pytest.mark.parametrize("is_working", [False, True], ids=["workers that wait", "workers that send"])
def test_workers_exit_as_soon_as_their_training_process_is_killed(is_working: bool) -> None:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    training = context.Process(target=trains, args=(writer, is_working))
    training.start()
    writer.close()
    workers = reader.recv()
    assert len(workers) == 2
    training.kill()
    training.join()
    wait_for(lambda: not any(map(is_there, workers)), "the end of the workers")


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


TRAINS = """
import multiprocessing, os, sys, time
sys.path[:0] = [{tests!r}]
from test_ring import Rows, batches
if __name__ == "__main__":
    found = batches(Rows(100_000))
    next(found), next(found)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    time.sleep(600)
"""


def shared_files(pids: list[int]) -> list[str]:
    """The shared files that these processes have created: torch names its own `torch_PID_...`."""
    return [name for name in os.listdir("/dev/shm") if set(name.split("_")) & set(map(str, pids))]


@pytest.mark.stress
def test_a_killed_training_process_leaves_no_worker_and_no_shared_file(tmp_path: Path) -> None:
    tests = str(Path(__file__).parent)
    path = tmp_path / "trains.py"
    path.write_text(TRAINS.format(tests=tests))
    environ = {**os.environ, "PYTHONPATH": f"{tests}:{Path(tests).parent}"}
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True, env=environ) as training:
        assert training.stdout is not None
        workers = list(map(int, training.stdout.readline().split()))
        training.kill()
    assert len(workers) == 2
    wait_for(lambda: not any(map(is_there, workers)), "the end of the workers")
    assert shared_files([training.pid, *workers]) == []


def test_a_worker_that_starts_after_the_death_of_its_training_exits() -> None:
    """torch's check compares the parent with the one that the worker's loop began with."""
    ring = Ring(lambda error: error)
    link = WorkerLink(ring, answers)
    link.open(None, [])  # both ends are open, as in a worker beside others
    ring._owner = os.getppid()
    link._is_working = True
    _limit(link._there, 0.01)
    with pytest.raises(queue.Empty):
        link.get(timeout=0.01)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ring._owner = gone.pid
    with pytest.raises(SystemExit):
        link.get(timeout=0.01)
    link.close()


def test_a_process_that_the_script_forks_does_not_end_the_workers_of_the_training() -> None:
    (found,) = on_ranks(1, answers_after_a_fork)
    assert found == ["answer to", [2]]


def answers_after_a_fork() -> Any:
    watch, context = started(answers)
    link = context.links[0]
    link.ask([1])
    link.take()
    if (pid := os.fork()) == 0:
        with contextlib.suppress(AssertionError):  # torch would join the workers, which are not of this process
            watch._shutdown_workers()
        os._exit(0)
    os.waitpid(pid, 0)
    link.ask([2])
    found = link.take()
    del watch
    return found
