"""What identifies a training: settings that must be the same, settings that are kept, and what changes only the last bits."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
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
from torch.utils.data import TensorDataset
from trainers import trainer_of

import rankwise
from rankwise.errors import ConfigError
from rankwise.training.fingerprint import Fingerprint, numerics
from rankwise.training.optimizer import scale_lr


def sgd() -> SGD:
    return SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def of(make_scheduler: Callable[[SGD], Any], **fixed: Any) -> Fingerprint:
    return Fingerprint.of(fixed, optimizer := sgd(), make_scheduler(optimizer))


def test_the_kind_of_scheduler_must_stay_and_what_it_is_set_to_does(capsys: pytest.CaptureFixture[str]) -> None:
    made = of(lambda o: StepLR(o, step_size=3), clip_norm=1.0)
    assert made.fixed["clip_norm"] == 1.0
    assert (made.fixed["lr"], made.fixed["scheduler"]) == (0.1, "StepLR")
    later = of(lambda o: StepLR(o, step_size=5), clip_norm=1.0)
    later.load_state_dict(made.state_dict())
    assert "StepLR's step_size stays 3" in capsys.readouterr().out
    assert later.state_dict()["kept"]["StepLR's step_size"] == 3
    with pytest.raises(ConfigError, match="started with scheduler StepLR, and the script now has scheduler None"):
        of(lambda _: None, clip_norm=1.0).load_state_dict(made.state_dict())


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
    before, same, now = [of(lambda o, each=each: make(o, each)) for each in (settings[0], *settings)]
    same.load_state_dict(before.state_dict())
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
        later = Fingerprint.of({}, sgd(), trained)
        later.load_state_dict(of(make).state_dict())
        later.load_state_dict({"fixed": {}, "kept": {f"{type(trained).__name__}'s last_epoch": 0}})
    assert capsys.readouterr().out == ""


def test_scaled_learning_rates_of_a_schedule_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    rankwise.init()

    def scaled(eta_min: float) -> Fingerprint:
        scale_lr(optimizer := sgd(), "linear", scheduler := CosineAnnealingLR(optimizer, 5, eta_min))
        return Fingerprint.of({}, optimizer, scheduler)

    scaled(0.02).load_state_dict(scaled(0.01).state_dict())
    assert capsys.readouterr().out == ""


def test_a_value_that_a_training_has_changed_is_as_the_script_has_set_it_until_the_script_changes_it() -> None:
    optimizer = sgd()
    first = Fingerprint.of({}, optimizer, None)
    optimizer.param_groups[0] |= {"lr": 0.01, "momentum": 0.8}
    first.trained(optimizer, None)
    second = Fingerprint.of({}, optimizer, None)
    assert second.fixed == first.fixed
    second.trained(optimizer, None)
    optimizer.param_groups[0]["lr"] = 0.02
    assert Fingerprint.of({}, optimizer, None).fixed == {**first.fixed, "lr": 0.02}


def trained_twice(folder: Path, make_scheduler: Callable[[SGD], Any]) -> tuple[float, str]:
    """The learning rate after two Trainers for one model, the second with more epochs; and what they have printed."""
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(12, 4))
    scheduler = make_scheduler(optimizer)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for epochs in (2, 4):
            trainer_of(
                model, optimizer, lambda model, batch: (model(batch[0]).square().sum(), len(batch[0])), data,
                global_batch_size=4, max_epochs=epochs, scheduler=scheduler, eval_data=data, run_dir=folder,
            ).fit()  # fmt: skip
    return optimizer.param_groups[0]["lr"], said.getvalue()


def plateau(optimizer: SGD) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)


def cycle(optimizer: SGD) -> CyclicLR:
    return CyclicLR(optimizer, 0.01, 0.1, step_size_up=5)


@pytest.mark.parametrize(("make_scheduler", "rate"), [(plateau, 1e-5), (cycle, 0.046)])
def test_a_second_trainer_for_the_same_model_continues_its_schedule(
    make_scheduler: Callable[[SGD], Any], rate: float, tmp_path: Path
) -> None:
    [(lr, said)] = on_ranks(1, trained_twice, tmp_path, make_scheduler)
    assert lr == pytest.approx(rate)
    assert "stays" not in said


def test_numerics_are_no_settings_of_the_training() -> None:
    found = numerics("bf16", "cpu", sgd(), "flat")
    assert found == {
        "torch": torch.__version__, "threads": torch.get_num_threads(), "device": "cpu", "precision": "bf16", "fused": False,
        "reduction": "flat",
    }  # fmt: skip
