"""Trainings in which something changes: what is trained, buffers that a forward pass reads, modes; and looking at the model."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gossip import Gossip
from ranks import on_ranks
from test_trainer import Flat, data, error_of, eval_fn, fit, flat, losses, make_model, step_fn, trainer
from torch import nn
from torch.nn.utils import parametrizations
from trainers import trainer_of

import rankwise
from rankwise.checkpoint import Checkpoints
from rankwise.dist import comm
from rankwise.errors import ConfigError, StepError
from rankwise.sync import AllReduce, LocalSGD, divergence

STOPS = (3, 5, 6, 8)
LONG = {"max_epochs": None, "max_steps": 10}
OVERLAPPING = functools.partial(AllReduce, overlap=True)
LOCAL = functools.partial(LocalSGD, 3)


# --- unfrozen, added


def unfrozen_at_5(folder: Path, ranks_of_plain: int, **settings: Any) -> dict[str, Flat]:
    """The final parameters: without a stop, and of runs that stopped before and after the unfreezing."""

    def part(name: str, steps: int) -> Flat:
        model = make_model()
        model[0].requires_grad_(False)
        return fit(folder / name, model=model, actions=[unfreeze], max_epochs=None, max_steps=steps, **settings)[0]

    def unfreeze(state: Any) -> None:
        if state.step == 5:
            state.model[0].requires_grad_(True)

    answers = {"unbroken": part("unbroken", 10)}
    for stop in STOPS:
        part(f"stop-{stop}", stop)
        answers[f"stop-{stop}"] = part(f"stop-{stop}", 10)
    return answers


def unfrozen_plain() -> Flat:
    from rankwise.data.order import Order

    model = make_model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    dataset = data()
    for step in range(10):
        if step == 5:
            model[0].requires_grad_(True)
        epoch, position = divmod(step, 4)
        start = 8 * position
        batch = dataset[Order(29, 0).indices(epoch, start, min(start + 8, 29)).tolist()]
        total, count = step_fn(model, batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize(("n", "reduction"), [(3, "flat"), (3, "ddp"), (1, "auto")])
@pytest.mark.one_in(3)
def test_layers_that_are_unfrozen_on_the_way_train_as_in_a_plain_loop_and_are_resumed(
    n: int, reduction: str, tmp_path: Path
) -> None:
    expected = unfrozen_plain()
    for answer in on_ranks(n, unfrozen_at_5, tmp_path, n, reduction=reduction):
        assert np.abs(answer["unbroken"] - expected).max() < 1e-10
        for name, parameters in answer.items():
            assert np.array_equal(parameters, answer["unbroken"]), name


def new_layer_at_4(folder: Path, repeat: bool) -> tuple[Flat, Flat, str]:
    """(without a stop, stopped after step 6 and resumed, what the resumed run raised)."""

    def replace(state: Any) -> None:
        if state.step == 4 and isinstance(state.model[-1], nn.Linear) and not hasattr(state.model[-1], "is_new"):
            add(state.model, state.optimizer)

    def add(model: Any, optimizer: Any) -> None:
        model[-1] = nn.Linear(model[-1].in_features, model[-1].out_features).double()
        model[-1].is_new = True
        optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.01})

    def part(name: str, steps: int, resumed: bool = False) -> Flat:
        with contextlib.redirect_stdout(io.StringIO()):
            made = trainer(folder / name, actions=[replace], max_epochs=None, max_steps=steps) if not resumed else again(name)
            return flat(made.fit().model)

    def again(name: str) -> Any:

        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        if repeat:
            add(model, optimizer)
        return trainer_of(
            model, optimizer, step_fn, data(), global_batch_size=8, max_steps=10, run_dir=folder / name, log_every=1,
            every_s=1e9, actions=[replace],
        )  # fmt: skip

    unbroken = part("unbroken", 10)
    part("stopped", 6)
    try:
        return unbroken, part("stopped", 10, resumed=True), ""
    except ConfigError as error:
        return unbroken, unbroken, str(error)


def test_a_layer_that_is_replaced_on_the_way_begins_alike_and_is_resumed_if_the_script_repeats_it(tmp_path: Path) -> None:
    answers = on_ranks(2, new_layer_at_4, tmp_path / "a", True)
    assert np.array_equal(answers[0][0], answers[1][0])
    for unbroken, resumed, error in answers:
        assert error == ""
        assert np.array_equal(unbroken, resumed)


def test_a_resume_without_the_layer_that_was_added_is_refused_by_name(tmp_path: Path) -> None:
    for _, _, error in on_ranks(2, new_layer_at_4, tmp_path / "b", False):
        assert "the optimizer" in error
        assert "replaced" in error


# --- buffers that a forward pass reads


class Scaled(nn.Module):
    """Divides by a running scale, which each forward pass changes; each rank sees its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.norm = parametrizations.spectral_norm(nn.Linear(3, 3).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.scale.mul_(0.9).add_(0.1 * x.abs().mean())
        out: torch.Tensor = self.norm(self.layers(x / self.scale))
        return out


def with_and_without_looking(folder: Path) -> tuple[dict[str, Flat], list[float], str]:
    def part(name: str, steps: int = 10, **settings: Any) -> tuple[Flat, str]:
        torch.manual_seed(5)
        return fit(folder / name, model=Scaled(), max_epochs=None, max_steps=steps, **settings)

    every = {"eval_data": data(7), "eval_fn": eval_fn, "eval_every": 2, "every_s": 0.0}
    answers = {"never": part("never")[0], "often": part("often", **every)[0]}
    said = ""
    for stop in STOPS:
        part(f"stop-{stop}", stop)
        answers[f"stop-{stop}"], said = part(f"stop-{stop}")
    return answers, [value for _, value in losses(folder / "often", "eval_loss")], said


def test_evaluations_saves_and_stops_do_not_change_a_training_whose_forward_reads_buffers(tmp_path: Path) -> None:
    answers = on_ranks(2, with_and_without_looking, tmp_path)
    for answer, _, said in answers:
        for name, parameters in answer.items():
            assert np.array_equal(parameters, answers[0][0]["never"]), name
        assert "is not resumed" not in said
    assert len(answers[0][1]) == 5


def one_more_part(folder: Path, steps: int) -> tuple[Flat, str]:
    torch.manual_seed(5)
    return fit(folder / "run", model=Scaled(), max_epochs=None, max_steps=steps)


def test_on_another_number_of_ranks_it_begins_with_the_main_ranks_buffers_and_says_so(tmp_path: Path) -> None:
    on_ranks(2, one_more_part, tmp_path, 4)
    (first, said), (second, _), (third, _) = on_ranks(3, one_more_part, tmp_path, 8)
    assert np.array_equal(first, second)
    assert np.array_equal(first, third)
    assert "the checkpoint has a state, such as running statistics, of each of 2 ranks, and this run has" in said


# --- modes


def modes_seen(folder: Path) -> tuple[list[list[bool]], list[list[bool]], str, str]:
    def noted(model: Any, batch: Any) -> Any:
        seen.append([module.training for module in model.modules()])
        return step_fn(model, batch)

    seen: list[list[bool]] = []
    evaluated = {"eval_data": data(5), "eval_fn": eval_fn, "eval_every": 1, "step_fn": noted}
    model = make_model(0.3)
    model[1].eval()
    _, mixture = fit(folder / "mixture", model=model, max_steps=3, **evaluated)
    mixed, seen = seen, []
    _, said = fit(folder / "eval", model=make_model(0.3).eval(), max_steps=3, **evaluated)
    return mixed, seen, mixture, said


def test_each_modules_mode_is_kept_over_evaluations_and_a_model_in_eval_mode_is_put_into_training(tmp_path: Path) -> None:
    [(mixed, trained, mixture, said)] = on_ranks(1, modes_seen, tmp_path)
    assert all(modes == mixed[0] for modes in mixed)
    assert mixed[0].count(False) == 1
    assert "evaluation mode" not in mixture
    assert all(all(modes) for modes in trained)
    assert said.count("the model was in evaluation mode") == 1


# --- gossip: a strategy whose ranks never have a common average by themselves


def gossiping(folder: Path) -> tuple[dict[str, Flat], list[tuple[int, float]], Flat, bool]:
    def part(name: str, steps: int = 10, **settings: Any) -> Flat:
        return fit(folder / name, sync=Gossip(3), max_epochs=None, max_steps=steps, clip_norm=1.0, **settings)[0]

    def note(state: Any) -> None:
        apart.append(comm.all_gather_object(flat(state.model).tolist()))

    apart: list[Any] = []
    every = {"eval_data": data(7), "eval_fn": eval_fn, "eval_every": 2, "every_s": 0.0, "actions": [note]}
    answers = {"never": part("never"), "often": part("often", **every)}
    for stop in (1, *STOPS):  # in the middle of a period, and at its end
        part(f"stop-{stop}", stop)
        answers[f"stop-{stop}"] = part(f"stop-{stop}")
    found = Checkpoints(folder / "often" / "checkpoints", background=False).find_latest()
    assert found is not None
    saved = torch.load(found[0] / "model.pt", weights_only=True)
    model = make_model()
    model.load_state_dict(saved)
    differ = all(ranks[0] != ranks[1] for ranks in apart)
    return answers, losses(folder / "often", "eval_loss"), flat(model), differ


@pytest.mark.stress
def test_a_strategy_whose_ranks_differ_is_saved_resumed_and_evaluated_on_its_average(tmp_path: Path) -> None:
    answers = on_ranks(3, gossiping, tmp_path)
    for ours, evaluated, saved, differ in answers:
        assert differ
        for name, parameters in ours.items():
            assert np.array_equal(parameters, answers[0][0]["never"]), name
        assert len(evaluated) == 5
        assert np.abs(saved - ours["often"]).max() < 1e-12  # finish made the average that was saved last


# --- numbers that are not finite


def nan_rates(folder: Path) -> list[str]:
    def spoil(state: Any) -> None:
        if state.step == 3:
            with torch.no_grad():
                state.model[0].weight[0, 0] = math.nan

    told = []
    settings: list[dict[str, Any]] = [
        {"scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: math.nan if step == 4 else 1.0)},
        {"optimizer": lambda p: torch.optim.SGD(p, lr=math.inf)},
        {"actions": [spoil]},
        {"actions": [spoil], "every_s": 0.0},
    ]
    for number, each in enumerate(settings):
        try:
            fit(folder / str(number), **each)
        except StepError as error:
            told.append(str(error))
    comm.barrier()  # the main rank has written it
    found = Checkpoints(folder / "3" / "checkpoints", background=False).find_latest()
    assert found is not None
    return [*told, str(found[1].step)]


def test_weights_and_rates_that_are_no_numbers_end_the_run_and_are_never_saved(tmp_path: Path) -> None:
    for rate, begun, weights, saved, newest in on_ranks(2, nan_rates, tmp_path):
        assert "the learning rate is nan after step 4" in rate
        assert "the learning rate is inf after step 0" in begun
        assert "the weights are not finite, since step 3: 0.weight" in weights
        assert "the weights are not finite, found after step 3: 0.weight" in saved
        assert "was finite after step 2" in saved
        assert newest == "2"


def skipped_loss(folder: Path) -> list[tuple[int, float]]:
    calls = 0

    def step(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        total, count = step_fn(model, batch)
        return total * (math.nan if calls == 3 else 1.0), count

    fit(folder, step_fn=step, log_every=4, max_steps=8)
    return losses(folder)


def test_the_nan_of_a_skipped_step_is_not_in_the_intervals_loss(tmp_path: Path) -> None:
    [logged] = on_ranks(1, skipped_loss, tmp_path)
    assert [step for step, _ in logged] == [4, 8]
    assert all(math.isfinite(loss) for _, loss in logged)


# --- fp16, plateaus


def in_fp16(folder: Path) -> tuple[list[float], list[float], int]:
    model = make_model(dtype=torch.float32)
    scales: list[float] = []

    def note(state: Any) -> None:
        scales.append(made.sync.state_dict()["loss_scale"]["scale"])

    with contextlib.redirect_stdout(io.StringIO()):
        made = trainer(
            folder, model, train_data=data(dtype=torch.float32), precision="fp16", sync=AllReduce(overlap=False),
            actions=[note], max_epochs=10,
        )  # fmt: skip
        state = made.fit()
    return [loss for _, loss in losses(folder)], scales, state.steps_left_out


def test_fp16_trains_on_the_cpu_with_a_loss_scale_that_a_given_strategy_keeps_too(tmp_path: Path) -> None:
    for trained, scales, skipped in on_ranks(2, in_fp16, tmp_path):
        assert trained[-1] < 0.9 * trained[0]
        assert scales[0] in (2.0**16, 2.0**15)
        assert scales[-1] == 2.0**16 / 2**skipped


def named_otherwise(model: Any, batch: Any) -> dict[str, Any]:
    return {"mine": (1.0, len(batch[0]))}


def plateaus(folder: Path) -> tuple[list[float], list[str]]:
    rates: list[float] = []
    new = lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=1e9)  # noqa: E731
    evaluated = {"eval_data": data(5), "eval_every": 2}
    note = [lambda state: rates.append(state.optimizer.param_groups[0]["lr"])]
    fit(folder / "a", scheduler=new, actions=note, max_steps=8, **evaluated)
    told = []
    for settings in ({}, {**evaluated, "scheduler_metric": "eval_los"}, {**evaluated, "eval_fn": named_otherwise}):
        try:
            fit(folder / "b", scheduler=new, **settings)
        except ConfigError as error:
            told.append(str(error))
    return rates, told


def test_a_plateau_is_stepped_after_each_evaluation_on_a_named_metric(tmp_path: Path) -> None:
    for rates, told in on_ranks(2, plateaus, tmp_path):
        assert rates == [0.02, 0.02, 0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025]
        assert "Plateau: metric='eval_loss' needs an evaluation: give evaluate=...;" in told[0]
        assert "Plateau: metric='eval_los': Evaluate without a function measures only eval_loss" in told[1]
        assert "Plateau: nothing measures 'eval_loss'; the evaluation has measured eval_mine" in told[2]


# --- ranks that differ


def diverging(folder: Path) -> list[str]:
    """(what is printed, what is raised) if only one rank changes a weight after step 3, and one its learning rate after step
    4."""

    def spoil(state: Any) -> None:
        if comm.rank() == 1 and state.step == 3:
            with torch.no_grad():
                state.model[0].bias[1] += 0.25

    def spoil_rate(state: Any) -> None:
        if comm.rank() == 1 and state.step == 4:
            state.optimizer.param_groups[0]["lr"] = 0.5

    divergence._SHARE = 1e9  # a check at each save, although steps are short
    told = [fit(folder / "warn", actions=[spoil], every_s=0.0, max_steps=6)[1]]
    for name, action in (("weight", spoil), ("rate", spoil_rate)):
        try:
            fit(folder / name, actions=[action], every_s=0.0, on_divergence="error")
        except StepError as error:
            told.append(str(error))
    try:
        fit(folder / "never", on_divergence="stop")
    except ConfigError as error:
        told.append(str(error))
    return told


def test_ranks_that_no_longer_hold_the_same_are_told_with_the_tensor_the_distance_and_the_steps(tmp_path: Path) -> None:
    first, second = on_ranks(2, diverging, tmp_path)
    line = (
        "the ranks have diverged: 0.bias differs between rank 0 and rank 1 by at most 0.25 after step 3; they were equal after "
    )
    assert first[0].count(line + "step 2") == 1
    for told in (first, second):
        assert line in told[1]
        assert "the learning rate of group 0 differs between rank 0 and rank 1 by at most 0.48 after step 4" in told[2]
        assert "CheckReplicas(on_divergence='stop'): give one of 'warn', 'error'" in told[3]


def set_otherwise(folder: Path) -> list[str]:
    rank = comm.rank()
    told = []
    settings: list[dict[str, Any]] = [
        {"max_steps": 3 + rank},
        {"train_data": data(29 - rank)},
        {"global_batch_size": 8 + rank},
        {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1 + rank)},
        {"model": make_model(dtype=torch.float32 if rank else torch.float64)},
        {"sync": Gossip() if rank else AllReduce()},
    ]
    for number, each in enumerate(settings):
        try:
            fit(folder / str(number), **each)
        except ConfigError as error:
            told.append(str(error))
    return told


def test_settings_that_differ_between_ranks_are_refused_at_the_start_by_name(tmp_path: Path) -> None:
    expected = [
        "max_steps is 3 on rank 0 and 4 on rank 1",
        "the number of samples in train_data is 29 on rank 0 and 28 on rank 1",
        "global_batch_size is 8 on rank 0 and 9 on rank 1",
        "lr is 0.1 on rank 0 and 1.1 on rank 1",
        "0.weight has dtype float64 on rank 0 and float32 on rank 1",
        "the strategy is 'AllReduce' on rank 0 and 'Gossip' on rank 1",
    ]
    for told in on_ranks(2, set_otherwise, tmp_path):
        for text, part in zip(told, expected, strict=True):
            assert part in text


def normalised_apart(folder: Path) -> str:
    divergence._SHARE = 1e9
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    return fit(folder, model=model, every_s=0.0, max_steps=6, on_divergence="error")[1]


def test_running_statistics_that_each_rank_has_of_its_own_are_no_divergence(tmp_path: Path) -> None:
    assert "done: 6 steps" in on_ranks(2, normalised_apart, tmp_path / "run")[0]


# --- a mean with the count of a sum


def mean_step(model: Any, batch: Any) -> Any:
    total, count = step_fn(model, batch)
    return total / count, count


def means_and_sums(folder: Path) -> list[str]:
    model = nn.Sequential(nn.BatchNorm1d(6).double(), make_model(0.1))
    return [
        fit(folder / "mean", looked_at=True, model=make_model(), step_fn=mean_step, max_steps=2)[1],
        fit(folder / "dropout", looked_at=True, model=model, step_fn=mean_step, max_steps=2)[1],
        fit(folder / "sum", looked_at=True, model=make_model(0.3), max_steps=2)[1],
        fit(folder / "one", looked_at=True, model=make_model(), train_data=data(1), max_steps=2)[1],
    ]


@pytest.mark.parametrize("n", [1, 2])
def test_a_mean_that_is_returned_with_the_count_of_a_sum_is_told_before_the_first_step(n: int, tmp_path: Path) -> None:
    mean, dropout, total, one = on_ranks(n, means_and_sums, tmp_path)[0]
    for said in (mean, dropout):
        assert said.count("the loss of step_fn seems to be a mean") == 1
        assert 'return the sum over the samples (reduction="sum")' in said
    assert "seems to be a mean" not in total + one


def looked_and_not(folder: Path) -> tuple[Flat, Flat]:
    def part(looked_at: bool) -> Flat:
        torch.manual_seed(3)
        model = nn.Sequential(nn.BatchNorm1d(6).double(), make_model(0.3))
        return fit(folder / str(looked_at), looked_at=looked_at, model=model, max_steps=3)[0]

    return part(True), part(False)


def test_the_look_at_the_first_micro_batch_changes_no_bit(tmp_path: Path) -> None:
    for looked, never in on_ranks(2, looked_and_not, tmp_path):
        assert np.array_equal(looked, never)


def trained_by_a_step_that_changes_its_batch(folder: Path) -> tuple[list[float], list[float]]:
    """(the weight after the first step, that of a plain loop)."""
    data = [{"x": torch.full((3,), 10.0 * i), "labels": torch.tensor(float(i))} for i in range(8)]
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    plain = copy.deepcopy(model)

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        labels = batch.pop("labels")
        return (model(batch["x"].div_(100.0)).squeeze(-1) - labels).square().sum(), len(labels)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rankwise.Trainer(model, optimizer, step, data, global_batch_size=8, max_steps=1, run_dir=folder / "run").fit()
    whole = {key: torch.stack([sample[key] for sample in data]) for key in ("x", "labels")}
    total, count = step(plain, whole)
    (total / count).backward()
    assert plain.weight.grad is not None
    return model.weight.flatten().tolist(), (plain.weight - 0.1 * plain.weight.grad).flatten().tolist()


@pytest.mark.parametrize("n", [1, 2])
def test_a_step_function_that_removes_the_labels_and_scales_its_batch_in_place_gets_a_whole_one(n: int, tmp_path: Path) -> None:
    for ours, plain in on_ranks(n, trained_by_a_step_that_changes_its_batch, tmp_path):
        assert ours == pytest.approx(plain, rel=1e-5)


# --- gradients that are not of a step


def probed_and_not(folder: Path, make_sync: Any, width: int) -> tuple[Flat, Flat]:
    """The final parameters; first with an action and an evaluation that call `backward` for themselves."""

    def wide() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()

    def saliency(model: nn.Module, batch: Any) -> dict[str, Any]:
        with torch.enable_grad():
            step_fn(model, batch)[0].backward()
        return {"slope": (next(model.parameters()).grad.abs().sum(), 1)}

    def probe(state: Any) -> None:
        step_fn(state.model, [t[:2] for t in data().tensors])[0].backward()

    given = {"eval_data": data(), "eval_fn": saliency, "eval_every": 2, "actions": [probe]}
    results = [
        fit(folder / f"{len(settings)}", model=wide(), sync=make_sync(), **LONG, **settings)[0]
        for settings in (given, {"eval_data": data(), "eval_fn": eval_fn, "eval_every": 2})
    ]
    return results[0], results[1]


@pytest.mark.parametrize(
    ("n", "make_sync", "width"),
    [(1, AllReduce, 8), (1, AllReduce, 4000), (2, AllReduce, 8), (2, OVERLAPPING, 8), (2, LOCAL, 8)],
    ids=["one buffer", "in place", "two ranks", "in buckets", "local"],
)
@pytest.mark.one_in(2)
def test_a_backward_pass_of_an_evaluation_or_an_action_is_no_part_of_the_next_step(
    n: int, make_sync: Any, width: int, tmp_path: Path
) -> None:
    for probed, plain in on_ranks(n, probed_and_not, tmp_path, make_sync, width):
        assert np.array_equal(probed, plain)


# --- buffers that only some ranks have


class Growing(nn.Module):
    """A table that grows with the longest sequence of this rank (as of rotary embeddings), a sparse constant, an expanded one,
    and counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        self.register_buffer("table", torch.zeros(1, dtype=torch.float64), persistent=False)
        self.register_buffer("places", torch.eye(3).to_sparse(), persistent=False)
        self.register_buffer("one", torch.ones(1, dtype=torch.float64).expand(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
        if len(self.table) < comm.rank() + 2:
            self.table = torch.zeros(comm.rank() + 2, dtype=torch.float64)
        found: torch.Tensor = self.layer(x * self.one + self.table[-1])
        return found


def grown(folder: Path, make_sync: Any) -> tuple[list[Flat], list[int]]:
    """The parameters: of a run without a stop, and of one that is stopped and resumed; and the sizes of the table."""
    results, sizes = [], []
    for stops in ((8,), (4, 8)):
        for steps in stops:
            model = Growing()
            ema = rankwise.actions.EMA(model, decay=0.5)
            fit(
                folder / str(len(stops)), model=model, sync=make_sync(), max_epochs=None, max_steps=steps, every_steps=2,
                eval_data=data(), eval_fn=eval_fn, eval_every=2,
                actions=[ema, rankwise.Evaluate(data(), eval_fn, model=ema, name="ema")],
            )  # fmt: skip
        results.append(flat(model))
        sizes.append(len(model.table))
    return results, sizes


@pytest.mark.parametrize("make_sync", [AllReduce, LOCAL], ids=["all-reduce", "local"])
@pytest.mark.one_in(2)
def test_a_buffer_whose_shape_differs_between_ranks_stays_as_it_is_on_each(make_sync: Any, tmp_path: Path) -> None:
    for rank, ((unbroken, resumed), sizes) in enumerate(on_ranks(2, grown, tmp_path, make_sync)):
        assert np.array_equal(unbroken, resumed)
        assert sizes == [rank + 2] * 2


# --- an optimizer without a learning rate


class Signs(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= 0.001 * p.grad.sign()


def trained_by_signs(folder: Path) -> tuple[list[Flat], str]:
    found = [fit(folder / "a", optimizer=Signs, max_steps=8)]
    for steps in (3, 8):
        result = fit(folder / "b", optimizer=Signs, max_steps=steps)
    return [found[0][0], result[0]], result[1]


@pytest.mark.parametrize("n", [1, 2])
def test_an_optimizer_may_have_no_learning_rate(n: int, tmp_path: Path) -> None:
    for (unbroken, resumed), said in on_ranks(n, trained_by_signs, tmp_path):
        assert np.array_equal(unbroken, resumed)
        assert not re.search(r"\blr\b", said)
    with pytest.raises(ConfigError, match=r"^scale_lr: Signs has no learning rate; remove scale_lr"):
        rankwise.actions.scale_lr(Signs(nn.Linear(1, 1).parameters()), "linear")


# --- a split that the ranks have drawn apart


def split_apart(folder: Path) -> list[tuple[str, str]]:
    torch.manual_seed(comm.rank())
    apart = torch.utils.data.random_split(data(), [20, 9])
    same = torch.utils.data.random_split(data(), [20, 9], torch.Generator().manual_seed(0))
    parts = [(apart[0], same[1]), (same[0], apart[1]), (torch.utils.data.Subset(apart[0], range(8)), same[1]), same]
    return [error_of(folder / str(n), train_data=a, eval_data=b, max_steps=2) for n, (a, b) in enumerate(parts)]


def test_a_split_of_the_data_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    for *refused, accepted in on_ranks(2, split_apart, tmp_path):
        for kind, text in refused:
            assert kind == "ConfigError"
            assert "the split of the data (which must be drawn with the same seed on all ranks) is '" in text
        assert "of eval, the split" in refused[1][1]
        assert accepted == ("", "")
