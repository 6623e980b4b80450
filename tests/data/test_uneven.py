"""A different stream on each rank, of unknown length: the same number of steps on all ranks, without a message per step."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
from batches import loaders, numbers, steps_of
from ranks import RankError, on_ranks
from torch.utils.data import IterableDataset

import rankwise
from rankwise.data import Loader
from rankwise.data.order import share, split
from rankwise.dist import comm
from rankwise.errors import ConfigError


class OfRank(IterableDataset[int]):
    """1000 r, 1000 r + 1, ... on rank r; one more sample in each later epoch."""

    split_by_rank = True
    epoch = 0

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rank = rankwise.rank()  # also in loader workers
        for k in range(self.lengths[rank] + self.epoch):
            yield 1000 * rank + k


Plan = list[list[list[list[int]]]]
"""For each rank and step, the micro-batches."""


def expected(lengths: tuple[int, ...], size: int, policy: str, accumulate: int, drop_last: bool, epochs: int = 2) -> Plan:
    """Computed in the simplest way."""
    ranks: Plan = [[] for _ in lengths]
    for epoch in range(epochs):
        own = [[1000 * r + k for k in range(n + epoch)] for r, n in enumerate(lengths)]
        sizes = [high - low for low, high in (share(0, size, r, len(lengths)) for r in range(len(lengths)))]
        counts = [n // g if drop_last else math.ceil(n / g) for n, g in zip(map(len, own), sizes, strict=True)]
        for step in range(min(counts) if policy == "stop" else max(counts)):
            for r, g in enumerate(sizes):
                if policy == "pad":
                    samples = [own[r][k % len(own[r])] for k in range(step * g, (step + 1) * g)]
                else:
                    samples = own[r][step * g : (step + 1) * g]
                if drop_last and len(samples) < g:
                    samples = []
                ranks[r].append(split(samples, accumulate))
    return ranks


CASES = [
    # (samples of each rank, size of the global batch, accumulate); ranks end before, at and after the 8th and 16th step.
    ((5, 7, 2), 3, 1), ((7, 7, 7), 3, 1), ((8, 9, 1), 3, 1), ((15, 16, 17), 3, 1), ((8, 8, 8), 3, 1), ((33, 4, 20), 8, 2),
    ((1, 40, 16), 5, 1), ((3, 1, 2), 60, 3),
]  # fmt: skip
POLICIES = [("join", False), ("join", True), ("stop", False), ("stop", True), ("pad", False)]


def loader_of(lengths: tuple[int, ...], policy: str | None, **settings: Any) -> Loader:
    world = comm.init()
    return Loader(OfRank(lengths[: world.world_size]), uneven=policy, max_epochs=2, **settings)


def all_cases(workers: int) -> list[Any]:
    multiprocessing.set_start_method("fork", force=True)
    answers = []
    for lengths, size, accumulate in CASES if workers == 0 else CASES[5:6]:
        for policy, drop_last in POLICIES:
            if drop_last and size > min(lengths):  # nothing is left of some rank
                continue
            loader = loader_of(
                lengths, policy, global_batch_size=size, accumulate=accumulate, drop_last=drop_last, workers=workers
            )
            ends = []
            steps = []
            for micro_batches in loader:
                steps.append([numbers(batch) for batch in micro_batches])
                ends.append((loader.epoch, loader.position))
            answers.append(((lengths, size, accumulate, policy, drop_last), steps, ends))
    return answers


@pytest.mark.parametrize(("n", "workers"), [(1, 0), (2, 0), (3, 0), (3, 2)])
@pytest.mark.one_in(2)
def test_all_ranks_take_the_steps_of_the_policy_and_know_its_end(n: int, workers: int) -> None:
    answers = on_ranks(n, all_cases, workers)
    assert len(answers[0]) >= (25 if workers == 0 else 3)
    for per_rank in zip(*answers, strict=True):
        lengths, size, accumulate, policy, drop_last = per_rank[0][0]
        plan = expected(lengths[:n], size, policy, accumulate, drop_last)
        assert [steps for _, steps, _ in per_rank] == plan, per_rank[0][0]
        ends = per_rank[0][2]
        assert all(told == ends for _, _, told in per_rank)
        assert ends[-1] == (2, 0)
        taken = [sum(len(m) for rank in plan for m in rank[step]) for step in range(len(ends))]
        for step, (epoch, position) in enumerate(ends):
            before = ends[step - 1][1] if step else 0
            assert position in (before + taken[step], 0), (epoch, step)
        assert sum(position == 0 for _, position in ends) == 2


def resumed(policy: str, drop_last: bool) -> list[tuple[int, Any, Any]]:
    settings: dict[str, Any] = {"global_batch_size": 4, "accumulate": 2, "drop_last": drop_last}
    lengths = (23, 6, 11)
    unbroken = steps_of(loader_of(lengths, policy, **settings))
    answers = []
    for stop in range(len(unbroken)):
        first = loader_of(lengths, policy, **settings)
        before = steps_of(first, stop)
        second = loader_of(lengths, policy, **{**settings, "global_batch_size": 9})
        second.load_state_dict(first.state_dict())
        answers.append((stop, before + steps_of(second), unbroken))
    return answers


@pytest.mark.parametrize(("policy", "drop_last"), POLICIES)
@pytest.mark.one_in(6)
def test_uneven_streams_go_on_anywhere_as_if_they_had_not_stopped(policy: str, drop_last: bool) -> None:
    for answers in on_ranks(3, resumed, policy, drop_last):
        assert len(answers) > 5
        for stop, got, unbroken in answers:
            assert got == unbroken, stop


def messages() -> tuple[int, int]:
    """(steps, all-reduces for them) of one epoch."""
    count = 0
    before = comm.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return before(*args, **kwargs)

    comm.all_reduce = counted
    loader = loader_of((30, 20), None, global_batch_size=2)
    loader.max_epochs = 1
    return len(steps_of(loader)), count


def test_a_message_is_sent_once_in_eight_steps() -> None:
    assert on_ranks(2, messages) == [(30, 4)] * 2


def refused(lengths: tuple[int, ...], policy: str) -> list[Any]:
    return steps_of(loader_of(lengths, policy, global_batch_size=4))


def test_a_rank_without_a_sample_joins_and_is_named_where_it_cannot() -> None:
    none, some = on_ranks(2, refused, (0, 3), "join")
    assert none == [[], [], [[0]], []]
    assert some == [[[1000, 1001]], [[1002]], [[1000, 1001]], [[1002, 1003]]]
    for lengths, policy, text in (
        ((0, 3), "stop", r"DataError: the stream of OfRank yields nothing on rank 0, so uneven='stop' ends the epoch at once"),
        ((3, 0), "pad", r"DataError: the stream of OfRank yields nothing on rank 1, so uneven='pad' has nothing to repeat"),
        ((0, 0), "join", r"DataError: the stream of OfRank yields nothing on ranks 0, 1"),
    ):
        with pytest.raises(RankError, match=text) as raised:
            on_ranks(2, refused, lengths, policy)
        assert "rank 1:" in str(raised.value)


def test_another_number_of_ranks_goes_on_only_where_an_epoch_begins() -> None:
    (loader,) = loaders(OfRank((9, 9)), 1, max_epochs=2)
    steps_of(loader, 1)
    middle = loader.state_dict()
    steps_of(loader, 1)
    (two, _) = loaders(OfRank((9, 9)), 2, max_epochs=2)
    with pytest.raises(ConfigError, match=r"made in the middle of an epoch .* 1 ranks .* resume on 1 ranks"):
        two.load_state_dict(middle)
    assert loader.position == 0
    two.load_state_dict(loader.state_dict())
    (padded,) = loaders(OfRank((9, 9)), 1, max_epochs=2, uneven="pad")
    with pytest.raises(ConfigError, match=r"uneven=join and this run has uneven=pad; give uneven='join', or start a new run"):
        padded.load_state_dict(middle)


def test_a_policy_is_for_streams_that_say_they_are_split() -> None:
    class Whole(OfRank):
        split_by_rank = False

    for dataset, settings, text in (
        (OfRank((9,)), {"uneven": "wait"}, "uneven='wait'\\): give one of 'join', 'stop', 'pad'"),
        (
            Whole((9,)),
            {"uneven": "join"},
            "Whole is treated as the same on all; if Whole divides itself by rank, set split_by_rank = True",
        ),
        ([1, 2, 3], {"uneven": "join"}, "uneven='join' is only for streams, and list has a length; remove uneven"),
        (OfRank((9,)), {"uneven": "pad", "drop_last": True}, "uneven='pad' fills every step"),
    ):
        with pytest.raises(ConfigError, match=text):
            loaders(dataset, 1, **settings)
    with pytest.raises(
        ConfigError, match="global_batch_size=2 is too small for 3 ranks: each rank needs at least one sample; give 3 or more"
    ):
        next(iter(loaders(OfRank((9, 9, 9)), 3, global_batch_size=2)[0]))
    (loader,) = loaders(OfRank((9,)), 1)
    assert (loader.is_stream, loader.is_split, loader.samples, loader.fewest) == (True, True, None, 0)
    assert loader.describe() == "a separate stream on each rank (uneven: join)"
