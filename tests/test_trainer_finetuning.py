"""A fine-tuning as people write it: a frozen backbone that is unfrozen later, groups, schedules, and what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from test_trainer import Flat, data, error_of, eval_fn, fit, make_model, step_fn
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from rankwise import Checkpoints, Evaluate, Trainer
from rankwise.checkpoint.folders import pick
from rankwise.dist import comm
from rankwise.errors import ConfigError

LONG = {"max_epochs": None, "max_steps": 8}


def frozen() -> nn.Module:
    model = make_model()
    model[0].requires_grad_(False)
    return model


# --- unfrozen on only one rank


def unfreeze_on_main(state: Any) -> None:
    if comm.is_main() and state.step == 4:
        state.model[0].requires_grad_(True)


def errors_of_one_rank_alone(folder: Path) -> list[tuple[str, str]]:
    return [
        error_of(folder / name, model=frozen(), actions=[unfreeze_on_main], **{**LONG, **settings})
        for name, settings in {
            "saved by steps": {"every_steps": 4},
            "saved by epochs": {"every_epochs": 1},
            "saved at the end": {"max_steps": 4},
            "compared": {"on_divergence": "error", "every_steps": 4},
            "no save": {},
        }.items()
    ]


def test_an_unfreezing_on_one_rank_alone_is_an_error_though_the_others_save_in_that_step(tmp_path: Path) -> None:
    for told in on_ranks(2, errors_of_one_rank_alone, tmp_path):
        for kind, text in told:
            assert kind == "StepError"
            assert "0.weight is trained on rank 0 and frozen on rank 1" in text


# --- resumed


def unfreeze(state: Any) -> None:
    if state.step == 4:
        state.model[0].requires_grad_(True)


def resumed_after_unfreezing(folder: Path) -> tuple[str, str]:
    _, began = fit(folder, model=frozen(), actions=[unfreeze], **{**LONG, "max_steps": 6})
    _, resumed = fit(folder, model=frozen(), actions=[unfreeze], **LONG)
    return began, resumed


def test_a_run_that_is_resumed_after_an_unfreezing_prints_the_size_of_its_messages_and_no_false_warning(tmp_path: Path) -> None:
    began, resumed = on_ranks(2, resumed_after_unfreezing, tmp_path)[0]
    line = "gradients: one all-reduce of"
    assert line in began
    assert line in resumed
    size = next(text for text in resumed.splitlines() if line in text)
    assert size != next(text for text in began.splitlines() if line in text)
    assert "not bit for bit" not in resumed


def added_at_4(folder: Path, **settings: Any) -> tuple[Flat, Flat, str]:
    """(without a stop, stopped after step 6 and resumed, what the resumed run printed). The script adds a group only at its
    step."""

    def add(state: Any) -> None:
        if state.step == 4:
            state.optimizer.add_param_group({"params": list(state.model[0].parameters()), "lr": 0.005})
            state.model[0].requires_grad_(True)

    def part(name: str, steps: int) -> tuple[Flat, str]:
        def of_the_head(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.02, weight_decay=0.1)

        given = {"model": frozen(), "optimizer": of_the_head, "actions": [add], "max_epochs": None, **settings}
        return fit(folder / name, max_steps=steps, **given)

    unbroken, _ = part("unbroken", 10)
    part("stopped", 6)
    return unbroken, *part("stopped", 10)


@pytest.mark.parametrize("n", [1, 2])
def test_a_group_that_an_action_added_is_added_again_when_the_run_is_resumed(n: int, tmp_path: Path) -> None:
    for rank, (unbroken, resumed, said) in enumerate(on_ranks(n, added_at_4, tmp_path)):
        assert np.array_equal(unbroken, resumed)
        assert ("from the checkpoint: the optimizer has one more group (0.weight, 0.bias)" in said) == (rank == 0)


# --- schedules


def one_cycle(steps: int) -> Any:
    return lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


def errors_of_schedules(folder: Path) -> list[tuple[str, str]]:
    def add(state: Any) -> None:
        if state.step == 2:
            state.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})

    fit(folder / "longer", scheduler=one_cycle(8), **LONG)
    return [
        error_of(folder / "short", scheduler=one_cycle(5), **LONG),
        error_of(folder / "longer", scheduler=one_cycle(12), **{**LONG, "max_steps": 12}),
        error_of(folder / "group", scheduler=lambda o: LambdaLR(o, lambda step: 1.0), actions=[add], **LONG),
    ]


def test_a_schedule_that_does_not_fit_is_one_clear_error(tmp_path: Path) -> None:
    short, longer, group = on_ranks(1, errors_of_schedules, tmp_path)[0]
    assert [kind for kind, _ in (short, longer, group)] == ["ConfigError"] * 3
    assert "OneCycleLR(total_steps=5) ends before the training, which has 8 steps: give total_steps=8" in short[1]
    assert "a run that began with 8 steps cannot be made longer" in longer[1].lower()
    assert "LambdaLR was made for 1 parameter groups, and the optimizer has 2 now" in group[1]


def said_of_plateau(folder: Path) -> list[str]:
    def anything(state: Any) -> None:
        """May measure any metric, so that a metric's name cannot be refused at the start."""

    told = []
    for name in ("val", "eval"):
        evaluation = Evaluate(data(), eval_fn, name=name, every_steps=2)
        settings = {"scheduler": ReduceLROnPlateau, "actions": [evaluation, anything], **LONG}
        told.append(fit(folder / name, **settings)[1])
    return told


def test_a_plateau_that_waits_for_a_metric_of_another_name_is_warned_of(tmp_path: Path) -> None:
    val, usual = on_ranks(1, said_of_plateau, tmp_path)[0]
    assert val.count("Plateau waits for 'eval_loss', which nothing has measured so far; this step measured val_") == 1
    assert "waits for" not in usual


def said_of_groups(folder: Path) -> list[str]:
    def of_the_head(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters)[2:], lr=0.1)

    return [
        fit(folder / "forgotten", model=frozen(), optimizer=of_the_head, actions=[unfreeze], **LONG)[1],
        fit(folder / "held", model=frozen(), actions=[unfreeze], **LONG)[1],
    ]


def test_an_unfrozen_layer_that_is_in_no_group_of_the_optimizer_is_warned_of(tmp_path: Path) -> None:
    forgotten, held = on_ranks(2, said_of_groups, tmp_path)[0]
    assert "2 parameters require a gradient but are in no group of the optimizer, so they do not change: 0.weight" in forgotten
    assert "in no group" not in held


# --- batch norm


def said_of_batch_norm(folder: Path) -> list[str]:
    def model(trains: bool) -> nn.Module:
        made = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        made[1].train(trains)
        return made

    wholly = model(True).eval()  # is switched to training mode
    made = {"trains": model(True), "frozen": model(False), "wholly": wholly}
    return [fit(folder / name, model=each, **LONG)[1] for name, each in made.items()]


def test_a_batch_norm_in_evaluation_mode_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    told = on_ranks(2, said_of_batch_norm, tmp_path)[0]
    assert ["BatchNorm normalises" in text for text in told] == [True, False, True]


# --- a count that is wrong


def mean_and_one(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    total, count = step_fn(model, batch)
    return total / count, 1


def said_of_counts(folder: Path) -> list[str]:
    return [
        fit(folder / "one", looked_at=True, step_fn=mean_and_one, **LONG)[1],
        fit(folder / "sum", looked_at=True, **LONG)[1],
    ]


def test_a_count_that_is_the_same_for_half_a_batch_is_warned_of(tmp_path: Path) -> None:
    one, total = on_ranks(1, said_of_counts, tmp_path)[0]
    assert "step_fn returns the count 1 for a micro-batch and for each half of it" in one
    assert "returns the count" not in total


# --- names of other libraries


def test_arguments_of_other_libraries_are_answered_with_ours() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, value, cure in (
        ("devices", 2, "rankwise run --nproc"),
        ("gradient_clip_val", 1.0, "it is clip_norm"),
        ("callbacks", [], "actions=[...]"),
        ("val_dataloaders", [], "evaluate=Evaluate(dataset, fn)"),
        ("resume_from_checkpoint", "last", "fit() resumes the run"),
    ):
        with pytest.raises(ConfigError) as raised:
            Trainer(model, optimizer, step_fn, [1], **{name: value})
        assert str(raised.value).startswith(f"Trainer({name}=...): ")
        assert cure in str(raised.value)


def test_several_evaluations_in_a_list_are_no_dataset() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"others are actions=\[Evaluate"):
        Trainer(model, optimizer, step_fn, [1], evaluate=[Evaluate([1], step_fn)], max_steps=1)


# --- a step that was saved twice


def test_a_step_that_was_saved_twice_is_found_by_its_number(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=3, background=False)
    parts = {"model": nn.Linear(2, 1)}
    checkpoints.save(parts, 3)
    again = checkpoints.save(parts, 3)
    checkpoints.save(parts, 5)
    assert again.name == "step-00000003-2"
    assert pick(tmp_path / "checkpoints", "3") == again
    assert pick(tmp_path / "checkpoints", "step-00000003-2") == again
