"""The page that an agent shares with its ranks: the gate, and the lines that ranks leave for it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import pytest

from rankwise.ipc.shared_page import _STOP, FINISHED, Alarm, Page, Row, agreed

DEADLINE_S = 120.0
RANKS = 4
ROUNDS = 20

_SPAWN = multiprocessing.get_context("spawn")  # a fork of pytest would also copy the locks of its threads


# --- the gate, with real processes


def _train(path: str, local_rank: int, pace: int, meet: Callable[[], object]) -> int:
    """The loop of one rank: returns the steps that it had done when it stopped. Stops after a deadline."""
    row = Page.open(path).row(local_rank)
    row.join()
    deadline = time.monotonic() + DEADLINE_S
    done = 0
    while row.pass_gate(done + 1):
        for _ in range(pace):
            pass
        meet()
        done += 1
        if time.monotonic() > deadline:
            return -done
    return done


def _rank(local_rank: int, connection: Connection, barrier: Barrier) -> None:
    while (order := connection.recv()) is not None:
        path, pace, meets = order
        try:
            connection.send(_train(path, local_rank, pace, (lambda: barrier.wait(DEADLINE_S)) if meets else bool))
        except threading.BrokenBarrierError:
            connection.send("a rank left while others waited for it")


class Ranks:
    """Real processes. Each runs its loop on request, and answers with the number of its steps."""

    def __init__(self) -> None:
        self._barrier = _SPAWN.Barrier(RANKS)  # kept: without it its name is gone, which a process needs to start
        pipes = [_SPAWN.Pipe() for _ in range(RANKS)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [_SPAWN.Process(target=_rank, args=(r, theirs, self._barrier)) for r, (_, theirs) in enumerate(pipes)]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def start(self, page: Page, paces: list[int], meet: bool) -> None:
        for pipe, pace in zip(self._pipes, paces, strict=True):
            pipe.send((page.path, pace, meet))

    def done(self) -> list[object]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(2 * DEADLINE_S), f"rank {rank} never came back"
            answers.append(pipe.recv())
        return answers

    def end(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.end()


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.0005)


@pytest.mark.parametrize("meet", [True, False], ids=["all wait for each other in each step", "each at its own pace"])
def test_all_ranks_leave_with_the_same_number_of_steps_done_whenever_the_agent_stops_them(ranks: Ranks, meet: bool) -> None:
    chance = random.Random(7)
    for number in range(ROUNDS):
        page = Page.create(RANKS)
        ranks.start(page, [chance.choice((0, 20, 100, 300)) for _ in range(RANKS)], meet)
        watched, moment = page.row(chance.randrange(RANKS)), chance.randrange(1, 60)
        wait_for(lambda row=watched, step=moment: row.claim >= step, "the moment of the stop")
        agreed = page.stop(signal.SIGTERM)
        assert ranks.done() == [agreed] * RANKS, f"round {number}"
        assert agreed >= moment
        assert page.joined() == list(range(RANKS))


def test_a_rank_that_comes_after_the_stop_leaves_with_the_others(ranks: Ranks) -> None:
    """The agent need not wait for any rank: a rank that had not started catches up."""
    page = Page.create(RANKS + 1)
    late = page.row(RANKS)
    ranks.start(page, [0] * RANKS, meet=False)
    wait_for(lambda: all(page.row(r).claim > 3 for r in range(RANKS)), "the ranks to be on their way")
    agreed = page.stop(signal.SIGTERM)
    assert ranks.done() == [agreed] * RANKS
    assert next(step for step in count(1) if not late.pass_gate(step)) == agreed + 1


# --- the gate at each moment


class StopAt:
    """The words of a rank. The agent's complete stop happens right before one chosen access of the rank."""

    def __init__(self, page: Page, access: int) -> None:
        self._page = page
        self._left = access
        self.agreed: int | None = None

    def _tick(self) -> None:
        if self._left == 0:
            self.agreed = self._page.stop(signal.SIGUSR1)
        self._left -= 1

    def __getitem__(self, index: int) -> int:
        self._tick()
        return self._page._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._tick()
        self._page._words[index] = value


@pytest.mark.parametrize("other", [0, 2, 3, 7], ids="the other rank is in step {}".format)
@pytest.mark.parametrize("access", range(12))
def test_a_stop_between_any_two_accesses_of_a_rank_is_obeyed_after_the_agreed_step(access: int, other: int) -> None:
    page = Page.create(2)
    assert other == 0 or page.row(1).pass_gate(other)
    words = StopAt(page, access)
    row = Row(words, page._map, 0)  # type: ignore[arg-type]
    left = next(step for step in count(1) if not row.pass_gate(step))
    assert words.agreed is not None
    assert left - 1 == words.agreed >= other
    assert row.reason == signal.SIGUSR1
    behind = next(step for step in count(other + 1) if not page.row(1).pass_gate(step))
    assert behind == left


class PausedAgent:
    """The agent's words. The agent stops while it holds the gate, before it reads the claims or after that, until it is
    released."""

    def __init__(self, words: memoryview[int], after_its_look: bool) -> None:
        self._words = words
        self._writes_left = 3 if after_its_look else 2  # REASON, HOLD, and STOP after it has read the claims
        self.halted, self.release = threading.Event(), threading.Event()

    def _halt(self) -> None:
        self.halted.set()
        assert self.release.wait(DEADLINE_S)

    def __getitem__(self, index: int) -> int:
        if self._writes_left == 0 and not self.halted.is_set():
            self._halt()
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._writes_left -= 1
        if self._writes_left == 0 and index == _STOP:
            self._halt()
        self._words[index] = value


@pytest.mark.parametrize(("after_its_look", "passes"), [(False, True), (True, False)])
def test_a_rank_at_a_held_gate_waits_for_the_agreement(after_its_look: bool, passes: bool) -> None:
    """The rank neither passes nor stops before STOP is set; which of these it does depends on whether its claim was counted."""
    page = Page.create(1)
    row = page.row(0)
    assert row.pass_gate(3)
    words = PausedAgent(page._words, after_its_look)
    page._words = words  # type: ignore[assignment]
    agreed: list[int] = []
    agent = threading.Thread(target=lambda: agreed.append(page.stop(signal.SIGTERM)))
    agent.start()
    assert words.halted.wait(DEADLINE_S)
    passed: list[bool] = []
    rank = threading.Thread(target=lambda: passed.append(row.pass_gate(4)))
    rank.start()
    wait_for(lambda: row.claim == 4, "the rank at the gate")
    rank.join(0.05)
    assert rank.is_alive()
    words.release.set()
    for thread in (rank, agent):
        thread.join(DEADLINE_S)
    assert passed == [passes]
    assert agreed == [4 if passes else 3]
    assert not row.pass_gate(5)


def test_without_a_stop_every_step_is_passed_and_nobody_is_asked() -> None:
    page = Page.create(2)
    assert all(page.row(0).pass_gate(step) for step in range(1, 100))
    assert page.row(0).claim == 99
    assert page.row(1).claim == 0
    assert not page.stopping


def test_a_stop_before_any_claim_lets_nobody_begin() -> None:
    page = Page.create(3)
    assert page.stop(signal.SIGINT) == 0
    assert page.stopping
    for r in range(3):
        assert not page.row(r).pass_gate(1)
        assert page.row(r).reason == signal.SIGINT


def test_a_stop_after_a_rank_has_finished_lets_all_run_to_the_end() -> None:
    page = Page.create(2)
    assert page.row(0).pass_gate(100)
    page.row(0).finish()
    assert page.row(1).pass_gate(97)
    assert page.stop(signal.SIGTERM) == FINISHED
    assert all(page.row(1).pass_gate(step) for step in range(98, 101))


# --- alarms


class RingAt(StopAt):
    """The words of a rank. The agent's complete alarm happens right before one chosen access of the rank."""

    def _tick(self) -> None:
        if self._left == 0:
            alarm = self._page.ring(0)
            assert alarm is not None
            self.agreed = alarm.claim
            self._page.rung(self.agreed, 5)
        self._left -= 1


def heard_by(row: Row, first: int = 1, last: int = 12) -> list[tuple[int, int]]:
    """(steps done, which) for each alarm that a rank notices between these gates."""
    found: list[tuple[int, int]] = []
    for step in range(first, last + 1):
        row.on_alarm = lambda which, done=step - 1: found.append((done, which))  # type: ignore[misc]
        assert row.pass_gate(step)
    return found


@pytest.mark.parametrize("other", [0, 2, 3, 7], ids="the other rank is in step {}".format)
@pytest.mark.parametrize("access", range(14))
def test_an_alarm_between_any_two_accesses_of_a_rank_is_heard_after_the_agreed_step(access: int, other: int) -> None:
    page = Page.create(2)
    behind = page.row(1)
    assert other == 0 or behind.pass_gate(other)
    words = RingAt(page, access)
    row = Row(words, page._map, 0)  # type: ignore[arg-type]
    heard = heard_by(row)
    assert heard == [(words.agreed, 5)]
    assert heard_by(behind, other + 1) == heard


def test_a_new_alarm_waits_until_all_ranks_have_heard_the_one_before() -> None:
    page = Page.create(2)
    rows = [page.row(0), page.row(1)]
    assert [row.pass_gate(3) for row in rows] == [True, True]
    assert page.ring(0) == (1, 3, 0)
    assert page.ring(0) is None
    page.rung(3, 1)
    assert heard_by(rows[0], 4, 5) == [(3, 1)]
    assert page.ring(0) is None
    assert heard_by(rows[1], 4, 4) == [(3, 1)]
    assert page.ring(0) == (2, 5, 0)
    page.rung(5, 2)
    assert [heard_by(row, 6, 9) for row in rows] == [[(5, 2)]] * 2


def test_the_main_ranks_alarm_is_due_at_its_time_from_its_first_step_on_and_once() -> None:
    page = Page.create(2)
    main = page.row(0)
    main.set_alarm(1000, 3)
    assert page.due(5000) == 0  # no rank has a step that it could follow
    assert main.pass_gate(1)
    assert page.row(1).pass_gate(1)
    assert (page.due(999), page.due(1000)) == (0, 3)
    assert page.ring(1000) == (1, 1, 3)
    page.rung(1, 3)
    assert page.due(5000) == 0
    main.on_alarm = lambda _: main.set_alarm(3000, 1)
    assert main.pass_gate(2)
    assert page.row(1).pass_gate(2)
    assert (page.due(2999), page.due(3000)) == (0, 1)


def test_an_alarm_in_a_thousand_years_is_not_due() -> None:
    """Checkpoints(every_s=1e12), for example, for a run that saves only in the end."""
    page = Page.create(1)
    page.row(0).set_alarm(10**21, 1)
    assert page.row(0).pass_gate(1)
    assert page.due(10**18) == 0


def test_a_stop_that_is_held_amid_an_alarm_comes_after_it() -> None:
    page = Page.create(2)
    rows = [page.row(0), page.row(1)]
    assert [row.pass_gate(4) for row in rows] == [True, True]
    alarm = page.ring(0)
    assert alarm == (1, 4, 0)
    assert page.hold(signal.SIGTERM) == 4
    page.rung(alarm.claim, 1)
    page.release(4)
    for row in rows:
        heard: list[int] = []
        row.on_alarm = heard.append
        assert not row.pass_gate(5)
        assert heard == [1]


def test_an_alarm_that_meets_a_rank_which_has_finished_is_heard_by_nobody_and_keeps_nobody() -> None:
    page = Page.create(2)
    assert page.row(0).pass_gate(9)
    page.row(0).finish()
    assert page.row(1).pass_gate(7)
    assert page.ring(0) == (1, FINISHED, 0)
    page.rung(FINISHED, 1)
    assert heard_by(page.row(1), 8, 9) == [(7, 0)]  # its time can be set again
    page.row(1).finish()
    again = [page.row(0), page.row(1)]  # another loop on the same ranks
    assert [row.pass_gate(1) for row in again] == [True, True]
    assert page.ring(0) == (2, 1, 0)
    page.rung(1, 2)
    assert [heard_by(row, 2, 4) for row in again] == [[(1, 2)]] * 2


def test_an_alarm_is_also_for_what_was_asked_while_it_waited_for_the_last_rank_to_hear_the_one_before() -> None:
    page = Page.create(2)
    main, behind = page.row(0), page.row(1)
    assert main.pass_gate(9)
    assert behind.pass_gate(3)
    main.on_alarm = lambda _: main.set_alarm(1000, 1)
    assert page.ring(0) == (1, 9, 0)
    page.rung(9, 1)
    assert main.pass_gate(10)
    assert page.due(1000) == 1
    behind.ask()
    assert page.ring(1000) is None
    assert [behind.pass_gate(step) for step in range(4, 11)] == [True] * 7
    number, last, which = page.ring(1000) or (0, 0, 0)
    assert (number, last) == (2, 10)
    page.rung(last, which)
    for row in (main, behind):
        assert not row.pass_gate(11)
        assert row.by_script


def test_all_nodes_hear_what_any_node_answers_after_the_last_step_that_any_has_begun() -> None:
    assert agreed([Alarm(3, 7, 1), Alarm(3, 9, 4), Alarm(3, 0, 1)]) == (9, 5)
    assert agreed([]) == (FINISHED, 0)


def _asking(path: str, local_rank: int, asks_after: int) -> tuple[int, bool]:
    """(steps done when it stopped, whether a script has requested a stop) of a rank that may request one."""
    row = Page.open(path).row(local_rank)
    done = 0
    while True:
        if done == asks_after:
            row.ask()
            if row.wait_for_answer(done + 1):
                break
        if not row.pass_gate(done + 1):
            break
        done += 1
        time.sleep(0.002)
    return done, row.by_script


@pytest.mark.parametrize("asking", [(0, 1, 2), (1,)], ids=["all", "one"])
def test_all_ranks_stop_after_the_step_in_which_all_ask_or_after_one_step_where_one_asks(asking: tuple[int, ...]) -> None:
    page = Page.create(3)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):  # a second loop on the same ranks may also stop
            ranks = [pool.submit(_asking, page.path, r, 20 if r in asking else -1) for r in range(3)]
            while not all(rank.done() for rank in ranks):
                if page.due(0) and (alarm := page.ring(0)) is not None:
                    page.rung(alarm.claim, alarm.which)
                time.sleep(0.005)
            left = [rank.result() for rank in ranks]
            for r in range(3):
                page.row(r).finish()
            assert len(set(left)) == 1
            assert left[0] == (20, True) if len(asking) == 3 else left[0][0] >= 20 and left[0][1]


def test_what_the_agent_sends_after_a_failure_is_no_request_and_another_signal_is() -> None:
    page = Page.create(1)
    page.end(signal.SIGTERM)
    page.row(0).flag = signal.SIGTERM
    assert page.flagged() == 0
    page.row(0).flag = signal.SIGUSR1
    assert page.flagged() == signal.SIGUSR1
    page.reset()
    page.row(0).flag = signal.SIGTERM
    assert page.flagged() == signal.SIGTERM


# --- the other words of a row


def test_ranks_join_leave_raise_a_flag_and_tell_of_their_groups_each_in_its_own_row() -> None:
    page = Page.create(3)
    assert (page.joined(), page.flagged(), page.ranks) == ([], 0, 3)
    page.row(0).join()
    page.row(2).join()
    page.row(2).flag = signal.SIGUSR2
    fd = os.open(page.path, os.O_RDWR)
    os.pwrite(fd, b"\1", page.row(1).groups_offset)  # as when a rank ends
    os.close(fd)
    assert page.joined() == [0, 2]
    assert page.flagged() == signal.SIGUSR2
    assert [page.row(r).flag for r in range(3)] == [0, 0, signal.SIGUSR2]
    assert [page.row(r).groups for r in range(3)] == [False, True, False]
    page.row(0).leave()
    assert page.joined() == [2]


def test_reset_forgets_everything_but_the_number_of_ranks() -> None:
    page = Page.create(2)
    for r in range(2):
        row = page.row(r)
        row.join()
        row.pass_gate(5)
        row.say("loss 1")
        row.flag = signal.SIGTERM
    page.stop(signal.SIGTERM)
    page.reset()
    assert (page.ranks, page.stopping, page.joined(), page.flagged()) == (2, False, [], 0)
    for r in range(2):
        row = page.row(r)
        assert (row.claim, row.reason, row.groups, row.heard(0)) == (0, 0, False, (0, None))
        assert row.pass_gate(1)
    assert page.stop(signal.SIGINT) == 1


# --- lines


def test_a_line_is_heard_once_and_the_newest_replaces_the_one_before() -> None:
    row = Page.create(1).row(0)
    assert row.heard(0) == (0, None)
    row.say("loss 2.5")
    row.say("loss 2.25, größer")
    seen, text = row.heard(0)
    assert text == "loss 2.25, größer"
    assert row.heard(seen) == (seen, None)
    row.say("")
    assert row.heard(seen)[1] == ""


def test_a_line_that_is_too_long_is_cut_and_touches_no_other_row() -> None:
    page = Page.create(2)
    page.row(1).say("mine")
    page.row(0).say("ä" * 1000)
    _, text = page.row(0).heard(0)
    assert text is not None
    assert 200 <= len(text) < 1000
    assert set(text) <= {"ä", "\N{REPLACEMENT CHARACTER}"}
    assert page.row(1).heard(0)[1] == "mine"
    assert page.row(1).claim == 0


_TALK = """
import sys
from rankwise.ipc.shared_page import Page
row = Page.open(sys.argv[1]).row(0)
for _ in range(10_000):
    row.say("a" * 10)
    row.say("b" * 448)
"""


def test_a_line_is_heard_whole_while_it_is_being_replaced() -> None:
    page = Page.create(1)
    row = page.row(0)
    heard: list[str] = []
    seen = 0
    with subprocess.Popen([sys.executable, "-c", _TALK, page.path]) as talker:
        try:
            is_last = False
            while not is_last:
                is_last = talker.poll() is not None  # a last look after it has ended: the line that it left is there
                seen, text = row.heard(seen)
                if text is not None:
                    heard.append(text)
        finally:
            talker.kill()
    assert talker.returncode == 0
    assert heard[-1] == "b" * 448
    assert set(heard) <= {"a" * 10, "b" * 448}


# --- where the page is


_HOLD_A_PAGE = """
import sys
from rankwise.ipc.shared_page import Page
page = Page.create(3)
page.row(2).pass_gate(41)
print(page.path, flush=True)
sys.stdin.read()
print(page.row(1).claim, flush=True)
"""


def test_another_process_opens_it_by_its_path_for_as_long_as_the_owner_lives() -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLD_A_PAGE], stdin=-1, stdout=-1, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        path = owner.stdout.readline().strip()
        page = Page.open(path)
        assert (page.ranks, page.row(2).claim) == (3, 41)
        page.row(1).pass_gate(17)
        owner.stdin.close()
        assert owner.stdout.read() == "17\n"
        owner.wait(DEADLINE_S)
    with pytest.raises(OSError, match="No such file"):
        Page.open(path)
    assert page.row(2).claim == 41  # a process that has it open keeps it


def test_a_killed_owner_takes_its_path_along_even_before_it_is_reaped() -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLD_A_PAGE], stdin=-1, stdout=-1, text=True) as owner:
        assert owner.stdout is not None
        path = owner.stdout.readline().strip()
        owner.kill()
        assert owner.stdout.read() == ""  # the pipe is closed because it has exited; nobody has waited for it yet

        def gone() -> bool:
            try:
                Page.open(path)
            except OSError:
                return True
            return False

        wait_for(gone, "the path to go")
