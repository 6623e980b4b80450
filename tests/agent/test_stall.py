"""Which rank blocks the others, decided by the ranks' stacks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rankwise.agent import stall
from rankwise.agent.rank_processes import Rank
from rankwise.agent.stall import Frame, Observation, StallWatch, busy_at, judge, parse, thread_of
from rankwise.data import prefetch, worker_link
from rankwise.hdf5 import rows
from rankwise.run.directory import RunDir

ALL_REDUCE = (
    Frame("/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce"),
    Frame("/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", 83, "wrapper"),
    Frame("/home/me/train.py", 88, "main"),
    Frame("/home/me/train.py", 99, "<module>"),
)
LOOP = (Frame("/home/me/train.py", 61, "spin"), Frame("/home/me/train.py", 99, "<module>"))
BACKWARD = (
    Frame("/v/lib/python3.11/site-packages/torch/autograd/graph.py", 9, "_engine_run_backward"),
    Frame("/home/me/train.py", 70, "<module>"),
)


def seen(rank: int, *stacks: tuple[Frame, ...], cpu: float = 0.0, children: tuple[str, ...] = ()) -> Observation:
    return Observation(rank, stacks * 3 if len(stacks) == 1 else stacks, cpu, children)


def test_the_rank_that_is_in_no_collective_is_what_the_others_wait_for() -> None:
    said = judge([seen(0, ALL_REDUCE), seen(1, LOOP, cpu=1.0), seen(2, ALL_REDUCE)], sure=False)
    assert said == (
        "rank 1 is at train.py:61 in spin (100% CPU, the same in 3 stack traces); "
        "rank 0 waits in all_reduce at train.py:88 in main; rank 2 waits in all_reduce at train.py:88 in main"
    )


def test_an_idle_backward_waits_and_a_busy_one_computes() -> None:
    assert judge([seen(0, BACKWARD, cpu=0.01), seen(1, LOOP, cpu=1.0)], sure=False) is not None
    assert judge([seen(0, BACKWARD, cpu=0.9), seen(1, LOOP, cpu=1.0)], sure=False) is None


def test_ranks_at_work_are_no_stall() -> None:
    other = (Frame("/home/me/train.py", 62, "spin"),)
    assert judge([seen(0, ALL_REDUCE), seen(1, LOOP, other, LOOP, cpu=1.0)], sure=True) is None


def test_a_silent_script_without_collectives_is_a_stall_only_if_its_steps_are_known() -> None:
    assert judge([seen(0, LOOP), seen(1, LOOP)], sure=False) is None
    assert judge([seen(0, LOOP), seen(1, LOOP)], sure=True) is not None


def test_different_collectives_are_named_with_their_lines() -> None:
    broadcast = (
        Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 1, "broadcast"),
        Frame("/home/me/train.py", 90, "<module>"),
    )
    assert judge([seen(0, ALL_REDUCE), seen(1, broadcast)], sure=False) == (
        "the ranks are in different collectives: rank 0 waits in all_reduce at train.py:88 in main; "
        "rank 1 waits in broadcast at train.py:90"
    )


def test_of_hundreds_of_ranks_a_few_are_named_and_of_each_place_at_least_one() -> None:
    said = judge([*(seen(rank, LOOP) for rank in range(500)), seen(500, LOOP[1:])], sure=True) or ""
    assert [part.split()[1] for part in said.split("; ")] == ["0", "500", "1", "2", "3", "4", "5", "6", "493"]
    assert said.endswith("; and 493 more")
    waits = [seen(rank, ALL_REDUCE) for rank in range(500)]
    broadcast = (Frame(ALL_REDUCE[0].file, 1, "broadcast"), *LOOP)
    said = judge([*waits, seen(500, broadcast)], sure=False) or ""
    assert "; rank 500 waits in broadcast" in said
    assert len(said) < 1000


def test_a_rank_that_waits_inside_of_rankwise_is_shown_at_the_users_line() -> None:
    package = Path(stall.__file__).parents[1]
    inside = (ALL_REDUCE[0], Frame(str(package / "sync" / "flat.py"), 103, "_exchange"), *ALL_REDUCE[2:])
    assert judge([seen(0, inside), seen(1, LOOP, cpu=1.0)], sure=False) == (
        "rank 1 is at train.py:61 in spin (100% CPU, the same in 3 stack traces); "
        "rank 0 waits in all_reduce at train.py:88 in main (in rankwise/sync/flat.py:103)"
    )


@pytest.mark.parametrize("called", ["init", "init_process_group"])
@pytest.mark.parametrize("connecting", [False, True])
def test_a_rank_that_waits_until_rank_0_listens_waits_in_what_the_script_has_called(called: str, connecting: bool) -> None:
    stack = (
        Frame("/usr/lib/python3.12/socket.py", 850, "create_connection"),
        Frame(f"{Path(stall.__file__).parents[1]}/host/listener.py", 23, "wait_for"),
        Frame("/venv/site-packages/torch/distributed/distributed_c10d.py", 1700, called),
        Frame("/home/me/train.py", 3, "<module>"),
    )
    said = judge([seen(0, LOOP, cpu=1.0), seen(1, stack[0 if connecting else 1 :])], sure=False)
    assert said is not None
    assert f"; rank 1 waits in {called} at train.py:3 (in rankwise/host/listener.py:23)" in said


def test_all_in_one_collective_is_the_network_or_a_mismatch() -> None:
    said = judge([seen(0, ALL_REDUCE), seen(1, ALL_REDUCE)], sure=False)
    assert said == (
        "all ranks wait in all_reduce at train.py:88 in main: the network does not answer, or their calls do not match "
        "(rankwise run --check-collectives shows it)"
    )
    compared = judge([seen(0, ALL_REDUCE), seen(1, ALL_REDUCE)], sure=False, checked=True)
    assert compared == (
        "all ranks wait in all_reduce at train.py:88 in main: --check-collectives finds no difference between their calls, "
        "so the network does not answer"
    )


@pytest.mark.parametrize(
    "frames",
    [
        (Frame("/x/site-packages/torch/utils/data/dataloader.py", 7, "_try_get_data"),),
        (Frame(worker_link.__file__, 7, "take"), Frame(prefetch.__file__, 8, "_answer")),
    ],
    ids=["torch's", "ours"],
)
def test_a_rank_that_waits_for_its_loader_workers_is_told_so(frames: tuple[Frame, ...]) -> None:
    loader = judge([seen(0, ALL_REDUCE), seen(1, (*frames, *LOOP), children=("python",))], sure=False)
    assert loader is not None
    assert "rank 1 is at train.py:61 in spin" in loader
    assert "(waiting for its loader workers, " in loader


IDLE = Frame("/v/lib/python3.11/multiprocessing/connection.py", 7, "poll")
IN_WORKER = Frame("/v/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", 9, "_worker_loop")
READ, NUMPY = Frame("/home/me/data.py", 13, "read"), Frame("/v/lib/python3.11/site-packages/numpy/core.py", 1, "load")
GET = Frame(worker_link.__file__, 5, "get")
OURS = Frame(rows.__file__, 8, "take")


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ((READ, IN_WORKER, *LOOP), READ),
        ((NUMPY, READ, GET, IN_WORKER, *LOOP), READ),
        ((OURS, READ, GET, IN_WORKER, *LOOP), READ),
        ((OURS, GET, IN_WORKER, *LOOP), OURS),
        ((GET, IN_WORKER, *LOOP), None),
        ((IDLE, IN_WORKER, *LOOP), None),
        (LOOP, None),
        ((), None),
    ],
    ids=["torch's", "in a library", "by ours", "in ours", "ours waits", "torch's waits", "no worker", "no answer"],
)
def test_where_a_loader_worker_is(stack: tuple[Frame, ...], expected: Frame | None) -> None:
    assert busy_at(stack) == expected


def test_a_rank_that_waits_for_a_loader_worker_is_told_with_the_line_of_that_worker() -> None:
    waits = Observation(1, ((GET, *LOOP),) * 3, 0.0, ("python",), worker="data.py:13 in read")
    assert "(waiting for its loader worker, which is at data.py:13 in read, idle, " in waits.told()


AHEAD = Frame(prefetch.__file__, 6, "get")
DUMP = f"""Thread 0x00000000000000a1 (most recent call first):
  File "/v/lib/python3.11/threading.py", line 320 in wait
  File "/home/me/other.py", line 3 in run

Thread 0x00000000000000a2 (most recent call first):
  File "/home/me/data.py", line 13 in read
  File "{prefetch.__file__}", line 140 in fetch
  File "/v/lib/python3.11/threading.py", line 975 in run

Current thread 0x00000000000000a3 (most recent call first):
  File "{prefetch.__file__}", line 6 in get
  File "/home/me/train.py", line 61 in spin
"""


def test_the_thread_that_reads_ahead_is_found_among_the_others() -> None:
    assert thread_of(DUMP)[0] == READ
    assert parse(DUMP)[0] == AHEAD
    assert thread_of(DUMP.replace("in fetch", "in stop")) == ()


def test_a_rank_that_waits_for_its_thread_is_told_with_the_line_of_that_thread() -> None:
    waits = Observation(1, ((AHEAD, *LOOP),) * 3, 0.0, (), worker="data.py:13 in read")
    assert "(waiting for its thread that reads ahead, which is at data.py:13 in read, idle, " in waits.told()
    assert "(waiting for its thread that reads ahead, idle, " in replace(waits, worker="").told()


def test_a_line_of_rankwise_is_told_with_its_folder() -> None:
    assert str(OURS) == "rankwise/hdf5/rows.py:8"


def test_what_a_rank_runs_is_told_with_it() -> None:
    child = judge([seen(0, ALL_REDUCE), seen(1, LOOP, children=("sleep", "sh"))], sure=False)
    assert child is not None
    assert "idle, the same in 3 stack traces, running sleep, sh" in child


def test_a_rank_that_does_not_answer_is_named() -> None:
    assert judge([seen(0, ALL_REDUCE), seen(1, ())], sure=False) == (
        "rank 1 does not answer; rank 0 waits in all_reduce at train.py:88 in main"
    )


def test_a_single_rank_without_steps_is_never_a_stall() -> None:
    assert judge([seen(0, ALL_REDUCE)], sure=False) is None


class Raised:
    """The processes of two ranks: rank 1 has raised at 100 s and still runs."""

    started = True
    alive = (Rank(0, os.getpid()), Rank(1, os.getpid(), raised=100.0, exception="ValueError: loss is nan (train.py:61)"))
    ranks = alive

    def notice_raised(self) -> None: ...
    def progress(self) -> int:
        return 0


def test_a_rank_that_raised_five_seconds_ago_and_still_runs_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    processes: Any = Raised()
    watch = StallWatch(RunDir(tmp_path), processes, 0.0, 120.0, said.append, lambda *_: None)
    monkeypatch.setattr(stall.processes, "children", lambda _: [])
    for now, count in ((104.0, 0), (106.0, 1), (108.0, 1)):
        monkeypatch.setattr(stall.time, "monotonic", lambda now=now: now)
        watch.look()
        assert len(said) == count
    assert said == [
        "rank 1 raised ValueError: loss is nan (train.py:61) 6 s ago and has not exited, because a thread, a child process "
        "or an atexit function still runs (child processes: none); all ranks are killed 120 s after the exception (--grace)"
    ]


def test_a_rank_that_is_only_slowed_by_short_stops_is_not_reported_and_one_that_stays_stopped_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    processes: Any = Raised()
    processes.alive = processes.ranks = (Rank(0, os.getpid()),)
    watch = StallWatch(RunDir(tmp_path), processes, 0.0, 120.0, said.append, lambda *_: None)
    monkeypatch.setattr(stall.processes, "children", lambda _: [])
    monkeypatch.setattr(stall.processes, "state", lambda _: "T")
    for second, used_s in enumerate([0.1, 0.4, 0.8, 1.1, 1.1, 1.1, 1.1]):
        monkeypatch.setattr(stall.time, "monotonic", lambda now=2.0 * second: now)
        monkeypatch.setattr(stall.processes, "cpu_s", lambda _, used_s=used_s: used_s)
        watch.look()
        assert len(said) == (second > 4)
    assert said[0].startswith("rank 0 is stopped (SIGSTOP); the others wait for it. To continue, type: kill -CONT ")


def test_the_main_threads_stack_is_read_from_a_dump() -> None:
    dump = (
        'Thread 0x0001 (most recent call first):\n  File "/x/threading.py", line 1 in wait\n\n'
        'Current thread 0x0002 (most recent call first):\n  File "/a b/train.py", line 5 in f\n'
        '  File "/a b/train.py", line 9 in <module>\n'
    )
    assert parse(dump) == (Frame("/a b/train.py", 5, "f"), Frame("/a b/train.py", 9, "<module>"))
    assert parse("") == ()
