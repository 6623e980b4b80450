"""The agreed stop without our agent: ranks of torchrun, mpirun or a shell on one node operate the gate themselves."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launched import wait_for
from ranks import on_ranks, scripts_on_ranks, torchrun

from rankwise import StopSignal
from rankwise.dist import comm, discover
from rankwise.errors import ConfigError
from rankwise.ipc.shared_page import Page
from rankwise.run.directory import RunDir
from rankwise.stop import coordinator
from rankwise.stop import signal as stop_signal


def loop(who: int | tuple[int, ...], signum: int, at: int, together: bool, steps: int = 100_000) -> tuple[int, int]:
    """(steps done when all stopped, the signal). `who` gets the signal in step `at`. `together`: with a collective per step."""
    signals = StopSignal()
    step = 0
    while not signals.agreed(step) and step < steps:
        step += 1
        if step == at and comm.rank() in (who if isinstance(who, tuple) else (who,)):
            os.kill(os.getpid(), signum)
        if together:
            comm.all_reduce(torch.ones(1))
        elif step >= at:
            time.sleep(random.random() * 0.004)
    signals.finish()
    done = comm.all_gather_object(step)  # like a save
    assert len(set(done)) == 1
    signals.leave()
    return step, signals.signum


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("who", "signum"), [(0, signal.SIGTERM), (2, signal.SIGUSR1), (1, signal.SIGUSR2), (2, signal.SIGINT)])
@pytest.mark.one_in(3)
def test_a_signal_to_one_rank_stops_all_after_the_same_step_without_an_agent(who: int, signum: int, together: bool) -> None:
    answers = on_ranks(3, loop, who, signum, 20, together)
    assert len(set(answers)) == 1
    step, received = answers[0]
    assert step >= 20
    assert received == signum


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("who", [0, 1, 2, 3])
@pytest.mark.one_in(3)
def test_a_signal_to_one_rank_stops_all_nodes_after_the_same_step_without_an_agent(who: int, together: bool) -> None:
    answers = on_ranks(4, loop, who, signal.SIGUSR1, 20, together, environ=[torchrun(r, 4, 2) for r in range(4)])
    assert len(set(answers)) == 1
    step, received = answers[0]
    assert step >= 20
    assert received == signal.SIGUSR1


def test_signals_on_two_nodes_at_once_are_one_stop() -> None:
    answers = on_ranks(4, loop, (0, 3), signal.SIGTERM, 20, False, environ=[torchrun(r, 4, 2) for r in range(4)])
    assert len(set(answers)) == 1


def test_nodes_that_do_not_reach_each_other_say_so_and_signals_are_left_alone() -> None:
    answers = on_ranks(2, out_of_reach, environ=[torchrun(r, 2, 1) for r in range(2)])
    assert answers == [True, True]


def out_of_reach() -> bool:
    """Whether this process has its own signal handlers."""

    def knock(*_: object) -> None:
        raise coordinator.NobodyThere("10.0.0.1, port 1: no route to host")

    coordinator.knock, coordinator._MEET_S = knock, 0.2  # type: ignore[assignment]
    signals = StopSignal()
    assert not signals.agreed(0)
    return signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def alarmed(together: bool) -> list[tuple[int, list[int]]]:
    """(steps done, which) of the alarms that a rank notices, until each has come twice."""
    signals = StopSignal()
    heard: list[tuple[int, list[int]]] = []
    step = 0

    def hear(which: list[int]) -> None:
        heard.append((step, which))
        signals.again(which)

    signals.alarm([0.1, 0.25], hear)
    while not signals.agreed(step):
        step += 1
        if together:
            comm.all_reduce(torch.ones(1))
        time.sleep(random.random() * 0.01)
        if comm.rank() == 0 and sum(1 in which for _, which in heard) >= 2:
            signals.ask()
    signals.finish()
    comm.barrier()
    signals.leave()
    return heard


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 2), (4, 2)], ids=["alone", "one node", "two nodes"])
def test_a_time_that_is_over_is_heard_after_the_same_step_on_all_ranks(ranks: int, per_node: int, together: bool) -> None:
    environ = [torchrun(r, ranks, per_node) for r in range(ranks)] if ranks > 1 else None
    first, *others = on_ranks(ranks, alarmed, together, environ=environ)
    assert others == [first] * (ranks - 1)
    assert {place for _, which in first for place in which} == {0, 1}


def pages_left_by_loops() -> int:
    """How many pages are open in this process after some loops; the thread that keeps a gate needs a moment to end."""

    def pages() -> int:
        found = 0
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # a thread has closed it since it was listed
                found += "rankwise-page" in str(fd.readlink())
        return found

    def loop() -> None:
        with StopSignal() as stop:
            assert sum(1 for _ in stop.steps(range(3))) == 3

    for _ in range(5):
        loop()
    deadline = time.monotonic() + 30
    while pages() and time.monotonic() < deadline:
        time.sleep(0.01)
    return pages()


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 2), (2, 1)], ids=["one node", "two nodes"])
def test_a_loop_that_is_over_leaves_no_open_file(ranks: int, per_node: int) -> None:
    """A search that trains hundreds of models in one process would run out of them."""
    environ = [torchrun(r, ranks, per_node) for r in range(ranks)]
    assert on_ranks(ranks, pages_left_by_loops, environ=environ) == [0] * ranks


def in_a_block(how: str, at: int) -> tuple[str, int, int, bool]:
    """(how it ended, its steps, its last one, whether the process has its own handlers again): SIGTERM to rank 1, or an
    error."""
    step, began = 5, 5
    ended = "at the end"
    try:
        with StopSignal() as stop:
            for step, number in stop.steps(range(20 if how in ("end", "error") else 100_000), step):
                assert step == began + number + 1
                if step == at and comm.rank() == comm.world_size() - 1 and how == "signal":
                    os.kill(os.getpid(), signal.SIGTERM)
                if step == at and how == "interrupt":
                    os.kill(os.getpid(), signal.SIGINT)
                if step == at and how == "error":
                    raise ValueError("of the body")
                comm.barrier()
            assert signal.getsignal(signal.SIGTERM) == stop._on_signal  # a save here is not cut short
    except SystemExit as error:
        ended = f"stopped with {error.code}"
    except ValueError as error:
        ended = str(error)
    return ended, step - began, step, signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_ends_with_its_data_its_error_or_an_agreed_stop_that_it_raises(ranks: int) -> None:
    ends = {how: on_ranks(ranks, in_a_block, how, 9) for how in ("end", "signal", "interrupt", "error")}
    assert ends["end"] == [("at the end", 20, 25, True)] * ranks
    assert ends["error"] == [("of the body", 4, 9, True)] * ranks
    for how, status in (("signal", 75), ("interrupt", 130)):
        (stopped, steps, last, _), *others = ends[how]
        assert (stopped, last) == (f"stopped with {status}", 5 + steps)
        assert steps >= 4
        assert all(other[:3] == (stopped, steps, last) for other in others)


def test_a_stop_signal_sends_nothing_before_it_is_used_and_needs_no_world() -> None:
    signals = StopSignal()
    assert (signals.signum, signals.has_gate) == (0, False)
    with pytest.raises(ConfigError, match=r"StopSignal\(world\): leave it out; rankwise.init\(\) is called"):
        StopSignal(discover({}))  # type: ignore[call-arg, misc]
    for wrong in ({"batches": 5}, {"batches": [], "done": -1}):
        with pytest.raises(ConfigError, match=r"^steps\((batches=5|done=-1)\): give"):
            signals.steps(**wrong)  # type: ignore[arg-type]


def asked(who: tuple[int, ...], together: bool) -> tuple[int, int, bool]:
    """(steps done, signal, whether a script has requested it); these ranks request a stop after step 20."""
    signals = StopSignal()
    step = 0
    while not signals.agreed(step):
        step += 1
        if together:
            comm.all_reduce(torch.ones(1))
        if step == 20 and comm.rank() in who:
            signals.ask()
        time.sleep(0.002)
    signals.finish()
    comm.barrier()
    signals.leave()
    return step, signals.signum, signals.by_script


@pytest.mark.parametrize("who", [(0,), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("per_node", [4, 2])
def test_ranks_whose_script_asks_to_stop_all_do_after_the_same_step(who: tuple[int, ...], per_node: int) -> None:
    answers = on_ranks(4, asked, who, True, environ=[torchrun(r, 4, per_node) for r in range(4)])
    assert len(set(answers)) == 1
    step, signum, by_script = answers[0]
    assert (step if len(who) == 4 else max(step, 20), signum, by_script) == (20 if len(who) == 4 else step, 0, True)


def test_a_lone_rank_stops_after_the_step_in_which_it_asks() -> None:
    assert on_ranks(1, asked, (0,), False) == [(20, 0, True)]


def test_nobody_stops_early_when_nobody_is_signalled() -> None:
    assert on_ranks(3, loop, 99, signal.SIGTERM, 1, True, steps=50) == [(50, 0)] * 3


def afterwards(number: int) -> bool:
    """Whether this process has its own handler for the signal again."""
    loop(0, signal.SIGUSR1, 5, True)
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    os.kill(os.getpid(), signal.SIGUSR1)
    return heard == [1]


def test_after_leave_a_signal_is_for_the_process_itself() -> None:
    assert on_ranks(2, afterwards, 1) == [True, True]


def late_signals() -> tuple[int, int]:
    """After an agreed stop: how many of the signals the process has survived, and what ends a separate process."""
    loop(0, signal.SIGTERM, 5, True)
    survived = 0
    for signum in stop_signal.SIGNALS:
        os.kill(os.getpid(), signum)
        survived += 1
    if (child := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    return survived, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_signal_that_reaches_a_rank_after_the_stop_is_the_request_that_was_answered() -> None:
    assert on_ranks(2, late_signals) == [(4, -signal.SIGTERM)] * 2


def stopped_alone() -> StopSignal:
    """The StopSignal of a single process after SIGTERM."""
    signals = StopSignal()
    while not signals.agreed(0):
        os.kill(os.getpid(), signal.SIGTERM)
    signals.leave()
    return signals


def interrupted_late() -> str:
    """What Ctrl-C does to a single process that was stopped by SIGTERM."""
    stopped_alone()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)
    except KeyboardInterrupt:
        return "ended"
    return "nothing"


def test_ctrl_c_ends_a_process_that_is_alone_after_its_stop_too() -> None:
    assert on_ranks(1, interrupted_late) == ["ended"]


def handled_at_exit() -> list[bool]:
    """Whether, at exit, SIGUSR1 has the script's own handler again, and SIGTERM, which was answered, has none."""
    signals = stopped_alone()
    own = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGUSR1, own)
    signals._end()
    return [signal.getsignal(signal.SIGUSR1) is own, signal.getsignal(signal.SIGTERM) is signal.SIG_IGN]


def test_when_a_process_exits_a_late_signal_is_ignored_and_the_scripts_own_handlers_stay() -> None:
    assert on_ranks(1, handled_at_exit) == [[True, True]]


def signalled_worker() -> tuple[int, int]:
    """(the flag in the rank's row after a signal to a process that this rank has forked, the status of this process)."""
    signals = StopSignal()
    assert not signals.agreed(0)
    if (child := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert signals._row is not None
    return signals._row.flag, status


def test_a_signal_to_a_forked_process_is_no_request_of_its_rank() -> None:
    assert on_ranks(2, signalled_worker) == [(0, 7)] * 2


def after_the_first_has_finished() -> int:
    """The first rank has 5 steps. Then the second gets the signal, in the middle of its 60."""
    signals = StopSignal()
    step, steps = 0, (5, 60)[comm.rank()]
    while step < steps and not signals.agreed(step):
        step += 1
        if step == 20:
            comm.barrier()
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.004)
    signals.finish()
    if comm.rank() == 0:
        comm.barrier()
    comm.barrier()
    signals.leave()
    return step


def test_a_signal_after_a_rank_has_finished_lets_the_others_do_their_last_step() -> None:
    assert on_ranks(2, after_the_first_has_finished) == [5, 60]


def stopped_again() -> int:
    """After a second stop, long after the first: how many signals the process has survived."""
    for _ in range(2):
        signals = StopSignal()
        while not signals.agreed(0):
            os.kill(os.getpid(), signal.SIGTERM)
        signals.leave()
        signals._left -= stop_signal.LATE_S
    signals._left += stop_signal.LATE_S
    os.kill(os.getpid(), signal.SIGTERM)
    return 1


def test_after_each_of_two_stops_of_a_process_a_late_signal_is_answered() -> None:
    assert on_ranks(1, stopped_again) == [1]


def looped(signals: StopSignal, how: str) -> tuple[int, int]:
    """(the steps of a loop that ends by itself, the signal of one that does not)."""
    step = 0
    try:
        with signals:
            for step, _ in signals.steps(range(100_000 if how == "signal" else 5)):
                comm.barrier()
                if step == 3 and how == "error":
                    raise ValueError
                if step == 3 and how == "signal" and comm.is_main():
                    os.kill(os.getpid(), signal.SIGINT)
    except (SystemExit, ValueError):
        comm.barrier()
    return step if how == "end" else 0, signals.signum


def looped_again(*hows: str) -> list[tuple[int, int]]:
    signals = StopSignal()
    return [looped(signals, how) for how in hows]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_after_another_does_its_steps_and_is_stopped_by_a_signal_however_the_first_ended(ranks: int) -> None:
    ends = {"end": (5, 0), "error": (0, 0), "signal": (0, signal.SIGINT)}
    for first in ends:
        hows = (first, "end", "signal")
        assert on_ranks(ranks, looped_again, *hows) == [[ends[how] for how in hows]] * ranks


def asked_again() -> list[tuple[bool, int]]:
    """(whether the script has stopped a loop, its steps) for two loops, of which the script stops the first."""
    signals, found = StopSignal(), []
    for steps in (9, 5):
        with signals:
            for step, _ in signals.steps(range(steps)):
                if steps == 9 and step == 3:
                    signals.ask()
        found.append((signals.by_script, step))
    return found


def test_a_loop_after_one_that_the_script_has_stopped_is_not_stopped() -> None:
    assert on_ranks(1, asked_again) == [[(True, 3), (False, 5)]]


def long_after() -> int:
    """What ends a process that continues after its stop."""
    stop_signal.LATE_S = 0.0
    if (child := os.fork()) == 0:
        signals = StopSignal()
        while not signals.agreed(0):
            os.kill(os.getpid(), signal.SIGTERM)
        signals.leave()
        time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_that_goes_on_long_after_its_stop_can_be_ended_by_a_signal() -> None:
    assert on_ranks(1, long_after) == [-signal.SIGTERM]


ALONE = """
import atexit, os, signal, rankwise
atexit.register(os.kill, os.getpid(), signal.SIGUSR1)  # what is registered first is called last
stop = rankwise.StopSignal()
step = 0
while not stop.agreed(step):
    step += 1
    if step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
stop.finish()
print(step)
stop.leave()
os.kill(os.getpid(), signal.SIGTERM)
raise stop.stopped()
"""


def test_the_same_signal_again_and_again_leaves_the_stop_and_its_status_as_they_are() -> None:
    """Slurm sends SIGTERM twice at a time limit, and torchrun sends it to all ranks when the first has exited."""
    Path("train.py").write_text(ALONE)
    [done] = scripts_on_ranks(1, "train.py")
    assert (done.returncode, done.stdout) == (75, "3\n")


TWO_INTERRUPTS = ALONE.replace("SIGTERM", "SIGINT")


def test_a_second_ctrl_c_ends_a_process_that_is_alone_at_once() -> None:
    Path("train.py").write_text(TWO_INTERRUPTS)
    [done] = scripts_on_ranks(1, "train.py")
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")


class SilentLink:
    """A link to a node that never answers."""

    closed = None
    heard = 0.0

    def send(self, _message: object) -> None: ...
    def flush(self) -> None: ...
    def drain(self, _limit_s: float) -> None: ...
    def close(self, _reason: str) -> None: ...
    def receive(self) -> list[object]:
        return []


def test_when_the_first_rank_leaves_amid_an_agreement_the_others_of_its_node_go_on() -> None:
    page = Page.create(2)
    for rank in range(2):
        page.row(rank).join()
    keeper = coordinator.Coordinator(page, [SilentLink()])  # type: ignore[list-item]
    keeper.start()
    page.row(1).flag = signal.SIGTERM
    wait_for(lambda: page.stopping, "the gate to be held")
    keeper.stop()
    wait_for(lambda: page.released, "the gate to be opened")
    assert page.row(1).pass_gate(1000)


SCRIPT = """
import torch, rankwise
from torch.utils.data import TensorDataset
model = torch.nn.Linear(4, 1)
data = TensorDataset(torch.randn(64, 4))
step = lambda model, batch: (model(batch[0]).square().sum(), len(batch[0]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rankwise.Trainer(model, optimizer, step, data, global_batch_size=8, max_steps=10**9,
                 actions=[rankwise.actions.Log(10)]).fit()
"""


@pytest.mark.stress
def test_sigterm_to_torchrun_stops_a_training_after_one_step_saved_and_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = RunDir(tmp_path / "runs" / "train")
    last = 0
    for attempt in (1, 2):
        out = open(tmp_path / "out.txt", "w")  # noqa: SIM115  # for the child
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py"]
        with out, subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out, start_new_session=True) as torchrun:
            try:
                wait_for(lambda: [r for r in run.read_metrics() if r["life"] == attempt], f"steps of attempt {attempt}")  # noqa: B023
            finally:
                torchrun.terminate()
                torchrun.wait(timeout=200)
        said = (tmp_path / "out.txt").read_text()
        step = run_step(run)
        assert f"stopped after step {step}, saved in" in said, said
        assert step > last
        assert (f"resuming from step {last}" in said) == (attempt == 2)
        last = step


def run_step(run: RunDir) -> int:
    return max(int(path.name[5:13]) for path in run.checkpoints.glob("step-*"))


def typed_at_a_prompt(signum: int) -> str:
    sys.ps1 = ">>> "  # as Python and IPython set it
    try:
        with StopSignal() as stop:
            for step, _ in stop.steps(range(10**6)):
                if step == 3:
                    os.kill(os.getpid(), signum)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ctrl_c_where_a_person_types_the_code_does_not_end_the_session() -> None:
    assert on_ranks(1, typed_at_a_prompt, signal.SIGINT) == ["Interrupted: stopped by Ctrl-C"]
    assert on_ranks(1, typed_at_a_prompt, signal.SIGTERM) == ["Stopped: 75"]
