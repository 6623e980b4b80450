"""What identifies a training: settings that must be the same, settings that are kept, and what changes only the last bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from rankwise.errors import ConfigError
from rankwise.training.fingerprint import Fingerprint, numerics


def sgd() -> SGD:
    return SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def test_the_kind_of_scheduler_must_stay_and_what_it_is_set_to_does(capsys: pytest.CaptureFixture[str]) -> None:
    made = Fingerprint.of({"clip_norm": 1.0}, StepLR(sgd(), step_size=3))
    assert made.fixed == {"clip_norm": 1.0, "scheduler": "StepLR"}
    later = Fingerprint.of({"clip_norm": 1.0}, StepLR(sgd(), step_size=5))
    later.load_state_dict(made.state_dict())
    assert "StepLR's step_size stays 3" in capsys.readouterr().out
    assert later.state_dict()["kept"]["StepLR's step_size"] == 3
    with pytest.raises(ConfigError, match="started with scheduler StepLR, and the script now has scheduler None"):
        Fingerprint.of({"clip_norm": 1.0}, None).load_state_dict(made.state_dict())


def sequence(optimizer: SGD, length: int, milestone: int) -> SequentialLR:
    return SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, length)], [milestone])


SCHEDULERS: list[tuple[Callable[[SGD, Any], Any], tuple[Any, Any], str]] = [
    (MultiStepLR, ([3, 3], [3, 6]), "MultiStepLR's milestones stays [3, 3], "),
    (lambda o, n: sequence(o, n, 2), (5, 6), "SequentialLR's schedulers[1].T_max stays 5, "),
    (lambda o, n: sequence(o, 5, n), (2, 3), "SequentialLR's milestones stays [2], "),
    (lambda o, n: ChainedScheduler([StepLR(o, n)], o), (3, 5), "ChainedScheduler's schedulers[0].step_size stays 3, "),
    (lambda o, top: CyclicLR(o, 0.01, top, cycle_momentum=False), (0.1, 0.2), "CyclicLR's max_lrs stays [0.1], "),
    (lambda o, p: OneCycleLR(o, 0.1, 100, pct_start=p), (0.3, 0.5), "OneCycleLR's schedule_phases[0].end_step stays 29, "),
    (lambda o, rate: ReduceLROnPlateau(o, min_lr=[rate]), (0.0, 0.01), "ReduceLROnPlateau's min_lrs stays [0.0], "),
]


@pytest.mark.parametrize(("make", "settings", "said"), SCHEDULERS)
def test_each_changed_setting_of_a_scheduler_and_of_those_inside_it_is_reported(
    make: Callable[[SGD, Any], Any], settings: tuple[Any, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, now = [Fingerprint.of({}, make(sgd(), each)) for each in settings]
    Fingerprint.of({}, make(sgd(), settings[0])).load_state_dict(before.state_dict())
    assert capsys.readouterr().out == ""
    now.load_state_dict(before.state_dict())
    told = capsys.readouterr().out.replace("\n  ", " ")
    assert said in told
    assert told.count("stays") == 1


def test_where_a_schedule_is_is_no_setting_and_an_older_checkpoint_lacks_some(capsys: pytest.CaptureFixture[str]) -> None:
    makes = (lambda o: CosineAnnealingWarmRestarts(o, 2, 2), lambda o: sequence(o, 5, 2), ReduceLROnPlateau)
    for make in makes:
        trained = make(optimizer := sgd())
        for loss in (1.0, 2.0, 2.0):
            optimizer.step()
            trained.step(*([loss] if isinstance(trained, ReduceLROnPlateau) else []))
        later = Fingerprint.of({}, trained)
        later.load_state_dict(Fingerprint.of({}, make(sgd())).state_dict())
        later.load_state_dict({"fixed": {}, "kept": {f"{type(trained).__name__}'s last_epoch": 0}})
    assert capsys.readouterr().out == ""


def test_scaled_learning_rates_of_a_schedule_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (Fingerprint.of({"lr_scale": "linear"}, CosineAnnealingLR(sgd(), 5, eta_min=rate)) for rate in (0.01, 0.02))
    two.load_state_dict(one.state_dict())
    assert capsys.readouterr().out == ""


def test_numerics_are_no_settings_of_the_training() -> None:
    found = numerics("bf16", "cpu", sgd(), "flat")
    assert found == {
        "torch": torch.__version__, "threads": torch.get_num_threads(), "device": "cpu", "precision": "bf16", "fused": False,
        "reduction": "flat",
    }  # fmt: skip
