"""The Trainer: the same training on any number of ranks, and as if it had never stopped."""

from __future__ import annotations

import contextlib
import io
import json
import math
import multiprocessing
import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from ranks import on_ranks, scripts_on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from trainers import trainer_of

from rankwise import Trainer, every
from rankwise import trainer as trainer_module
from rankwise.data import Order
from rankwise.dist import comm
from rankwise.errors import CheckpointError, ConfigError, Stopped
from rankwise.sync import AllReduce, LocalSGD
from rankwise.telemetry import progress, writers
from rankwise.training.state import TrainState

Flat = npt.NDArray[np.float64]
SAMPLES = 29


def data(samples: int = SAMPLES, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator), torch.arange(samples))


def make_model(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).to(dtype)


def step_fn(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    x, y, _ = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def eval_fn(model: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
    """Over every sample once: its loss, whether the prediction is right, its number and the square of its number."""
    x, y, k = batch
    scores = model(x)
    return {
        "loss": (F.cross_entropy(scores, y, reduction="sum"), len(y)),
        "accuracy": ((scores.argmax(1) == y).sum(), torch.tensor(len(y))),
        "number": (float(k.sum()), 1),
        "square": (k.square().sum(), len(k)),
    }


def flat(model: nn.Module) -> Flat:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]).numpy()


def trainer(
    run_dir: Path, model: nn.Module | None = None, tensorboard: bool = False, looked_at: bool = False, **settings: Any
) -> Trainer:
    """A Trainer in a separate process (on_ranks), because it replaces signal handlers and the excepthook."""
    # As in a user's process: otherwise a rank of on_ranks would start its loader workers slowly, as it was started itself.
    multiprocessing.set_start_method("fork", force=True)
    if not tensorboard:  # its import takes longer than these tests
        writers.find_spec = lambda name: None  # type: ignore[assignment, misc]
    if not looked_at:  # step functions of tests count their calls
        trainer_module.warn_of_means = lambda *_: None  # type: ignore[assignment]
    model = make_model() if model is None else model
    make_optimizer = settings.pop("optimizer", lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1))
    optimizer = make_optimizer(model.parameters())
    settings = {"global_batch_size": 8, "max_epochs": 3, "log_every": 1, "every_s": 1e9, **settings}
    make_scheduler = settings.pop("scheduler", None)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    arguments = {"step_fn": step_fn, "train_data": data(), **settings}
    return trainer_of(model, optimizer, run_dir=run_dir, scheduler=scheduler, **arguments)


def fit(run_dir: Path, **settings: Any) -> tuple[Flat, str]:
    """(the final parameters, what was printed)."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        state = trainer(run_dir, **settings).fit()
    return flat(state.model), out.getvalue()


def error_of(run_dir: Path, **settings: Any) -> tuple[str, str]:
    """(type, text) of what `fit` raises; empty texts if it raises nothing."""
    try:
        fit(run_dir, **settings)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def records(run_dir: Path) -> list[dict[str, Any]]:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=no_constant) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path, name: str = "loss") -> list[tuple[int, float]]:
    return [(r["step"], r[name]) for r in records(run_dir) if name in r]


# --- the same on any number of ranks


def plain_loop(epochs: int, clip_norm: float | None = None) -> tuple[Flat, list[float]]:
    """What the Trainer does, in the simplest way and in one process. (parameters, the mean loss of each step)."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    dataset, means = data(), []
    for epoch in range(epochs):
        for start in range(0, SAMPLES, 8):
            batch = dataset[Order(SAMPLES, 0).indices(epoch, start, min(start + 8, SAMPLES)).tolist()]
            total, count = step_fn(model, batch)
            optimizer.zero_grad()
            (total / count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf)
            optimizer.step()
            means.append(total.item() / count)
    return flat(model), means


VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "accumulate": {"accumulate": 2},
    "clip": {"clip_norm": 0.1},
    "workers": {"num_workers": 1},
    "batch_size": {"global_batch_size": None, "batch_size": 4},  # per rank
    "sync": {"sync": AllReduce(), "clip_norm": 0.1},
}


def fit_variants(folder: Path) -> dict[str, Flat]:
    n = comm.world_size()
    return {
        name: fit(folder / f"{n}-{name}", **settings)[0]
        for name, settings in VARIANTS.items()
        if name not in ("batch_size", "workers") or n == 2
    }


@pytest.mark.parametrize("n", [1, 2, 3])
def test_parameters_and_losses_are_those_of_a_plain_loop(n: int, tmp_path: Path) -> None:
    answers = on_ranks(n, fit_variants, tmp_path)
    for name in answers[0]:
        expected, means = plain_loop(3, 0.1 if name in ("clip", "sync") else None)
        for answer in answers:
            assert np.abs(answer[name] - expected).max() < 1e-10, name
        logged = losses(tmp_path / f"{n}-{name}")
        assert [step for step, _ in logged] == list(range(1, 13))
        assert max(abs(a - b) for (_, a), b in zip(logged, means, strict=True)) < 1e-10, name


def fit_few(folder: Path) -> Flat:
    return fit(folder / str(comm.world_size()), train_data=data(2), global_batch_size=64, max_epochs=4)[0]


def test_more_ranks_than_samples_train_as_one(tmp_path: Path) -> None:
    expected = on_ranks(1, fit_few, tmp_path)[0]
    for answer in on_ranks(3, fit_few, tmp_path):
        assert np.abs(answer - expected).max() < 1e-10


# --- as if it had never stopped


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)


Eval = dict[str, Any]


def wide_model() -> nn.Module:
    """More gradients than fit into DDP's first bucket."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Dropout(0.3), nn.Linear(300, 1000), nn.Linear(1000, 3))


def unbroken_and_broken(folder: Path, stops: tuple[int, ...], wide: bool, **settings: Any) -> dict[str, Flat]:
    """The parameters after 10 steps without a stop, and of runs that stopped after some of them (an epoch has 4 steps)."""

    def part(name: str, max_steps: int) -> Flat:
        # A new process has other random streams; those of the checkpoint must replace them.
        random.seed(comm.rank() + 99)
        model = wide_model() if wide else make_model(0.3, torch.float32)
        return fit(folder / name, max_steps=max_steps, model=model, scheduler=cosine,
                   train_data=data(dtype=torch.float32), max_epochs=None, **settings)[0]  # fmt: skip

    answers = {"unbroken": part("unbroken", 10)}
    for stop in stops:
        part(f"stop-{stop}", stop)
        answers[f"stop-{stop}"] = part(f"stop-{stop}", 10)
    if len(stops) > 1:
        for steps in (2, 3, 7):
            part("often", steps)
        answers["often"] = part("often", 10)
    return answers


MORE = {"accumulate": 2, "num_workers": 1, "precision": "bf16"}


@pytest.mark.parametrize(
    ("n", "settings"),
    [
        (3, {}), (1, {}), (2, {}), (4, {}), (2, {"reduction": "ddp"}), (3, {"reduction": "ddp"}), (4, {"reduction": "ddp"}),
        (3, {"reduction": "ddp", **MORE}), (1, MORE), (3, MORE),
    ],
)  # fmt: skip
@pytest.mark.one_in(4)
def test_a_stopped_run_ends_bit_for_bit_as_the_unbroken_one(n: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """With only 2 ranks the test would be blind: a + b commutes."""
    stops = (1, 3, 4, 6, 9) if not settings else (3,)
    answers = on_ranks(n, unbroken_and_broken, tmp_path, stops, wide=bool(settings), **settings)
    for answer in answers:
        for name, parameters in answer.items():
            assert np.array_equal(parameters, answers[0]["unbroken"]), name
    expected = losses(tmp_path / "unbroken")
    for name in answers[0]:
        assert losses(tmp_path / name) == expected  # and so are the metrics in between
    if "often" not in answers[0]:
        return
    attempts = [(r["life"], r["step"]) for r in records(tmp_path / "often") if "loss" in r]
    assert attempts == [(1, 1), (1, 2), (2, 3), (3, 4), (3, 5), (3, 6), (3, 7), (4, 8), (4, 9), (4, 10)]


DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.randn(()).item(),
    "python": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.normal()),
}


def with_and_without_evaluation(folder: Path, generator: str) -> list[Flat]:
    draw = DRAWS[generator]

    def noisy_step(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        x, y, k = batch
        return step_fn(model, (x + 0.1 * draw(), y, k))

    def drawing_eval(model: Any, batch: Any) -> Eval:
        return {"loss": (draw(), 1)}

    evaluated = {"eval_data": data(5), "eval_fn": drawing_eval, "eval_every": 2}
    return [fit(folder / str(k), step_fn=noisy_step, **settings)[0] for k, settings in enumerate(({}, evaluated))]


@pytest.mark.parametrize("generator", DRAWS)
def test_evaluation_does_not_move_the_random_streams_of_training(generator: str, tmp_path: Path) -> None:
    without, with_ = on_ranks(1, with_and_without_evaluation, tmp_path, generator)[0]
    assert np.array_equal(without, with_)


def numbers_drawn(folder: Path, seed: int) -> list[float]:
    drawn: list[float] = []
    actions = [lambda state: drawn.extend((torch.rand(()).item(), random.random(), np.random.rand()))]
    fit(folder / str(seed), actions=actions, seed=seed, max_steps=2)
    return drawn


def test_ranks_draw_different_numbers_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    first = on_ranks(2, numbers_drawn, tmp_path / "a", 0)
    assert first == on_ranks(2, numbers_drawn, tmp_path / "b", 0)
    other = on_ranks(2, numbers_drawn, tmp_path / "c", 1)
    everything = [number for drawn in (*first, *other) for number in drawn]
    assert len(set(everything)) == len(everything) == 4 * 6


def stopped_by_a_signal(folder: Path) -> tuple[Any, str, str]:
    """The first attempt is asked to stop after step 2, between two log intervals; the second trains until the end."""
    ask = [lambda state: os.kill(os.getpid(), signal.SIGUSR1) if state.step == 2 else None]
    first = io.StringIO()
    code: Any = None
    with contextlib.redirect_stdout(first):
        try:
            trainer(folder / "run", log_every=3, actions=ask).fit()
        except Stopped as stopped:
            code = stopped.code
    return code, first.getvalue(), fit(folder / "run", log_every=3)[1]


def test_no_figure_is_lost_or_repeated_when_a_signal_stops_a_run_between_two_log_intervals(tmp_path: Path) -> None:
    ((code, first, second),) = on_ranks(1, stopped_by_a_signal, tmp_path)
    assert code == 75
    assert re.search(r"stopped after step 2, saved in .*step-00000002", first)
    _, means = plain_loop(3)
    sizes = [8, 8, 8, 5] * 3
    logged = losses(tmp_path / "run")
    assert [step for step, _ in logged] == [2, 3, 4, 6, 8, 9, 12]
    before = 0
    for step, loss in logged:
        total = sum(m * s for m, s in zip(means[before:step], sizes[before:step], strict=True))
        assert abs(loss - total / sum(sizes[before:step])) < 1e-10
        before = step if step != 2 else before  # the save there does not end the interval: step 3 has the mean of all three
    # One line reports the epoch, although it was interrupted.
    mean = sum(m * s for m, s in zip(means[:4], sizes[:4], strict=True)) / SAMPLES
    assert re.search(rf"epoch 1: 4 steps, loss {mean:.4g}; step ", second), second


def resumed(folder: Path, max_steps: int, more: str = "", **settings: Any) -> tuple[Flat, str]:
    return fit(folder / "run", max_steps=max_steps, max_epochs=None, scheduler=cosine, **settings)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3)])
def test_a_run_goes_on_with_the_same_global_batches_on_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    expected = on_ranks(1, resumed, tmp_path / "unbroken", 10)[0][0]
    on_ranks(before, resumed, tmp_path, 6)
    answers = on_ranks(after, resumed, tmp_path, 10)
    for parameters, _ in answers:
        assert np.abs(parameters - expected).max() < 1e-9
    got, plain = losses(tmp_path / "run"), losses(tmp_path / "unbroken" / "run")
    assert [step for step, _ in got] == [step for step, _ in plain]
    assert max(abs(a - b) for (_, a), (_, b) in zip(got, plain, strict=True)) < 1e-9
    said = answers[0][1]
    assert f"the checkpoint was made on {before} rank" in said
    assert "resuming from step 6 (epoch 2)" in said


def batch_size_of_a_rank(folder: Path, max_steps: int) -> tuple[Flat, str]:
    return resumed(folder, max_steps, global_batch_size=None, batch_size=4)


def test_the_global_batch_of_a_run_stays_though_ranks_come_and_go(tmp_path: Path) -> None:
    expected = on_ranks(2, batch_size_of_a_rank, tmp_path / "unbroken", 10)[0][0]
    on_ranks(2, batch_size_of_a_rank, tmp_path, 5)
    for rank, (parameters, said) in enumerate(on_ranks(3, batch_size_of_a_rank, tmp_path, 10)):
        assert np.abs(parameters - expected).max() < 1e-9
        assert ("global batch of 8 instead of 12" in said) == (rank == 0)


def small_micro_batches(folder: Path, max_steps: int) -> tuple[Flat, str, list[int]]:
    sizes: list[int] = []

    def measured(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        sizes.append(len(batch[1]))
        return step_fn(model, batch)

    return *resumed(folder, max_steps, step_fn=measured, accumulate=2 if comm.world_size() > 1 else 1), sizes


def test_micro_batches_are_no_larger_on_fewer_ranks_than_they_were(tmp_path: Path) -> None:
    on_ranks(2, small_micro_batches, tmp_path, 5)
    ((_, said, sizes),) = on_ranks(1, small_micro_batches, tmp_path, 10)
    assert "global batch 8 = 2 x 4 accumulated" in said
    assert max(sizes) == 2
    (again, *_), _, _ = on_ranks(3, small_micro_batches, tmp_path, 12)
    expected = on_ranks(1, resumed, tmp_path / "unbroken", 12)[0][0]
    assert np.abs(again - expected).max() < 1e-9


def finished_twice(folder: Path, **settings: Any) -> list[tuple[Flat, str, int]]:
    calls: list[int] = []
    actions = [lambda state: calls.append(state.step)]
    return [(*fit(folder / "run", actions=actions, **settings), len(calls)) for _ in range(2)]


@pytest.mark.parametrize("settings", [{}, {"max_steps": 5}])
def test_a_finished_run_started_again_trains_nothing_and_says_so(settings: dict[str, Any], tmp_path: Path) -> None:
    steps = settings.get("max_steps", 12)
    for rank, ((first, _, calls), (again, said, more)) in enumerate(on_ranks(2, finished_twice, tmp_path, **settings)):
        assert np.array_equal(first, again)
        assert calls == more == steps
        assert (f"already done: {steps} steps; for more, raise max_steps or max_epochs" in said) == (rank == 0)
        assert "going on" not in said
        assert "done: " not in said.replace("already done: ", "")
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, steps + 1))
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{steps:08d}"]


def fresh_run(folder: Path) -> list[tuple[Flat, str]]:
    return [fit(folder / "run", max_steps=3), fit(folder / "run", max_steps=3, fresh=True)]


def test_a_fresh_run_begins_anew_and_keeps_the_older_one_aside(tmp_path: Path) -> None:
    for (first, _), (again, said) in on_ranks(2, fresh_run, tmp_path):
        assert np.array_equal(first, again)
        assert "going on" not in said
    assert [(r["life"], r["step"]) for r in records(tmp_path / "run")] == [(1, 1), (1, 2), (1, 3)]
    (aside,) = [p for p in tmp_path.iterdir() if p.name != "run"]
    assert [step for step, _ in losses(aside)] == [1, 2, 3]


def another_training(folder: Path, change: str) -> tuple[str, str]:
    if change == "begin":
        fit(folder, max_steps=2)
        return "", ""
    settings: dict[str, dict[str, Any]] = {
        "model": {"model": nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(), nn.Linear(5, 3)).double()},
        "seed": {"seed": 5},
        "data": {"train_data": data(30)},
        "scheduler": {"scheduler": cosine},
        "learning rate": {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.2)},
        "optimizer": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.02)},
        "batch": {"global_batch_size": 16},
        "clipping": {"clip_norm": 1.0},
    }
    try:
        fit(folder, max_steps=3, **settings[change])
    except ConfigError as error:
        comm.barrier()
        return type(error).__name__, str(error)
    return "", ""


def test_another_training_in_the_same_run_directory_is_an_error_on_every_rank(tmp_path: Path) -> None:
    on_ranks(1, another_training, tmp_path / "run", "begin")
    for change, text in (
        ("model", "size mismatch"), ("seed", "seed=0 and this run has seed=5"),
        ("data", "samples=29 and this run has samples=30"),
        ("scheduler", "started with scheduler None, and the script now has scheduler CosineAnnealingLR"),
        ("learning rate", "started with lr 0.02, weight_decay 0.1, and the script now has lr 0.01, weight_decay 0.2"),
        ("optimizer", "started with optimizer AdamW"),
        ("batch", "started with global_batch_size 8, and the script now has global_batch_size 16"),
        ("clipping", "started with clip_norm None, and the script now has clip_norm 1"),
    ):  # fmt: skip
        answers = on_ranks(2, another_training, tmp_path / "run", change)
        for kind, said in answers:
            assert kind == "ConfigError"
            assert text in said
            assert "--fresh" in said
            assert "--name" in said


def damaged_newest(folder: Path) -> tuple[Flat, str]:
    return fit(folder, max_epochs=None, max_steps=10, every_s=0.0)


def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_the_same(tmp_path: Path) -> None:
    expected = on_ranks(2, damaged_newest, tmp_path / "whole")[0][0]
    run = tmp_path / "run"
    on_ranks(2, damaged_newest, run)
    older, newest = sorted((run / "checkpoints").iterdir())
    (newest / "optimizer.pt").write_bytes(b"")
    for rank, (parameters, said) in enumerate(on_ranks(2, damaged_newest, run)):
        assert np.array_equal(parameters, expected)
        if rank == 0:
            assert f"skipped a checkpoint: {newest / 'optimizer.pt'} has 0 of" in said
            assert f"resuming from step {int(older.name[5:])} " in said


# --- evaluation


def evaluate_on_ranks(folder: Path) -> dict[str, Any]:
    answers = {}
    for samples in (1, 2, 7, 23):
        for every_ in (None, 3):
            name = f"{comm.world_size()}-{samples}-{every_}"
            calls: list[list[int]] = []

            def counted(model: Any, batch: Any, calls: list[list[int]] = calls) -> Eval:
                assert not model.training
                assert not torch.is_grad_enabled()
                calls.append(batch[2].tolist())
                return eval_fn(model, batch)

            seen: list[dict[str, float]] = []
            actions: list[Callable[[TrainState], None]] = [lambda state, seen=seen: seen.append(dict(state.metrics))]  # type: ignore[misc]
            t = trainer(folder / name, eval_data=data(samples), eval_fn=counted, eval_every=every_, max_epochs=2, accumulate=2,
                        actions=actions, model=make_model(0.0))  # fmt: skip
            with contextlib.redirect_stdout(io.StringIO()):
                state = t.fit()
            assert state.model.training
            answers[name] = (dict(state.metrics), sorted(k for batch in calls for k in batch), seen[0], flat(state.model))
    return answers


def exact_figures(parameters: Flat, samples: int) -> dict[str, float]:
    model = make_model()
    nn.utils.vector_to_parameters(torch.from_numpy(parameters), model.parameters())
    with torch.no_grad():
        figures = eval_fn(model.eval(), data(samples)[:])
    return {f"eval_{name}": float(total) / float(count) for name, (total, count) in figures.items() if name != "number"}


@pytest.mark.parametrize("n", [2, 1, 3])
@pytest.mark.one_in(3)
def test_evaluation_is_over_every_sample_once(n: int, tmp_path: Path) -> None:
    answers = on_ranks(n, evaluate_on_ranks, tmp_path)
    for name in answers[0]:
        _, samples, every_ = name.split("-")
        times = 2 if every_ == "None" else 3  # at the end of 2 epochs; at steps 3, 6 and the last, 8
        asked = sorted(k for answer in answers for k in answer[name][1])
        assert asked == sorted(list(range(int(samples))) * times)
        expected = exact_figures(answers[0][name][3], int(samples))
        for answer in answers:
            metrics = answer[name][0]
            for figure, value in expected.items():
                assert abs(metrics[figure] - value) < 1e-10, (name, figure)
            assert "eval_loss" not in answer[name][2]  # not before its time
            assert metrics == answers[0][name][0]  # equal on all ranks
        steps = [r["step"] for r in records(tmp_path / name) if "eval_loss" in r]
        assert steps == ([4, 8] if every_ == "None" else [3, 6, 8])


def evaluate_by_default(folder: Path) -> dict[str, float]:
    return dict(trainer(folder / str(comm.world_size()), eval_data=data(7), max_epochs=1).fit().metrics)


def test_without_an_eval_fn_the_loss_of_the_step_is_evaluated(tmp_path: Path) -> None:
    one, two = on_ranks(1, evaluate_by_default, tmp_path)[0], on_ranks(2, evaluate_by_default, tmp_path)[0]
    assert set(one) == {"loss", "eval_loss"}
    assert abs(one["eval_loss"] - two["eval_loss"]) < 1e-10


def evaluate_names(folder: Path) -> dict[str, float]:
    """Only some batches have this name: the ranks must agree on the names."""

    def names(model: Any, batch: Any) -> Eval:
        return {f"of_{k}": (float(k), 2) for k in batch[2].tolist()}

    return dict(trainer(folder / "run", eval_data=data(5), eval_fn=names, max_steps=1, global_batch_size=3).fit().metrics)


def test_ranks_that_evaluate_different_names_agree_on_all(tmp_path: Path) -> None:
    for answer in on_ranks(3, evaluate_names, tmp_path):
        assert {k: v for k, v in answer.items() if k != "loss"} == {f"eval_of_{k}": k / 2 for k in range(5)}


class Counting(nn.Module):
    """BatchNorm's running statistics are those of each rank's own samples until they are made equal."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.norm(x))
        return out


def running_statistics(folder: Path, evaluate: bool) -> tuple[list[float], dict[str, float]]:
    torch.manual_seed(0)
    model = Counting().double()
    settings = {"eval_data": data(7)} if evaluate else {}
    state = trainer(folder / "run", model=model, max_steps=3, global_batch_size=12, **settings).fit()
    assert isinstance(model.norm.running_mean, torch.Tensor)
    return model.norm.running_mean.tolist(), dict(state.metrics)


@pytest.mark.parametrize("evaluate", [True, False])
def test_running_statistics_are_equal_on_all_ranks_when_evaluated_and_saved(evaluate: bool, tmp_path: Path) -> None:
    answers = on_ranks(2, running_statistics, tmp_path, evaluate)
    assert answers[0] == answers[1]
    path = tmp_path / "run" / "checkpoints" / "step-00000003" / "model.pt"
    saved = torch.load(path, weights_only=True)
    assert saved["norm.running_mean"].tolist() == answers[0][0]
    if evaluate:
        model = Counting().double()
        model.load_state_dict(saved)
        total, count = step_fn(model.eval(), data(7)[:])
        assert abs(answers[0][1]["eval_loss"] - total.item() / count) < 1e-10


# --- contracts


RESULTS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "loss": (lambda loss: loss, r"step_fn returned Tensor of shape \(\); return \(loss sum, count\), for example"),
    "none": (lambda loss: None, "step_fn returned NoneType"),
    "three": (lambda loss: (loss, 1, 2), r"a tuple of 3 \(Tensor of shape \(\), int, int\)"),
    "scores": (lambda loss: (loss, torch.ones(4, 3)), r"a tuple of 2 \(Tensor of shape \(\), Tensor of shape \(4, 3\)\)"),
    "nothing": (lambda loss: (loss, 0), "the counts of all ranks add up to 0, in each of the 12 steps: nothing was trained"),
    "float": (lambda loss: (loss.item(), 1), r"a tuple of 2 \(float, int\)"),
    "list": (lambda loss: [loss, 1], "step_fn returned list"),
    "vector": (lambda loss: (loss.reshape(1), 1), r"must be a scalar .* shape \(1,\)"),
    "detached": (lambda loss: (loss.detach(), 1), "needs no gradient"),
}
FIGURES: dict[str, Any] = {"none": None, "tensor": torch.tensor(1.0), "no pair": {"loss": 1.0}, "three": {"loss": (1.0, 2, 3)}}


def contract_errors(folder: Path) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
    steps = {
        name: error_of(folder / f"step-{name}", step_fn=lambda model, batch, of=of: of(step_fn(model, batch)[0]))
        for name, (of, _) in RESULTS.items()
    }
    evals = {
        name: error_of(folder / f"eval-{name}", eval_data=data(3), eval_fn=lambda model, batch, f=figures: f, max_steps=1)
        for name, figures in FIGURES.items()
    }
    return steps, evals


def test_a_function_that_breaks_its_contract_is_told_what_to_return(tmp_path: Path) -> None:
    ((steps, evals),) = on_ranks(1, contract_errors, tmp_path)
    for name, (_, text) in RESULTS.items():
        kind, said = steps[name]
        assert kind == "StepError", name
        assert re.search(text, said), said
    assert "the function of Evaluate returned float for 'loss', which is not a pair" in evals["no pair"][1]
    for kind, said in evals.values():
        assert kind == "StepError"
        assert re.search("the function of Evaluate returned .*; return a mapping of pairs", said), said


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_epochs": None}, "max_epochs=... or max_steps=..."),
        ({"max_epochs": 0}, "max_epochs=0"),
        ({"max_steps": -1}, "max_steps=-1"),
        ({"log_every": 0}, r"Log\(every_steps=0\)"),
        ({"eval_data": [1], "eval_every": 0}, r"Evaluate\(every_steps=0\)"),
        ({"global_batch_size": None}, "give batch_size .*, global_batch_size .*, or batches"),
        ({"batch_size": 4}, "batch_size and global_batch_size all set the batch; keep one of them"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"precision": "fp8"}, "precision='fp8'.: give one of 'fp32', 'bf16', 'fp16'"),
        ({"lr_scale": "cubic"}, r"scale_lr\(rule='cubic'\): give one of 'linear', 'sqrt'"),
        ({"lr_scale": "linear"}, r"scale_lr\(optimizer, 'linear'\) is for batch_size"),
        ({"model": nn.Sequential(nn.Linear(6, 3), nn.SyncBatchNorm(3))}, "SyncBatchNorm, which works only on GPUs"),
        ({"model": nn.Sequential(nn.Linear(6, 3), nn.LazyLinear(3))}, r"1.weight has no shape yet \(a lazy module\)"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_a_setting_that_cannot_work_is_a_config_error_before_anything_is_made(
    settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    for kind, said in on_ranks(1, error_of, tmp_path / "run", **settings):
        assert kind == "ConfigError", said
        assert re.search(text, said), said
    assert list(tmp_path.iterdir()) == []


def data_errors(folder: Path, which: str) -> list[tuple[str, str]]:
    return [error_of(folder / "run", **{which: dataset}) for dataset in ([], (k for k in range(3)))]


@pytest.mark.parametrize("which", ["train_data", "eval_data"])
def test_data_without_samples_or_length_is_a_data_error_before_anything_is_made(which: str, tmp_path: Path) -> None:
    ((empty, endless),) = on_ranks(1, data_errors, tmp_path, which)
    assert endless[0] == "DataError"
    assert "can be read only once" in endless[1]
    assert empty[0] == "DataError"
    assert "has no samples" in empty[1]
    assert list(tmp_path.iterdir()) == []


def try_again(folder: Path, where: str) -> list[tuple[str, str]]:
    wrong: dict[str, Any] = {
        "constructor": {"model": make_model().requires_grad_(False)},
        "loop": {"step_fn": lambda m, b: None},
    }
    return [error_of(folder / "run", **wrong[where]), error_of(folder / "run", max_steps=1)]


@pytest.mark.parametrize(("where", "kind"), [("constructor", "ConfigError"), ("loop", "StepError")])
def test_after_an_error_the_same_process_can_try_again(where: str, kind: str, tmp_path: Path) -> None:
    """As in a notebook: the user corrects the mistake and runs the cell again."""
    ((error, again),) = on_ranks(1, try_again, tmp_path, where)
    assert error[0] == kind
    assert again == ("", "")


def two_at_once(folder: Path) -> tuple[str, str]:
    """A second Trainer starts while the first is in its loop."""
    errors: list[tuple[str, str]] = []
    trainer(folder / "run", max_steps=1, actions=[lambda state: errors.append(error_of(folder / "run"))]).fit()
    assert error_of(folder / "run", max_steps=2) == ("", "")
    return errors[0]


def test_two_runs_at_once_in_one_directory_are_refused(tmp_path: Path) -> None:
    ((kind, said),) = on_ranks(1, two_at_once, tmp_path)
    assert kind == "RunDirError"
    assert re.search(r"is still running: pid \d+", said)


# --- actions


def fire(folder: Path) -> dict[str, list[int]]:
    fired: dict[str, list[int]] = {"each": [], "steps": [], "epochs": [], "end": [], "seconds": []}
    epochs: list[tuple[int, bool, bool]] = []

    def each(state: TrainState) -> None:
        fired["each"].append(state.step)
        epochs.append((state.epoch, state.epoch_ended, state.last))

    def note(name: str) -> Callable[[TrainState], None]:
        return lambda state: fired[name].append(state.step)

    actions = [each, every(note("steps"), steps=5), every(note("epochs"), epochs=2), every(note("end"), at_end=True),
               every(note("seconds"), seconds=0.0)]  # fmt: skip
    fit(folder / "run", actions=actions)
    return {**fired, "epoch": [e for e, _, _ in epochs], "ended": [s + 1 for s, (_, ended, _) in enumerate(epochs) if ended],
            "last": [s + 1 for s, (_, _, last) in enumerate(epochs) if last]}  # fmt: skip


def test_actions_are_called_on_every_rank_when_they_are_due(tmp_path: Path) -> None:
    for answer in on_ranks(2, fire, tmp_path):
        assert answer == {
            "each": list(range(1, 13)), "steps": [5, 10], "epochs": [8], "end": [12], "seconds": list(range(1, 13)),
            "epoch": [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3], "ended": [4, 8, 12], "last": [12],
        }  # fmt: skip


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def rates_seen(folder: Path) -> list[float]:
    rates: list[float] = []
    fit(folder / "run", scheduler=halving, max_steps=3, actions=[lambda s: rates.append(s.optimizer.param_groups[0]["lr"])])
    return rates


def test_the_schedule_is_stepped_before_the_actions_see_the_step(tmp_path: Path) -> None:
    assert on_ranks(1, rates_seen, tmp_path) == [[0.01, 0.005, 0.0025]]


def log_sparsely(folder: Path) -> str:
    return fit(folder / "run", log_every=3)[1]


def test_figures_are_logged_at_their_interval_and_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    said = on_ranks(2, log_sparsely, tmp_path)[0]
    _, means = plain_loop(3)
    sizes = [8, 8, 8, 5] * 3
    logged = losses(tmp_path / "run")
    assert [step for step, _ in logged] == [3, 4, 6, 8, 9, 12]
    before = 0
    for step, loss in logged:
        total = sum(m * s for m, s in zip(means[before:step], sizes[before:step], strict=True))
        assert abs(loss - total / sum(sizes[before:step])) < 1e-10
        before = step
    for record in records(tmp_path / "run"):
        assert record["life"] == 1
        assert record["lr"] == 0.02
        assert 0 <= record["clock_s"] < 60
        assert {"share/data wait", "share/all-reduce", "share/saving"} <= set(record)
        assert all(0 <= value <= 1 for name, value in record.items() if name.startswith("share/"))
    assert [r["epoch"] for r in records(tmp_path / "run")] == [0, 1, 1, 2, 2, 3]
    for epoch in range(3):
        mean = sum(m * s for m, s in zip(means[4 * epoch : 4 * epoch + 4], sizes[:4], strict=True)) / SAMPLES
        assert re.search(rf"epoch {epoch + 1}: 4 steps, loss {mean:.4g}; step ", said), said
    assert re.search(
        r"\d+ parameters, fp32 on cpu; 29 samples, 4 steps per epoch\nglobal batch 8 = 4 x 2 ranks; gradients: one", said
    )
    assert re.search(r"done: 12 steps, loss [\d.]+, [\d.]+ s elapsed \([^)]*computing[^)]*\)\nsaved in .*step-00000012", said)


def spoilt_loss(folder: Path) -> Flat:
    calls = 0

    def sometimes(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        nonlocal calls
        calls += 1
        loss, count = step_fn(model, batch)
        return (loss * math.nan if calls == 2 and comm.rank() == 1 else loss), count

    return fit(folder / "run", step_fn=sometimes, max_steps=4)[0]


def test_a_loss_that_is_not_finite_on_one_rank_leaves_its_step_out_and_is_logged(tmp_path: Path) -> None:
    first, second = on_ranks(2, spoilt_loss, tmp_path)
    assert np.isfinite(first).all()
    assert np.array_equal(first, second)
    assert [loss == "nan" for _, loss in losses(tmp_path / "run")] == [False, True, False, False]


# --- saving


def save_often(folder: Path) -> list[str]:
    fit(folder / "run", every_s=0.0)
    return sorted(p.name for p in (folder / "run" / "checkpoints").iterdir())


def test_a_run_saves_while_it_trains_and_keeps_the_newest(tmp_path: Path) -> None:
    assert on_ranks(2, save_often, tmp_path)[0] == ["step-00000011", "step-00000012"]


def failing_saves(folder: Path, always: bool) -> tuple[str, str]:
    t = trainer(folder / "run", every_s=0.0)
    save = t.checkpoints.save

    def failing(parts: Any, step: int, *more: Any) -> Any:
        if always or step < 12:
            raise CheckpointError("cannot write: the disk is full")
        return save(parts, step, *more)

    t.checkpoints.save = failing  # type: ignore[method-assign, assignment]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            t.fit()
        except CheckpointError as error:
            return str(error), out.getvalue()
    return "", out.getvalue()


def test_a_save_that_fails_is_a_warning_on_the_way_and_an_error_at_the_end(tmp_path: Path) -> None:
    for rank, (error, said) in enumerate(on_ranks(2, failing_saves, tmp_path / "a", False)):
        assert error == ""
        assert said.count("warning: cannot write: the disk is full; training continues") == (11 if rank == 0 else 0)
    for error, _ in on_ranks(2, failing_saves, tmp_path / "b", True):
        assert error == "cannot write: the disk is full"


def three_steps(folder: Path) -> tuple[Flat, str]:
    return fit(folder / "run", scheduler=cosine, max_steps=3)


def test_a_checkpoint_of_the_trainer_is_read_by_torch_alone(tmp_path: Path) -> None:
    parameters, _ = on_ranks(2, three_steps, tmp_path)[0]
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    states = {p.stem: torch.load(p, weights_only=True) for p in path.glob("*.pt")}
    assert set(states) == {"settings", "train", "model", "optimizer", "loader", "log", "sync", "scheduler", "rng"}
    model = make_model()
    model.load_state_dict(states["model"])
    assert np.array_equal(flat(model), parameters)
    assert states["train"]["step"] == 3
    assert json.loads((path / "manifest.json").read_text())["info"]["precision"] == "fp32"


def bf16(folder: Path) -> tuple[Flat, str]:
    fit(folder / "run", max_steps=2, model=make_model(dtype=torch.float32), train_data=data(dtype=torch.float32))
    return fit(folder / "run", max_steps=4, precision="bf16", model=make_model(dtype=torch.float32),
               train_data=data(dtype=torch.float32))  # fmt: skip


def test_a_run_that_goes_on_in_other_numerics_says_so(tmp_path: Path) -> None:
    assert (
        "results may differ from those of an uninterrupted run,\n  because this has changed: precision fp32 -> bf16"
        in on_ranks(2, bf16, tmp_path)[0][1]
    )


def longer_schedule(folder: Path) -> list[str]:
    """The scheduler's length changes with that of the run, as when max_steps is raised; and the optimizer has another
    kernel."""

    def until(steps: int) -> Callable[[torch.optim.Optimizer], Any]:
        return lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    said = [fit(folder / "run", max_steps=n, max_epochs=None, scheduler=until(n), fused=fused)[1]
            for n, fused in ((2, True), (4, False), (6, False))]  # fmt: skip
    return [*said, str([round(lr, 9) for _, lr in losses(folder / "run", "lr")])]


def killed_and_begun_anew(folder: Path) -> str:
    def fall(state: TrainState) -> None:
        raise KeyError("a crash before anything is saved")

    assert error_of(folder / "run", actions=[fall])[0] == "KeyError"
    return fit(folder / "run")[1]


class Falls:
    """A step function that raises once, in a micro-batch of a later step; the other ranks raise in the same."""

    def __init__(self, at: int) -> None:
        self._calls, self._at = 0, at

    def __call__(self, model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        self._calls += 1
        if self._calls == self._at:
            raise KeyError("a fault of the script")
        return step_fn(model, batch)


STRATEGIES = {"exact": AllReduce, "ddp": lambda: AllReduce(overlap=True), "local": lambda: LocalSGD(every=3)}


def fitted_again(folder: Path, name: str, falls: bool) -> tuple[Flat, list[tuple[int, float]]]:
    """The second call of `fit`, after one that an exception has ended in the second micro-batch of step 6."""
    made = trainer(
        folder / f"{name}-{falls}", accumulate=2, every_s=None, every_steps=4, sync=STRATEGIES[name](), log_every=4,
        step_fn=Falls(at=12) if falls else step_fn, model=make_model(dropout=0.2),
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        if falls:
            with pytest.raises(KeyError):
                made.fit()
        model = made.fit().model
    return flat(model), losses(folder / f"{name}-{falls}")


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.one_in(2)
def test_a_second_fit_after_an_exception_trains_as_if_nothing_had_been(n: int, name: str, tmp_path: Path) -> None:
    for (one, losses_one), (other, losses_other) in zip(
        on_ranks(n, fitted_again, tmp_path, name, False), on_ranks(n, fitted_again, tmp_path, name, True), strict=True
    ):
        assert np.array_equal(one, other)
        assert dict(losses_other) == dict(losses_one)


def fitted_from_scratch_again(folder: Path) -> list[str]:
    errors = []
    made = trainer(folder / "run", step_fn=Falls(at=3))
    with contextlib.redirect_stdout(io.StringIO()):
        for fresh in (False, False, True):
            try:
                made.fit(fresh=fresh)
            except (KeyError, ConfigError) as error:
                errors.append(str(error))
        fit(folder / "run")  # another Trainer
    return [*errors, *sorted(path.name for path in (folder / "run").iterdir() if "checkpoints" in path.name)]


@pytest.mark.parametrize("n", [1, 2])
def test_a_trainer_whose_model_has_changed_does_not_start_from_scratch(n: int, tmp_path: Path) -> None:
    again = (
        ", and an earlier fit() has changed the model; create the model, the optimizer and the Trainer again, and call fit() "
        "of that Trainer"
    )
    for answer in on_ranks(n, fitted_from_scratch_again, tmp_path):
        assert answer == [
            "'a fault of the script'", f"there is no checkpoint to resume from{again}",
            f"fit(fresh=True) starts from scratch{again}", "checkpoints",
        ]  # fmt: skip


def test_an_attempt_that_has_nothing_to_go_on_from_says_so(tmp_path: Path) -> None:
    assert "found no checkpoint of an earlier attempt: starting from scratch" in on_ranks(1, killed_and_begun_anew, tmp_path)[0]


def test_a_schedule_that_was_begun_holds_and_that_is_said(tmp_path: Path) -> None:
    ((_, second, third, lr),) = on_ranks(1, longer_schedule, tmp_path)
    for said, now in ((second, 4), (third, 6)):
        assert f"T_max stays 2, because this run started with it (the script now has {now})" in said
    assert lr == "[0.01, 0.0, 0.01, 0.02, 0.01, 0.0]"


# --- the optimizer, the model


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(40, 3, 6, 6, generator=generator, dtype=torch.float64))


def convolutions() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, 1)).double()


def in_channels_last(folder: Path, kind: str) -> list[Flat]:
    """The parameters at the end: without a change of the memory format; with one in mid-training; and after a resume."""

    def square(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return (model(batch[0]) - 1).square().sum(), len(batch[0])

    def turn(state: TrainState) -> None:
        if state.step == 3:
            state.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    make = {"sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), "adam": lambda p: torch.optim.AdamW(p, lr=0.01)}[kind]
    given = {"step_fn": square, "train_data": images(), "optimizer": make, "max_epochs": None}
    there = folder / str(comm.world_size())
    found = [
        fit(there / "plain", model=convolutions(), max_steps=8, **given)[0],
        fit(there / "turned", model=convolutions(), max_steps=8, actions=[turn], **given)[0],
    ]
    fit(there / "resumed", model=convolutions(), max_steps=3, **given)
    turned = convolutions().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return [*found, fit(there / "resumed", model=turned, max_steps=8, **given)[0]]


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.one_in(2)
def test_another_memory_format_in_mid_training_or_after_a_resume_changes_nothing(n: int, kind: str, tmp_path: Path) -> None:
    for plain, *others in on_ranks(n, in_channels_last, tmp_path, kind):
        for other in others:
            assert np.abs(plain - other).max() < 1e-12


class CountsSteps(torch.optim.SGD):
    """It also keeps a number that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[call-overload, index]
        return super().step(closure)


class Wrapping:
    """An optimizer that wraps another, and is none of torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.step, self.state_dict, self.load_state_dict = optimizer.step, optimizer.state_dict, optimizer.load_state_dict


class Subclass(torch.optim.Optimizer):
    """Another, which does not call `super().__init__`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


def with_momentum(parameters: Any, kind: type[torch.optim.SGD] = torch.optim.SGD) -> torch.optim.SGD:
    return kind(parameters, lr=0.02, momentum=0.9, foreach=False)


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": with_momentum,
    "counting": lambda parameters: with_momentum(parameters, CountsSteps),
    "wrapping": lambda parameters: Wrapping(with_momentum(parameters)),
    "a subclass": lambda parameters: Subclass(with_momentum(parameters)),
}


def trained_by_each_kind(folder: Path) -> list[Flat]:
    found = []
    for name, make in KINDS.items():
        fit(folder / f"{name}-{comm.world_size()}", optimizer=make, max_epochs=1)
        found.append(fit(folder / f"{name}-{comm.world_size()}", optimizer=make, max_epochs=3)[0])
    return found


@pytest.mark.parametrize("n", [2, 1])
@pytest.mark.one_in(2)
def test_optimizers_that_wrap_others_or_keep_more_train_as_plain_ones(n: int, tmp_path: Path) -> None:
    for found in on_ranks(n, trained_by_each_kind, tmp_path):
        assert [np.array_equal(found[0], other) for other in found[1:]] == [True] * (len(KINDS) - 1)


def measures(folder: Path) -> list[Any]:
    def act(state: TrainState) -> None:
        state.measure({"tensor": torch.tensor(0.5), "array": np.float32(0.25), "bool": torch.tensor(True)})  # type: ignore[dict-item]
        state.note({"noted": torch.tensor([2.0])})  # type: ignore[dict-item]

    def wrong(state: TrainState) -> None:
        state.measure({"x": torch.zeros(2)})  # type: ignore[dict-item]

    fit(folder / "run", max_steps=2, actions=[act])
    last = records(folder / "run")[-1]
    return [*(last[name] for name in ("tensor", "array", "bool", "noted")), error_of(folder / "other", actions=[wrong])]


def test_a_metric_may_be_a_tensor_or_a_number_of_numpy(tmp_path: Path) -> None:
    [(*numbers, error)] = on_ranks(1, measures, tmp_path)
    assert numbers == [0.5, 0.25, 1.0, 2.0]
    assert error == ("ConfigError", "the metric 'x' is tensor([0., 0.]); give one number")


def scaled(folder: Path, **settings: Any) -> tuple[list[tuple[int, float]], str, list[tuple[int, float]]]:
    """(the learning rates of a run with a scheduler, what it printed, an empty list)."""
    settings = {"global_batch_size": None, "batch_size": 4, "max_epochs": None, "scheduler": cosine, **settings}
    said = fit(folder / "run", max_steps=3, **settings)[1]
    return losses(folder / "run", "lr"), said, []


def test_the_learning_rate_grows_with_the_global_batch_once_and_the_scheduler_with_it(tmp_path: Path) -> None:
    plain = on_ranks(2, scaled, tmp_path / "none")[0][0]
    rates, said, _ = on_ranks(2, scaled, tmp_path / "linear", lr_scale="linear")[0]
    assert rates == [(step, pytest.approx(2 * rate)) for step, rate in plain]
    assert "learning rate 0.02 x 2 = 0.04 (linear in the ranks)" in said
    rates, said, _ = on_ranks(2, scaled, tmp_path / "sqrt", lr_scale="sqrt")[0]
    assert rates == [(step, pytest.approx(2**0.5 * rate)) for step, rate in plain]


def scaled_further(folder: Path) -> list[tuple[int, float]]:
    settings = {"global_batch_size": None, "batch_size": 4, "max_epochs": None, "scheduler": cosine, "lr_scale": "linear"}
    fit(folder / "run", max_steps=6, **settings)
    return losses(folder / "run", "lr")


def test_a_scaled_learning_rate_stays_that_of_its_global_batch_on_other_ranks(tmp_path: Path) -> None:
    on_ranks(2, scaled, tmp_path, lr_scale="linear")
    after = on_ranks(3, scaled_further, tmp_path)[0]
    whole = on_ranks(2, scaled_further, tmp_path / "whole")[0]
    assert after == [(step, pytest.approx(rate)) for step, rate in whole]


def kernels(folder: Path) -> list[Any]:
    found = []
    for k, (make, fused) in enumerate((
        (lambda p: torch.optim.AdamW(p, lr=0.02), None), (lambda p: torch.optim.AdamW(p, lr=0.02), False),
        (lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True), None), (lambda p: torch.optim.Adamax(p, lr=0.02), None),
    )):  # fmt: skip
        state = trainer(folder / str(k), optimizer=make, fused=fused).fit()
        found.append((state.optimizer.param_groups[0].get("fused"), flat(state.model)))
    return found


def test_an_optimizer_is_fused_where_it_can_be_and_nobody_chose(tmp_path: Path) -> None:
    ((one, other, foreach, adamax),) = on_ranks(1, kernels, tmp_path)
    assert one[0] is True
    assert other[0] is False
    assert foreach[0] is None
    assert adamax[0] is None
    assert np.abs(one[1] - other[1]).max() < 1e-12


def compiled(folder: Path, reduction: str) -> tuple[Flat, Flat, list[str]]:
    plain, _ = fit(folder / "plain")
    state = trainer(folder / "compiled", compile={"backend": "aot_eager"}, reduction=reduction).fit()
    return plain, flat(state.model), list(state.model.state_dict())


@pytest.mark.parametrize("reduction", ["flat", "ddp"])
@pytest.mark.one_in(2)
def test_a_compiled_model_trains_alike_and_is_saved_under_its_own_names(reduction: str, tmp_path: Path) -> None:
    for plain, ours, names in on_ranks(2, compiled, tmp_path, reduction):
        assert np.abs(plain - ours).max() < 1e-9
        assert names == list(make_model().state_dict())


def normalised(folder: Path, **settings: Any) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer(folder / "run", model=model, max_steps=3, **settings).fit()
    return model[1].running_mean.tolist(), out.getvalue()


def test_batch_norm_on_the_cpu_keeps_its_own_statistics_and_that_is_said(tmp_path: Path) -> None:
    (first, said), (second, _) = on_ranks(2, normalised, tmp_path / "two")
    assert first == second  # made equal for the checkpoint
    assert "BatchNorm normalises over each rank's own part of a batch" in said
    assert "BatchNorm" not in on_ranks(1, normalised, tmp_path / "alone")[0][1]


def cards(folder: Path) -> list[str]:
    asked: list[dict[str, Any]] = [
        {}, {"accumulate": 2}, {"global_batch_size": 9, "accumulate": 2}, {"global_batch_size": None, "batch_size": 3},
    ]  # fmt: skip
    said = [fit(folder / str(k), max_steps=1, **settings)[1] for k, settings in enumerate(asked)]
    return [line.partition(";")[0] for text in said for line in text.splitlines() if line.startswith("global batch")]


def test_the_global_batch_is_said_with_what_it_is_made_of(tmp_path: Path) -> None:
    assert on_ranks(1, cards, tmp_path / "1")[0] == [
        "global batch 8", "global batch 8 = 4 x 2 accumulated", "global batch 9 = 4 or 5 x 2 accumulated", "global batch 3",
    ]  # fmt: skip
    assert on_ranks(2, cards, tmp_path / "2")[0] == [
        "global batch 8 = 4 x 2 ranks", "global batch 8 = 2 x 2 ranks x 2 accumulated",
        "global batch 9 = 2 or 3 x 2 ranks x 2 accumulated", "global batch 6 = 3 x 2 ranks",
    ]  # fmt: skip


def short_epochs(folder: Path, fewest: int, shorter_than_s: float) -> list[str]:
    progress._TOLD, progress._TOLD_EVERY_S = fewest, shorter_than_s
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer(folder / "run", eval_data=data(), eval_every=2, max_epochs=8).fit()
    return out.getvalue().splitlines()


def test_short_epochs_and_evaluations_are_not_all_printed_and_slow_ones_are(tmp_path: Path) -> None:
    """Epochs of 4 steps, and an evaluation after every second step."""

    def told(lines: list[str]) -> tuple[list[str], list[str]]:
        epochs = [line.split(":")[0] for line in lines if line.startswith("epoch ")]
        return epochs, [line.split(":")[0] for line in lines if re.match(r"step \d+: eval_loss", line)]

    [lines] = on_ranks(1, short_epochs, tmp_path / "short", 2, 1e9)
    assert told(lines) == (["epoch 1", "epoch 2"], ["step 2", "step 4", "step 6", "step 8"])
    assert [line for line in lines if "are short" in line] == [
        "evaluations are short: from here on one per second is printed; metrics.jsonl has all",
        "epochs are short: from here on one per second is printed; metrics.jsonl has all",
    ]
    assert any(line.startswith("done: 32 steps, loss ") for line in lines), "the last metrics are in it"
    [lines] = on_ranks(1, short_epochs, tmp_path / "slow", 2, 0.0)
    assert told(lines) == ([f"epoch {k}" for k in range(1, 9)], [f"step {k}" for k in range(2, 33, 2)])
    assert not [line for line in lines if "are short" in line]


def with_tensorboard(folder: Path) -> tuple[Flat, str]:
    return fit(folder / "run", max_steps=3, tensorboard=True)


def test_tensorboard_has_the_figures_too(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    on_ranks(1, with_tensorboard, tmp_path)
    events = EventAccumulator(str(tmp_path / "run" / "telemetry"))
    events.Reload()
    seen = [(e.step, pytest.approx(e.value, rel=1e-6)) for e in events.Scalars("loss")]
    assert seen == losses(tmp_path / "run")
    assert len(seen) == 3


def with_numpy_rate(folder: Path) -> tuple[str, str]:
    model = make_model()
    for steps in (2, 4):
        optimizer = torch.optim.AdamW(model.parameters(), lr=np.float64(1e-3))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                trainer_of(
                    model, optimizer, step_fn, data(), global_batch_size=8, max_steps=steps, run_dir=folder / "run"
                ).fit()
        except CheckpointError as error:  # an error at the save is also right
            assert steps == 2
            return "", str(error)
        except ConfigError as error:
            return type(error).__name__, str(error)
    return "", ""


def test_a_learning_rate_out_of_numpy_does_not_spoil_the_checkpoints(tmp_path: Path) -> None:
    assert [kind for kind, _ in on_ranks(1, with_numpy_rate, tmp_path)] == [""]


@pytest.mark.parametrize("data", [(), ("quiet",)])
def test_a_step_makes_fewer_python_calls_than_a_hand_written_loop(data: tuple[str, ...]) -> None:
    """An exact count; benchmarks measure the time of a step."""
    [done] = scripts_on_ranks(1, str(Path(__file__).parents[1] / "benchmarks" / "trainer_step" / "calls.py"), *data)
    assert done.returncode == 0, done.stdout
    extra = re.search(r": ([+-]\d+\.\d) a step", done.stdout)
    assert extra is not None
    assert float(extra[1]) <= 0


def with_nan_at(step: int, run_dir: Path) -> tuple[str, int]:
    def nan_step(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        seen.append(1)
        loss, count = step_fn(model, batch)
        return (loss * float("nan") if len(seen) == step and comm.rank() == 1 else loss), count

    seen: list[int] = []
    with contextlib.redirect_stdout(io.StringIO()) as out:
        made = trainer(run_dir, max_steps=6)
        made.step_fn = nan_step
        state = made.fit()
    return out.getvalue(), state.steps_left_out


def test_a_skipped_step_is_reported_counted_and_reported_at_the_end(tmp_path: Path) -> None:
    (said, skipped), (_, other) = on_ranks(2, with_nan_at, 3, tmp_path / "run")
    assert skipped == other == 1
    assert (
        "warning: step 3 is skipped on all ranks: the gradient is not finite, and neither is the loss of rank 1 (1 so far)"
        in said
    )
    assert "1 step skipped" in said


def rates_with_nan_at(step: int, run_dir: Path) -> list[float]:
    calls = 0

    def nan_step(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        nonlocal calls
        calls += 1
        loss, count = step_fn(model, batch)
        return (loss * float("nan") if calls == step and comm.rank() == 1 else loss), count

    rates: list[float] = []
    fit(run_dir, max_steps=6, step_fn=nan_step, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        actions=[lambda state: rates.append(state.optimizer.param_groups[0]["lr"])])  # fmt: skip
    return rates


def test_the_scheduler_does_not_step_for_a_skipped_step(tmp_path: Path) -> None:
    for rates in on_ranks(2, rates_with_nan_at, 3, tmp_path / "run"):
        assert rates == [0.02 / 2**n for n in (1, 2, 2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"eval_every": 5}, "Trainer(eval_every=...): it is now evaluate=Evaluate(data, fn, every_steps=...)"),
        ({"batch_tokens": 2}, "Trainer(batch_tokens=...): it is now Loader(dataset, batches=LengthBatches(tokens=...))"),
        ({"save_every_s": 2}, "Trainer(save_every_s=...): it is now checkpoints=Checkpoints(every_s=...)"),
        ({"max_step": 2}, "Trainer(max_step=...): there is no such argument; did you mean max_steps?"),
    ],
)
def test_a_setting_without_effect_is_an_error(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    ((kind, text),) = on_ranks(1, error_of, tmp_path / "run", **settings)
    assert kind == "ConfigError"
    assert said in text


def strangers(run_dir: Path) -> str:
    other = nn.Linear(2, 2)
    try:
        trainer_of(
            nn.Linear(2, 2),
            torch.optim.SGD(other.parameters(), lr=0.1),
            step_fn,
            [1],
            batch_size=1,
            max_steps=1,
            run_dir=run_dir,
        )
    except ConfigError as error:
        return str(error)
    return ""


def test_an_optimizer_of_another_model_is_an_error(tmp_path: Path) -> None:
    assert "the optimizer has no parameter of the model" in on_ranks(1, strangers, tmp_path)[0]


def test_the_attempt_of_a_plain_run_has_its_end(tmp_path: Path) -> None:
    on_ranks(1, finished_twice, tmp_path)
    attempts = json.loads((tmp_path / "run" / "world.json").read_text())["lives"]
    assert [attempt["status"] for attempt in attempts] == [0, 0]
    assert all(attempt["ended"] and attempt["outcome"].startswith("ended after step") for attempt in attempts)
