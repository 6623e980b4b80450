"""Where the time goes, with a clock that the test moves."""

from __future__ import annotations

import pytest

from rankwise.telemetry import breakdown
from rankwise.telemetry.breakdown import Span, TimeBreakdown


class Clock:
    """A clock, and the time that two parts have measured."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.data_s = 7.0
        self.saving_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def move(self, elapsed_s: float, data_s: float = 0.0, saving_s: float = 0.0) -> None:
        self.now_s += elapsed_s
        self.data_s += data_s
        self.saving_s += saving_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(breakdown, "time", clock)
    return clock


def test_parts_and_computing_add_up_to_the_elapsed_time(clock: Clock) -> None:
    times = TimeBreakdown({"data wait": lambda: clock.data_s, "saving": lambda: clock.saving_s})
    clock.move(100.0, data_s=10.0, saving_s=2.5)
    first = times.since_last()
    assert (first.elapsed_s, first.parts_s, first.computing_s) == (100.0, {"data wait": 10.0, "saving": 2.5}, 87.5)
    clock.move(50.0, data_s=50.0)
    second = times.since_last()
    assert (second.elapsed_s, second.parts_s, second.computing_s) == (50.0, {"data wait": 50.0, "saving": 0.0}, 0.0)
    whole = times.since_start()
    assert (whole.elapsed_s, whole.parts_s, whole.computing_s) == (150.0, {"data wait": 60.0, "saving": 2.5}, 87.5)
    assert times.since_last().elapsed_s == 0.0
    for span in (first, second, whole):
        assert span.computing_s + sum(span.parts_s.values()) == span.elapsed_s


def test_a_restart_forgets_what_was_before(clock: Clock) -> None:
    times = TimeBreakdown({"data wait": lambda: clock.data_s})
    clock.move(100.0, data_s=10.0)
    times.restart()
    clock.move(8.0, data_s=2.0)
    assert times.since_start() == Span(8.0, {"data wait": 2.0})


def test_two_readers_of_the_same_sources_do_not_disturb_each_other(clock: Clock) -> None:
    steps = TimeBreakdown({"data wait": lambda: clock.data_s})
    epochs = TimeBreakdown(steps.sources)
    for _ in range(4):
        clock.move(10.0, data_s=1.0)
        assert steps.since_last() == Span(10.0, {"data wait": 1.0})
    assert epochs.since_last() == Span(40.0, {"data wait": 4.0})


def test_the_text_names_the_shares_and_leaves_out_what_took_nothing() -> None:
    assert Span(1738.0, {"data wait": 6.952, "all-reduce": 43.45, "saving": 0.0}).text() == (
        "0:28:58 elapsed (97.1% computing, 0.4% data wait, 2.5% all-reduce)"
    )
    assert Span(0.0, {"data wait": 0.0}).text() == "0.0 s elapsed (0.0% computing)"
    assert Span(10.0, {"data wait": 11.0}).computing_s == 0.0
    assert Span(36_000.0, {}).text() == "10:00:00 elapsed (100.0% computing)"
