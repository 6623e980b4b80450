"""What the lines of a log say about the progress of a loop."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rankwise.actions import Log
from rankwise.telemetry import progress
from rankwise.telemetry.breakdown import TimeBreakdown
from rankwise.telemetry.meters import Meters
from rankwise.telemetry.progress import Progress
from rankwise.training.state import TrainState

NOON = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return NOON + self.now - 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=moved.monotonic, time=moved.time))
    return moved


def test_the_pace_has_the_rate_the_time_left_and_the_clock(clock: Clock) -> None:
    shown = Progress(None)
    shown.begin(800, 0)
    clock.now += 10.0
    assert shown.place(100) == "step 100/800"
    assert shown.pace(100) == "10 steps/s, 0:01:10 left, 2026-11-22 12:00:10"


def test_the_rate_is_that_since_the_last_line_and_the_time_left_that_of_all_steps(clock: Clock) -> None:
    shown = Progress(None)
    shown.begin(200, 0)
    clock.now += 10.0
    shown.pace(100)
    clock.now += 30.0  # it has become slower
    assert shown.pace(130).startswith("1 steps/s, 21.5 s left, ")


def test_a_resumed_loop_does_not_count_the_steps_of_before(clock: Clock) -> None:
    shown = Progress(None)
    shown.begin(800, 700)
    clock.now += 20.0
    assert shown.pace(710).startswith("2 s/step, 0:03:00 left, ")


def test_without_a_total_and_at_the_end_no_time_is_left(clock: Clock) -> None:
    shown = Progress(None)
    shown.begin(None, 0)
    clock.now += 1.0
    assert shown.place(4) == "step 4"
    assert shown.pace(4) == "4 steps/s, 2026-11-22 12:00:01"
    shown.begin(4, 0)
    clock.now += 1.0
    assert shown.pace(4) == "4 steps/s, 2026-11-22 12:00:02"


def attached(log: Log, meters: Meters, shown: Progress) -> Log:
    """Attach the log to a Trainer with these parts, whose loader counts no samples."""
    main, loader, sync = SimpleNamespace(is_main=True), SimpleNamespace(taken=0), SimpleNamespace(figures=dict)
    parts = SimpleNamespace(world=main, meters=meters, breakdown=TimeBreakdown({}), progress=shown, loader=loader, sync=sync)
    log.attach(parts)
    return log


def trained(log: Log, meters: Meters, shown: Progress, ends: dict[int, bool], skipped: int = 0) -> None:
    """Call `log` after each of these steps; the value says whether an epoch ends with the step."""
    model = nn.Linear(1, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.25))
    shown.begin(40, 0)
    log.begin(state)
    for step, epoch_ended in ends.items():
        meters.add(loss=(3.0, 2))
        state.step, state.epoch_ended = step, epoch_ended
        state.epoch += epoch_ended
        state.steps_left_out = skipped
        log(state)


def test_a_line_of_a_log_has_step_total_metrics_learning_rate_rate_time_left_and_clock(
    capfd: pytest.CaptureFixture[str],
) -> None:
    meters, shown = Meters("loss"), Progress(None)
    log = attached(Log(every_steps=2, line_every_s=0.0), meters, shown)
    trained(log, meters, shown, {1: False, 2: False, 3: True})
    out = capfd.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    line, epoch = out.replace("\n  ", " ").splitlines()
    assert re.fullmatch(rf"step 2/40: loss 1\.5, lr 0\.25, [\d.e+]+ steps/s, [\d.]+ s left, {STAMP}", line), line
    assert re.fullmatch(
        rf"epoch 1: 3 steps, loss 1\.5; step 3/40, lr 0\.25, [\d.e+]+ steps/s, [\d.]+ s left, {STAMP}; .* elapsed \(.*\)", epoch
    ), epoch


def test_short_epochs_are_printed_once_per_second_after_the_first_ten(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    shown = Progress(None)
    told = []
    for step in range(1, 46):
        clock.now += 0.0625
        told += [step] if shown.tells("epoch", step) else []
        clock.now += 0.0625
        assert shown.tells("epoch", step) == (step in told), "the epoch and its evaluation belong together"
    assert told == [*range(1, 11), 18, 26, 34, 42]
    assert capfd.readouterr().out.splitlines() == [
        "epochs are short: from here on one per second is printed; metrics.jsonl has all"
    ]
    for step in range(50, 80, 2):
        clock.now += 5.0
        assert shown.tells("evaluation", step)
        assert shown.tells("epoch", step + 1), "slow ones are always printed, also right after an evaluation"


def test_the_line_of_an_epoch_says_how_many_of_its_steps_were_skipped(capfd: pytest.CaptureFixture[str]) -> None:
    meters, shown = Meters("loss"), Progress(None)
    log = attached(Log(every_steps=2, line_every_s=100.0), meters, shown)
    trained(log, meters, shown, {1: False, 2: False, 3: True}, skipped=2)
    assert "epoch 1: 3 steps (2 skipped), loss " in capfd.readouterr().out


def test_a_slow_log_interval_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Steps of 20 seconds, and metrics every 50 steps: the first metrics come after a quarter of an hour."""
    monkeypatch.setattr("rankwise.actions.log._SLOW_LINE_S", 0.0)
    meters, shown = Meters("loss"), Progress(None)
    log = attached(Log(every_steps=50, line_every_s=0.0), meters, shown)
    trained(log, meters, shown, {1: False})
    assert re.fullmatch(rf"step 1/40: lr 0\.25, .*, {STAMP}\n", capfd.readouterr().out)
