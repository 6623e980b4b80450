"""The order of samples: a bijection, different in each epoch, without memory."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from rankwise.data.order import BlockOrder, Order, _Network, _Tables
from rankwise.errors import DataError

SIZES = [1, 2, 3, 5, 7, 64, 1000, 1023, 1024, 1025, 1026, 4096, 9973, (1 << 14) - 1, 1 << 14, (1 << 14) + 1, 3 << 14, 100_003]


@pytest.mark.parametrize("samples", SIZES)
def test_an_epoch_is_every_index_once(samples: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (7, 0), (2**62, 100_000)):
        indices = Order(samples, seed).indices(epoch, 0, samples)
        assert indices.dtype == np.int64
        assert np.array_equal(np.sort(indices), np.arange(samples))


def test_an_epoch_of_a_few_million_is_every_index_once() -> None:
    samples = 3_000_017
    assert np.bincount(Order(samples, 1).indices(4, 0, samples), minlength=samples).tolist() == [1] * samples


@pytest.mark.parametrize("samples", [5, 1023, 1024, 1025, 100_003])
def test_epochs_and_seeds_have_orders_of_their_own(samples: int) -> None:
    orders = {(seed, epoch): Order(samples, seed).indices(epoch, 0, samples) for seed in range(4) for epoch in range(4)}
    firsts = list(orders.values())
    if samples > 5:
        for i, a in enumerate(firsts):
            for b in firsts[i + 1 :]:
                assert (a == b).sum() < 12  # in two unrelated permutations, one index is at the same place on average
            assert (a == np.arange(samples)).sum() < 12
    else:
        assert len({tuple(o) for o in firsts}) > 8


def test_large_seeds_have_orders_of_their_own_and_small_ones_those_of_older_checkpoints() -> None:
    assert Order(10, 7).indices(1, 0, 10).tolist() == [9, 0, 8, 6, 7, 1, 3, 4, 2, 5]
    assert Order(2000, 2**32 - 1).indices(3, 0, 6).tolist() == [1929, 1449, 191, 1412, 533, 1078]
    seeds = (5, 5 + 2**32, 5 + 2**33, 2**64 + 5, 2**64)
    orders = {tuple(Order(500, seed).indices(epoch, 0, 500).tolist()) for seed in seeds for epoch in range(3)}
    assert len(orders) == 3 * len(seeds)


@pytest.mark.parametrize("samples", [5, 1023, 1025, 50_000])
def test_a_slice_is_the_same_whatever_is_asked_around_it(samples: int) -> None:
    rng = np.random.default_rng(0)
    order = Order(samples, 3)
    whole = order.indices(2, 0, samples).copy()
    for _ in range(50):
        start, stop = sorted(rng.integers(0, samples + 1, 2).tolist())
        other = Order(samples, 3)
        assert np.array_equal(other.indices(2, start, stop), whole[start:stop])
    cuts = [0, *sorted(rng.integers(0, samples + 1, 20).tolist()), samples]
    assert np.array_equal(np.concatenate([order.indices(2, a, b) for a, b in pairwise(cuts)]), whole)


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    order = Order(100_000, 5, shuffle=False)
    assert order.indices(3, 40_000, 60_000).tolist() == list(range(40_000, 60_000))


def test_any_position_of_a_billion_costs_next_to_nothing() -> None:
    order = Order(10**9, 3)
    order.indices(1, 0, 64)
    tracemalloc.start()
    try:
        late = order.indices(2, 9 * 10**8, 9 * 10**8 + 64)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20
    assert len(set(late.tolist())) == 64
    assert late.min() >= 0
    assert late.max() < 10**9
    assert late.max() - late.min() > 10**8
    last = order.indices(2, 10**9 - 3, 10**9)
    assert len(last) == 3


def test_many_epochs_and_positions_do_not_pile_up_in_memory() -> None:
    order = Order(10**9, 3)
    tracemalloc.start()
    try:
        for epoch in range(60):
            order.indices(epoch, epoch * 10**7, epoch * 10**7 + 10)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 4 << 20


def test_positions_outside_an_epoch_and_an_empty_dataset_are_errors() -> None:
    for start, stop in ((-1, 3), (0, 11), (4, 3), (11, 11)):
        with pytest.raises(DataError, match="not within an epoch of 10 samples"):
            Order(10).indices(0, start, stop)
    assert len(Order(10).indices(0, 10, 10)) == 0
    assert len(Order(10**6).indices(0, 10**6, 10**6)) == 0
    with pytest.raises(DataError, match="empty"):
        Order(0)


def test_the_order_of_a_run_is_that_of_every_version() -> None:
    """A checkpoint of last year resumes with the order of last year: these numbers must not change."""
    assert Order(1000, 3).indices(2, 0, 6).tolist() == [983, 19, 269, 795, 441, 744]
    assert Order(5000, 3).indices(2, 0, 6).tolist() == [4935, 1422, 642, 390, 1038, 2630]
    assert Order(10**9, 3).indices(2, 9 * 10**8, 9 * 10**8 + 4).tolist() == [670748715, 631788891, 175299036, 746808217]


# --- quality: like a permutation drawn at random, within 5 sigma


def z_of_chi_square(observed: np.ndarray, expected: float, freedom: int) -> float:
    chi = float(((observed - expected) ** 2 / expected).sum())
    return (chi - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("samples", [1_000_000, 1 << 20, 999_983])
def test_where_an_index_lies_says_nothing_about_which_it_is(samples: int) -> None:
    indices = Order(samples, 11).indices(0, 0, samples)
    bins = 100
    table, _, _ = np.histogram2d(np.arange(samples), indices, bins=bins, range=[[0, samples], [0, samples]])
    assert abs(z_of_chi_square(table, samples / bins**2, (bins - 1) ** 2)) < 5


@pytest.mark.parametrize("samples", [1_000_000, 1 << 20, 999_983])
@pytest.mark.one_in(3)
def test_neighbours_in_the_order_are_strangers(samples: int) -> None:
    indices = Order(samples, 12).indices(1, 0, samples)
    bins = 64
    for lag in (1, 2, 64, 1000, 1024):
        table, _, _ = np.histogram2d(indices[:-lag], indices[lag:], bins=bins, range=[[0, samples], [0, samples]])
        assert abs(z_of_chi_square(table, (samples - lag) / bins**2, bins**2 - 1 - 2 * (bins - 1))) < 5
        correlation = np.corrcoef(indices[:-lag], indices[lag:])[0, 1]
        assert abs(correlation) * samples**0.5 < 5
    # Low bits would show a dataset sorted in strides.
    for modulus in (2, 8, 10, 1000):
        table, _, _ = np.histogram2d(np.arange(samples) % modulus, indices % 10, bins=[modulus, 10])
        expected = np.outer(np.bincount(np.arange(samples) % modulus), np.bincount(np.arange(samples) % 10)) / samples
        chi = float(((table - expected) ** 2 / expected).sum())
        freedom = (modulus - 1) * 9
        assert (chi - freedom) / (2 * freedom) ** 0.5 < 6


@pytest.mark.parametrize("samples", [7, 1023, 1024, 1025, 2000])
def test_over_epochs_each_position_sees_each_index_alike(samples: int) -> None:
    epochs = 3000
    first = np.array([Order(samples, 5).indices(epoch, 0, 2) for epoch in range(epochs)])
    bins = min(samples, 50)
    edges = np.linspace(0, samples, bins + 1)
    weights = np.diff(np.ceil(edges)) / samples
    for column in first.T:
        observed = np.histogram(column, bins=np.ceil(edges) - 0.5)[0]
        chi = float(((observed - epochs * weights) ** 2 / (epochs * weights)).sum())
        assert abs(chi - (bins - 1)) / (2 * (bins - 1)) ** 0.5 < 5
    assert abs(np.corrcoef(first[:, 0], first[:, 1])[0, 1] + 1 / (samples - 1)) * epochs**0.5 < 5


def test_two_epochs_are_unrelated_permutations() -> None:
    samples = 200_003
    a, b = (Order(samples, 9).indices(epoch, 0, samples) for epoch in (0, 1))
    where = np.empty(samples, np.int64)
    where[a] = np.arange(samples)
    bins = 50
    table, _, _ = np.histogram2d(np.arange(samples), where[b], bins=bins, range=[[0, samples], [0, samples]])
    assert abs(z_of_chi_square(table, samples / bins**2, (bins - 1) ** 2)) < 5


def test_what_a_caller_does_to_its_indices_does_not_reach_the_next_caller() -> None:
    order = Order(5000, 1)
    first = order.indices(0, 0, 10)
    expected = first.tolist()
    try:
        first += 1
    except ValueError:  # an error because it is read-only is also right
        return
    assert order.indices(0, 0, 10).tolist() == expected


def test_without_a_seed_the_order_is_that_of_seed_0() -> None:
    assert np.array_equal(Order(100).indices(0, 0, 100), Order(100, 0).indices(0, 0, 100))


@pytest.mark.parametrize("samples", [1024, 1025, 40_000, 999_983, 1_000_000])
def test_the_tables_of_an_order_move_each_position_like_its_network(samples: int) -> None:
    network = _Network.of(samples, np.random.SeedSequence([samples, 3]))
    positions = np.random.default_rng(0).permutation(samples)[:5000]
    assert np.array_equal(_Tables.of(network).moved(positions), network.moved(positions))


def test_positions_have_the_same_samples_in_a_long_run_and_in_short_ones() -> None:
    for order in (Order(50_000, seed=1), BlockOrder(50_000, 1, "in blocks", 16, 64)):
        whole = order.indices(2, 100, 40_100)
        parts = [order.indices(2, start, start + 1000) for start in range(100, 40_100, 1000)]
        assert np.array_equal(whole, np.concatenate(parts))
