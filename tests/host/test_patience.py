"""A wait that reports from time to time what it waits for, and ends with an error."""

from __future__ import annotations

from rankwise.host.patience import Patience


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_it_speaks_when_it_has_lasted_and_again_after_each_pause_however_seldom_it_is_asked() -> None:
    clock = Clock()
    patience = Patience(give_up_s=300, say_after_s=10, say_every_s=10, clock=clock)
    due = []
    for clock.now in (1000.0, 1010.0, 1010.5, 1011.0, 1020.5, 1020.6, 1100.0, 1109.0):
        if patience.due():
            due.append(patience.waited_s)
    assert due == [10.5, 20.600000000000023, 100.0]


def test_without_a_pause_it_speaks_once() -> None:
    clock = Clock()
    patience = Patience(give_up_s=30, say_after_s=2, clock=clock)
    clock.now += 3
    assert [patience.due(), patience.due()] == [True, False]
    clock.now += 1e9
    assert not patience.due()


def test_it_gives_up_after_its_time_and_not_at_it() -> None:
    clock = Clock()
    patience = Patience(give_up_s=30, say_after_s=2, clock=clock)
    clock.now += 30
    assert not patience.is_over
    clock.now += 0.1
    assert patience.is_over
