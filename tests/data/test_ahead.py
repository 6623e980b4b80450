"""A dataset learns of samples before they are read, of no more than documented, and the batches do not depend on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from batches import loaders
from torch.utils.data import Subset

from rankwise.data import Blocks
from rankwise.data.ahead import Ahead, announced, how_far
from rankwise.data.order import BlockOrder, Indices, Order, order_of


def requests_of(sizes: list[int]) -> list[tuple[int, Indices]]:
    ends = [0, *itertools.accumulate(sizes)]
    return [(7, np.arange(a, b)) for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("ahead", [Ahead(1), Ahead(12), Ahead(40, together=10), Ahead(1000, together=30)])
@pytest.mark.parametrize("sizes", [[], [3], [3] * 20, [1, 9, 0, 30, 2, 2, 0, 1], [0, 0]])
def test_requests_are_the_same_and_each_was_told_before(sizes: list[int], ahead: Ahead) -> None:
    told: list[int] = []
    given, taken = requests_of(sizes), 0
    found = []
    for epoch, indices in announced(iter(given), told.extend, ahead):
        found.append((epoch, indices.tolist()))
        taken += len(indices)
        assert told[:taken] == list(range(taken))
        assert len(told) - taken <= ahead.samples + max(sizes) + ahead.together
    assert found == [(epoch, indices.tolist()) for epoch, indices in given]
    assert told == list(range(sum(sizes)))


def test_single_samples_are_told_four_batches_ahead_from_the_first_on() -> None:
    told: list[int] = []
    some = announced(iter(requests_of([5] * 30)), told.extend, how_far(Order(150), 5, 1))
    for number in range(20):
        next(some)
        assert len(told) == 5 * (number + 5)


def test_of_blocks_the_distance_grows_to_a_window() -> None:
    told: list[int] = []
    some = announced(iter(requests_of([10] * 100)), told.extend, Ahead(200, together=50, rows=4))
    lead = []
    for number, (_, indices) in enumerate(some):
        lead.append(len(told) - int(indices[0]))
        assert number or lead == [60 - 10]
    assert max(lead) in range(200, 270)
    assert lead[40] >= 200


def test_of_blocks_some_samples_of_each_are_told() -> None:
    order = order_of(None, 10_000, 0, Blocks(100, 10))
    assert isinstance(order, BlockOrder)
    told: list[int] = []
    requests = [(0, order.indices(0, k, k + 10)) for k in range(0, 10_000, 10)]
    given = list(announced(iter(requests), lambda some: told.extend((some // 100).tolist()), how_far(order, 10, 1)))
    assert given == requests
    assert {*told} == {*range(100)}
    assert len(told) < 7000


@pytest.mark.parametrize(
    ("shuffle", "ranks", "expected"),
    [
        (True, 4, Ahead(40)),
        (False, 1, Ahead(40)),
        (Blocks(1000, 100), 4, Ahead(25_000, together=1600, skipped=4650, rows=1000)),
        (Blocks(5, 4), 4, Ahead(40, together=40, rows=5)),
        (Blocks(10**6, 10**6), 1, Ahead(1 << 21, together=1 << 21, rows=10**6)),
    ],
)
def test_how_far_ahead_it_is_told(shuffle: Any, ranks: int, expected: Ahead) -> None:
    assert how_far(order_of(None, 10**6, 0, shuffle), 10, ranks) == expected


class Told:
    """Records what it is told, and what is read."""

    draws_nothing = True

    def __init__(self) -> None:
        self.told: list[int] = []
        self.rows: list[int] = []

    def __len__(self) -> int:
        return 97

    def __getitem__(self, index: int) -> int:
        assert index in self.told
        return index

    def read_ahead(self, rows: int) -> Callable[[Indices], None]:
        self.rows.append(rows)
        return lambda indices: self.told.extend(indices.tolist())


@pytest.mark.parametrize("ways", [{}, {"prefetch_factor": 2}, {"shuffle": Blocks(8, 2)}, {"split": "files"}, {"accumulate": 3}])
def test_a_loader_tells_each_rank_its_own_samples_once_an_epoch(ways: dict[str, Any]) -> None:
    seen = []
    for rank in range(3):
        data = Told()
        loader = loaders(data, 3, max_epochs=1, **ways)[rank]
        mine = [k for step in loader for batch in step for k in batch.tolist()]
        assert data.told == mine
        assert data.rows == [8 if "shuffle" in ways else 1]
        seen += mine
    assert sorted(seen) == [*range(97)]


def test_the_position_of_a_loader_is_that_of_what_was_taken() -> None:
    data = Told()
    (loader,) = loaders(data, 1)
    next(iter(loader))
    assert len(data.told) == 25
    assert loader.state_dict()["position"] == 5


def test_a_part_of_a_dataset_tells_the_samples_of_the_whole() -> None:
    data = Told()
    (loader,) = loaders(Subset(data, range(40, 60)), 1, shuffle=Blocks(4, 2))
    assert sorted(k for step in loader for batch in step for k in batch.tolist()) == [*range(40, 60)] == sorted(data.told)
    assert data.rows == [1]
