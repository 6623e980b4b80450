"""Why a training is slow, from the seconds of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rankwise.telemetry.slowness import PARTS, SlowWatch, Spent, large_part, late_data, waited_for


def spent(processor: float = 4.0, **parts: float) -> Spent:
    """Ten seconds of a rank: `data_wait=3` of them in this part."""
    named = {name.replace("_", " "): s for name, s in parts.items()}
    return Spent(10.0, dict.fromkeys(PARTS, 0.0) | {"all-reduce": named.pop("waits", 0.0)} | named, processor)


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        (
            spent(waits=0.5, data_wait=5),
            "rank 1 is slower than the others, which wait 55% of the time for it; it waits 50% of the time for data, the "
            "others 0%: its disk or loader workers are slower, or its samples larger",
        ),
        (
            spent(waits=0.5, actions=5),
            "rank 1 is slower than the others, which wait 55% of the time for it; it spends 50% of the time on actions, the "
            "others 0%: all ranks wait for this",
        ),
        (
            spent(waits=0.5, processor=3.8),
            "rank 1 is slower than the others, which wait 55% of the time for it; while it computes, it has a processor for "
            "40% of the time, the others for 100%: another program, a CPU limit or swapping slows it, or the script waits for "
            "something there",
        ),
        (
            spent(waits=0.5, processor=9.5),
            "rank 1 is slower than the others, which wait 55% of the time for it; it computes 2.4 times as long: larger "
            "batches, a slower device, or work that the others do not have",
        ),
    ],
    ids=["data", "an action", "no processor", "more work"],
)
def test_the_rank_that_waits_least_is_reported_with_the_part_in_which_it_is_longer(slow: Spent, said: str) -> None:
    found = waited_for([spent(waits=6), slow, spent(waits=6)])
    assert found is not None
    assert found[1] == said


def test_the_ranks_of_a_slow_node_are_reported_together_with_its_host() -> None:
    ranks = [spent(waits=6)] * 2 + [spent(waits=1, data_wait=5), spent(waits=1.2, data_wait=5)]
    found = waited_for(ranks, ["node1", "node1", "node2", "node2"])
    assert found is not None
    assert found[1].startswith(
        "ranks 2, 3 (on node2) are slower than the others, which wait 50% of the time for them; they wait 50% of the time for "
        "data, the others 0%: their disk"
    )


@pytest.mark.parametrize("waits", [(6.0, 6.0, 6.0), (1.0, 2.0, 2.0), (5.0,)], ids=["a slow network", "a little", "one rank"])
def test_ranks_that_wait_alike_or_briefly_are_not_slow(waits: tuple[float, ...]) -> None:
    assert waited_for([spent(waits=wait) for wait in waits]) is None


def test_where_gpus_wait_and_not_the_script_the_rank_with_late_data_is_reported() -> None:
    ranks = [spent(), spent(), spent(data_wait=4)]
    assert waited_for(ranks) is None
    found = late_data(ranks)
    assert found is not None
    assert found[1] == (
        "all ranks wait for rank 2; it waits 40% of the time for data, the others 0%: its disk or loader workers are slower, "
        "or its samples larger"
    )
    assert late_data([spent(data_wait=4), spent(data_wait=5)]) is None
    assert late_data([spent(data_wait=4)]) is None


def test_a_part_that_takes_much_of_the_time_of_all_ranks_is_reported_with_what_helps() -> None:
    assert large_part([spent(data_wait=2)]) is None
    found = large_part([spent(data_wait=4), spent(data_wait=3)])
    assert found is not None
    assert found[1] == (
        "35% of the time is data wait: raise num_workers of the Loader, set persistent_workers=True if epochs are short, or "
        "make the samples cheaper to read"
    )


def lines(watch: SlowWatch, ranks: Callable[[int], list[Spent]], intervals: int, steps: int = 50) -> list[tuple[int, str]]:
    """(the interval, what is printed after it), for intervals of ten seconds."""
    said = ((i, watch.add(ranks(i), steps, 10.0 * i)) for i in range(intervals))
    return [(i, line) for i, line in said if line is not None]


def test_a_slow_rank_is_reported_after_the_second_interval_and_then_less_and_less_often() -> None:
    said = lines(SlowWatch(), lambda _: [spent(waits=6), spent()], 500)
    assert [i for i, _ in said] == [1, 61, 181, 421]
    assert all(line.startswith("slow: rank 1 is slower") for _, line in said)


def test_what_is_new_is_reported_too_but_at_most_once_a_minute() -> None:
    said = lines(SlowWatch(), lambda i: [spent(waits=6 * (i % 2)), spent(waits=6 * (1 - i % 2))], 30)
    assert [(i, line[:11]) for i, line in said] == [(1, "slow: rank "), (8, "slow: rank ")]


def test_steps_that_compute_longer_and_longer_are_reported() -> None:
    said = lines(SlowWatch(), lambda i: [spent()], 3)
    assert said == []
    watch = SlowWatch()
    assert lines(watch, lambda _: [spent()], 2, steps=100) == []
    assert lines(watch, lambda _: [spent()], 1, steps=40) == [
        (
            0,
            "slow: computing a step takes 0.25 s, 2.5 times as long as before: something grows (a list, losses added up "
            "without .detach()), or another program uses the same processors",
        )
    ]
