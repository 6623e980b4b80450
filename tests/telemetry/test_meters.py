"""Means over samples and ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from rankwise.dist import comm, shared_memory
from rankwise.errors import ConfigError
from rankwise.telemetry.meters import Meters, Total


def meter_on_ranks() -> dict[str, Any]:
    """Rank r adds r samples in each of two intervals, as floats and as tensors; rank 0 has none."""
    rank = comm.rank()
    calls = 0
    original = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    dist.all_reduce = counted
    in_memory = shared_memory.begun
    meters = Meters("loss", "accuracy")
    answers = []
    for interval in (1, 2):
        for k in range(rank):
            loss = torch.tensor(float(interval * 10 + k), dtype=torch.float32)
            meters.add(loss=(loss, 2), accuracy=(1, torch.tensor(4)))
        answers.append(meters.reduce_with_clock(100.0 * interval + rank, [rank + 0.5, interval]))
    answers.append(meters.reduce_with_clock(5.0 if rank == 0 else 7.0))
    return {"answers": answers, "calls": calls + shared_memory.begun - in_memory}


@pytest.mark.parametrize(("n", "backend"), [(1, None), (2, None), (4, None), (4, "gloo")])
def test_sums_and_counts_are_those_of_all_ranks_and_the_clock_is_the_main_ranks(n: int, backend: str | None) -> None:
    for answer in on_ranks(n, meter_on_ranks, init={"backend": backend}):
        samples = sum(range(n))
        for interval in (1, 2):
            sums, clock_s, rows = answer["answers"][interval - 1]
            assert rows == [[r + 0.5, interval] for r in range(n)]
            assert sums["loss"] == Total(sum(interval * 10.0 + k for r in range(n) for k in range(r)), 2 * samples)
            assert sums["accuracy"] == Total(samples, 4 * samples)
            assert list(sums) == ["loss", "accuracy"]
            assert clock_s == 100.0 * interval
        assert answer["answers"][2] == ({"loss": Total(0, 0), "accuracy": Total(0, 0)}, 5.0, [[]] * n)
        assert answer["calls"] == (3 if n > 1 else 0)  # one message per interval


def test_adding_waits_for_nothing_and_keeps_no_graph() -> None:
    meters = Meters("loss")
    loss = torch.ones((), requires_grad=True) * 2
    meters.add(loss=(loss.detach(), 1))
    assert meters.reduce() == {"loss": Total(2.0, 1.0)}


def test_sums_are_exact_where_float32_is_not() -> None:
    meters = Meters("loss")
    for _ in range(1000):
        meters.add(loss=(torch.tensor(2.0**24, dtype=torch.float32), 2**24))
        meters.add(loss=(torch.tensor(1.0, dtype=torch.float32), 1))
    assert meters.reduce() == {"loss": Total(1000 * (2**24 + 1), 1000 * (2**24 + 1))}


@pytest.mark.parametrize("forgotten", [0, 3, 4096])
def test_a_long_interval_keeps_few_values_and_the_last_ones_can_still_be_dropped(forgotten: int) -> None:
    meters, n = Meters("loss"), 20_000
    for k in range(n):
        meters.add(loss=(torch.tensor(float(k)) if k % 3 else k, 1 if k % 2 else torch.tensor(1)))
    assert max(map(len, (*meters._sums.values(), *meters._counts.values()))) < 9000
    meters.forget(forgotten)
    assert meters.reduce()["loss"] == Total(sum(range(n - forgotten)), n - forgotten)
    assert meters.reduce()["loss"] == Total(0, 0)


def test_a_name_that_was_not_announced_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^meters\.add\(los=\.\.\.\): Meters was created with loss and accuracy; "):
        Meters("loss", "accuracy").add(los=(1.0, 1))


def test_a_mean_over_nothing_is_nan() -> None:
    assert math.isnan(Total(0.0, 0).mean)
    assert Total(3.0, 2).mean == 1.5
    meters = Meters("loss")
    meters.add(loss=(torch.tensor(math.nan), 1))
    assert math.isnan(meters.reduce()["loss"].mean)


@pytest.mark.parametrize("value", [2.0, torch.tensor(2.0), torch.ones(3)])
def test_a_value_without_its_count_is_refused_with_what_to_write(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^meters\.add\(loss=\.\.\.\) got {type(value).__name__}, which is not a pair; "):
        Meters("loss").add(loss=value)
