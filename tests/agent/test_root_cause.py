"""Which rank is the cause."""

from __future__ import annotations

import random
import signal
from dataclasses import replace

import pytest

from rankwise.agent.root_cause import FOLLOWER_SIGNS, Evidence, exit_status, judge, summary, unkillable

RESET = "ConnectionResetError: [Errno 104] Connection reset by peer"
FOLLOWS = "RuntimeError: [../gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:29500"


def end(rank: int, ended: float, code: int | None = None, **more: object) -> Evidence:
    """The end of a rank: with `code`, or with `signum`."""
    return Evidence(rank, code, **{"signum": None, "sent": False, "ended": ended, **more})  # type: ignore[arg-type]


def raised(rank: int, ended: float, exception: str = "ValueError: loss is nan", **more: object) -> Evidence:
    return end(rank, ended, 1, exception=exception, **more)


def follower(rank: int, ended: float, **more: object) -> Evidence:
    return raised(rank, ended, FOLLOWS, **more)


def killed(rank: int, ended: float, signum: int = signal.SIGKILL, **more: object) -> Evidence:
    return end(rank, ended, None, signum=signum, **more)


def sent(rank: int, ended: float) -> Evidence:
    """Ended by a signal of the agent."""
    return killed(rank, ended, signal.SIGTERM, sent=True)


CAUSES = {
    "nobody has ended": ([], None),
    "all left with 0": ([end(0, 1.0, 0), end(1, 2.0, 0)], None),
    "the only one that failed": ([end(0, 1.0, 0), raised(1, 2.0), end(2, 3.0, 0)], 1),
    "a signal from outside beats an earlier follower": ([follower(0, 1.0), killed(1, 2.0), follower(2, 3.0)], 1),
    "a signal from outside beats an earlier exception": ([raised(0, 1.0), killed(1, 2.0, signal.SIGSEGV)], 1),
    "the earliest of two signals from outside": ([killed(0, 2.0), killed(1, 1.0)], 1),
    "an exception of its own beats an earlier follower": ([follower(0, 1.0), raised(1, 2.0), follower(2, 1.5)], 1),
    "an exception of its own beats an earlier status": ([end(0, 1.0, 3), raised(1, 2.0)], 1),
    "a status beats an earlier follower": ([follower(0, 1.0), end(1, 2.0, 3), follower(2, 1.5)], 1),
    "a status beats an earlier status of 0": ([end(0, 1.0, 0), end(1, 2.0, 3), follower(2, 2.5)], 1),
    "who left with 0 while all others follow": ([follower(0, 1.0), end(1, 0.5, 0), follower(2, 1.1)], 1),
    "who left with 0, though seen last": ([follower(0, 1.0), follower(2, 1.1), end(1, 2.0, 0)], 1),
    "the earliest of two that left with 0": ([end(0, 0.6, 0), end(1, 0.5, 0), follower(2, 1.0)], 1),
    "who left with 0 is no cause of an exception": ([end(0, 1.0, 0), raised(1, 2.0)], 1),
    "who left with 0 is no cause of a status": ([end(0, 1.0, 0), end(1, 2.0, 3)], 1),
    "who left with 0 is no cause of what the agent ended": ([end(0, 0.5, 0), sent(1, 1.0)], 1),
    "the earliest follower when there is nobody else": ([follower(0, 3.0), follower(1, 2.0), follower(2, 4.0)], 1),
    "a broken connection of Python's own beats an earlier follower": ([follower(0, 1.0), raised(1, 2.0, RESET)], 1),
    "a broken connection of Python's own is no cause of a status": ([raised(0, 1.0, RESET), end(1, 2.0, 3)], 1),
    "a broken connection of Python's own is no cause of another error": ([raised(0, 1.0, RESET), raised(1, 2.0)], 1),
    "who left with 0 while another's own connection broke": ([raised(0, 1.0, RESET), end(1, 0.5, 0)], 1),
    "what the agent ended is not blamed, however early": ([sent(0, 0.5), raised(1, 2.0), sent(2, 0.6)], 1),
    "what the agent ended is not blamed before a follower": ([sent(0, 0.5), follower(1, 2.0)], 1),
    "what raised after the agent's signal is not blamed": ([raised(0, 0.5, sent=True), end(1, 2.0, 3)], 1),
    "who left with 0 is blamed though the agent ended the rest": ([sent(0, 2.0), end(1, 0.5, 0), follower(2, 1.0)], 1),
    "all were ended by the agent: an exception beats the signals": ([sent(0, 1.0), raised(1, 2.0, sent=True), sent(2, 1.5)], 1),
    "all were ended by the agent: the earliest": ([sent(0, 2.0), sent(1, 1.0), sent(2, 3.0)], 1),
    "the clock of the rank beats the order of reaping": (
        [raised(0, 1.0, raised=0.9), raised(1, 2.0, raised=0.8)],
        1,
    ),
    "a clock beats a reaping that came later": ([raised(0, 1.0), raised(1, 2.0, raised=0.8)], 1),
    "of two at the same moment the lower rank": ([raised(2, 1.0), raised(1, 1.0)], 1),
}


@pytest.mark.parametrize(("ends", "culprit"), CAUSES.values(), ids=CAUSES.keys())
def test_the_cause_is_named_whatever_the_order_in_which_ends_are_listed(ends: list[Evidence], culprit: int | None) -> None:
    shuffle = random.Random(0)
    for _ in range(10):
        found = judge(ends)
        assert (found.rank if found is not None else None) == culprit
        ends = shuffle.sample(ends, len(ends))


@pytest.mark.parametrize("sign", FOLLOWER_SIGNS)
def test_an_exception_that_says_that_a_peer_is_gone_follows(sign: str) -> None:
    assert raised(0, 1.0, f"DistBackendError: [1] {sign}: 127.0.0.1").follows


def test_a_broken_connection_of_pythons_own_may_follow_and_one_of_torch_does() -> None:
    assert raised(0, 1.0, RESET).may_follow
    assert not raised(0, 1.0, RESET).follows
    assert not follower(0, 1.0).may_follow
    assert not raised(0, 1.0).may_follow


def test_other_ends_follow_nobody() -> None:
    assert not raised(0, 1.0).follows
    assert not end(0, 1.0, 3).follows
    assert not killed(0, 1.0, signal.SIGPIPE).follows


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        (killed(1, 1.0), "rank 1 was killed by SIGKILL (often the kernel's out-of-memory killer)"),
        (killed(1, 1.0, step=60), "rank 1 was killed by SIGKILL at step 60 (often the kernel's out-of-memory killer)"),
        (killed(0, 1.0, signal.SIGSEGV, step=3), "rank 0 was killed by SIGSEGV at step 3"),
        (killed(0, 1.0, signal.SIGSEGV, step=3, where="train.py:61"), "rank 0 was killed by SIGSEGV at step 3 (train.py:61)"),
        (
            killed(0, 1.0, signal.SIGBUS, where="train.py:61"),
            "rank 0 was killed by SIGBUS (train.py:61; often a full /dev/shm, or a mapped file that was truncated)",
        ),
        (raised(3, 1.0), "rank 3 raised ValueError: loss is nan"),
        (raised(3, 1.0, step=60, where="train.py:61"), "rank 3 raised ValueError: loss is nan (at step 60, train.py:61)"),
        (raised(3, 1.0, where="train.py:61"), "rank 3 raised ValueError: loss is nan (train.py:61)"),
        (raised(0, 1.0, "RuntimeError: one\ntwo\n"), "rank 0 raised RuntimeError: one"),
        (raised(0, 1.0, "RuntimeError: \x1b[1;31mone\x1b[0m\x07 \u202etwo\x00"), "rank 0 raised RuntimeError: one two"),
        (replace(raised(0, 1.0), exit_code=None, signum=signal.SIGTERM, sent=True), "rank 0 raised ValueError: loss is nan"),
        (end(2, 1.0, 3), "rank 2 exited with status 3"),
        (end(2, 1.0, 3, step=7), "rank 2 exited with status 3 at step 7"),
        (end(2, 1.0, 0, step=7), "rank 2 exited with status 0 at step 7 while other ranks still waited for it"),
    ],
)
def test_one_line_says_what_happened_to_which_rank(evidence: Evidence, said: str) -> None:
    assert summary(evidence) == said


IN_ALL_REDUCE = """Traceback (most recent call last):
  File "train.py", line 88, in <module>
    dist.all_reduce(x)
  File "/v/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper
    return func(*args, **kwargs)
  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
    work.wait()
RuntimeError: Connection closed by peer [127.0.0.1]:4711
"""


@pytest.mark.parametrize("status", [0, 3])
def test_where_another_rank_waited_for_one_that_left_is_said(status: int) -> None:
    left = end(1, 1.0, status, step=60)
    waited = replace(raised(0, 1.1, "RuntimeError: Connection closed by peer", where="train.py:88"), traceback=IN_ALL_REDUCE)
    assert judge([waited, left]) is left
    assert summary(left, [waited, left]) == (
        f"rank 1 exited with status {status} at step 60 while rank 0 waited for it in all_reduce (train.py:88)"
    )


def test_of_an_abort_the_place_of_another_rank_is_told_too() -> None:
    aborted = killed(1, 1.0, signal.SIGABRT, where="train.py:50", remark="in all_reduce it received 8 bytes but expected 4")
    other = replace(follower(0, 1.1, where="train.py:88"), traceback=IN_ALL_REDUCE)
    assert judge([aborted, other]) is aborted
    assert summary(aborted, [aborted, other]) == (
        "rank 1 was killed by SIGABRT (train.py:50): in all_reduce it received 8 bytes but expected 4; "
        "rank 0 was in all_reduce (train.py:88)"
    )
    of_kill = killed(1, 1.0, signal.SIGKILL, remark="x")
    assert summary(of_kill, [of_kill, other]) == "rank 1 was killed by SIGKILL: x"


def test_a_long_message_is_cut_in_the_line() -> None:
    said = summary(raised(0, 1.0, "ValueError: " + "x" * 1000, where="train.py:1"))
    assert said.endswith("x... (train.py:1)")
    assert len(said) < 360
    sentences = "ValueError: " + "One sentence. " * 40
    assert summary(raised(0, 1.0, sentences)).endswith("One sentence. One sentence ...")
    words = "ValueError: " + "word " * 200
    assert summary(raised(0, 1.0, words)).endswith(" word word ...")
    ours = raised(0, 1.0, words.strip(), traceback=f"error: {words}")  # nothing else on the console has the rest of it
    assert summary(ours).endswith(words.strip())
    exact = "ValueError: " + "x" * 148
    assert summary(raised(0, 1.0, exact)) == f"rank 0 raised {exact}"


@pytest.mark.parametrize(
    ("evidence", "status"),
    [
        (killed(0, 1.0), 137),
        (killed(0, 1.0, signal.SIGTERM), 143),
        (end(0, 1.0, 3), 3),
        (raised(0, 1.0), 1),
        (replace(raised(0, 1.0), exit_code=2), 2),
        (replace(raised(0, 1.0), exit_code=None, signum=signal.SIGTERM, sent=True), 1),  # while it was exiting
        (replace(raised(0, 1.0), exit_code=None, signum=signal.SIGSEGV), 139),
        (end(0, 1.0, 255), 255),
        (end(0, 1.0, 0), 1),
    ],
)
def test_the_exit_status_is_a_shells_and_never_0(evidence: Evidence, status: int) -> None:
    assert exit_status(evidence) == status


def test_a_real_time_signal_is_named_by_its_number() -> None:
    assert "35" in summary(Evidence(0, None, signal.SIGRTMIN + 1, False, 1.0))


# --- ranks that nothing can end


def stuck(rank: int) -> Evidence:
    return end(rank, 0.0, None, sent=True, stuck="state D in folio_wait_bit")


@pytest.mark.parametrize(
    ("ends", "culprit"),
    [
        ([raised(0, 1.0), stuck(1)], 0),
        ([killed(0, 1.0), stuck(1)], 0),
        ([end(0, 1.0, 3), stuck(1)], 0),
        ([follower(0, 1.0), stuck(1)], 1),
        ([follower(0, 1.0), stuck(1), end(2, 0.5, 0)], 1),
        ([sent(0, 1.0), stuck(1)], 1),
        ([end(0, 1.0, 0), stuck(1)], 1),
    ],
)
def test_a_rank_that_nothing_can_end_is_the_cause_where_no_other_has_one_of_its_own(ends, culprit: int) -> None:
    for order in (ends, ends[::-1]):
        found = judge(order)
        assert found is not None
        assert found.rank == culprit


def test_a_rank_that_nothing_can_end_is_told_beside_the_cause_and_as_the_cause() -> None:
    said = "rank 1 cannot be killed (state D in folio_wait_bit): ask the administrator of the host"
    ends = [raised(0, 1.0), stuck(1)]
    assert summary(ends[0], ends) == f"rank 0 raised ValueError: loss is nan; {said}"
    assert summary(ends[1], ends) == said
    assert unkillable(ends) == f"; {said}"
    assert exit_status(ends[1]) == 1
    hung_at_its_end = replace(stuck(1), exception="ValueError: loss is nan")
    assert summary(hung_at_its_end, [sent(0, 1.0), hung_at_its_end]) == f"rank 1 raised ValueError: loss is nan; {said}"


# --- what happened to all


def test_the_same_error_on_all_ranks_is_told_as_that_of_all() -> None:
    ends = [raised(0, 1.0, where="train.py:1", step=3), raised(1, 2.0, where="train.py:1", step=3)]
    assert summary(ends[0], ends) == "all 2 ranks raised ValueError: loss is nan (at step 3, train.py:1)"
    assert summary(ends[0], [ends[0]]) == "rank 0 raised ValueError: loss is nan (at step 3, train.py:1)"
    assert summary(ends[0], [*ends, sent(2, 3.0)]).startswith("rank 0 raised")
    assert summary(ends[0], [ends[0], raised(1, 2.0, "ValueError: loss is inf")]).startswith("rank 0 raised")
    killed_all = [killed(0, 1.0), killed(1, 1.0)]
    assert summary(killed_all[0], killed_all).startswith("rank 0 was killed")


def test_the_same_status_of_all_ranks_is_told_as_that_of_all() -> None:
    ends = [end(0, 1.0, 3, step=7), end(1, 2.0, 3, step=7)]
    assert summary(ends[0], ends) == "all 2 ranks exited with status 3 at step 7"
    assert summary(ends[0], [ends[0], end(1, 2.0, 4)]) == "rank 0 exited with status 3 at step 7"
    assert summary(ends[0], [ends[0], raised(1, 2.0)]).startswith("rank 0 exited")
    assert summary(ends[0], [ends[0], sent(1, 2.0)]).startswith("rank 0 exited")


def test_of_models_of_different_size_the_one_that_differs_from_most_is_the_cause() -> None:
    said = "RuntimeError: DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has inconsistent {}"
    ends = [
        raised(0, 1.0, said.format(0, 4, 2, 6)),
        raised(1, 1.1, said.format(1, 4, 2, 6)),
        raised(2, 1.2, said.format(2, 6, 0, 4), where="train.py:8"),
    ]
    found = judge(ends)
    assert found is not None
    assert summary(found, ends) == (
        "rank 2 raised RuntimeError: its model differs from that of rank 0: 6 parameters instead of 4 (train.py:8)"
    )
    two = judge([raised(0, 1.0, said.format(0, 4, 1, 6)), raised(1, 1.1, said.format(1, 6, 0, 4))])
    assert two is not None
    assert two.rank == 1


@pytest.mark.parametrize(
    ("exception", "said"),
    [
        ("RuntimeError: Error(s) in loading state_dict for Linear:\n\tsize mismatch for weight: a, b.\n\tsize mismatch",
         "raised RuntimeError: Error(s) in loading state_dict for Linear: size mismatch for weight: a, b."),
        ("ValueError: bad:", "raised ValueError: bad:"),
        ("ValueError: bad\nand more", "raised ValueError: bad"),
        ("\n", "raised "),
    ],
)  # fmt: skip
def test_a_first_line_that_announces_a_second_is_told_with_it(exception: str, said: str) -> None:
    assert summary(raised(1, 1.0, exception)) == f"rank 1 {said}"
