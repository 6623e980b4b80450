"""Evaluation: any metric has the value of one process on any number of ranks."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from ranks import RankError, on_ranks
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
from trainers import trainer_of

import rankwise
from rankwise.actions import every
from rankwise.dist import comm
from rankwise.errors import ConfigError, StepError
from rankwise.evaluation import Evaluate, Metrics

CLASSES = 3
SIZES = (29, 2, 1)
"""The number of samples; the last two are fewer than the ranks."""


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, CLASSES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (samples,), generator=generator), torch.arange(samples))


def figures(samples: int, eval_fn: Callable[..., Any], metrics: Any, size: int = 7) -> dict[str, float]:
    comm.init()
    model = nn.Identity()
    evaluate = Evaluate(rankwise.Loader(data(samples), global_batch_size=size, shuffle=False), eval_fn, metrics=metrics)
    first = evaluate.figures(model)
    assert evaluate.figures(model) == first  # the second result contains nothing of the first
    return first


# --- sums and counts


class Reused:
    """What a user's function returns: the same tensors for each batch, overwritten, or new ones and numbers."""

    def __init__(self, dtype: torch.dtype, in_place: bool) -> None:
        self.dtype, self.in_place = dtype, in_place
        self.total: torch.Tensor | None = None  # created at the first batch

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        _, y, _ = batch
        if not self.in_place:
            return {"y": (float(y.sum()), len(y)), "mixed": (y.sum(), torch.tensor(len(y)) if len(y) % 2 else len(y))}
        self.total = torch.zeros((), dtype=self.dtype) if self.total is None else self.total
        self.total.copy_(y.sum())
        return {"y": (self.total, len(y)), "mixed": (self.total, torch.tensor(float(len(y))))}


def by_sums() -> list[dict[str, float]]:
    dtypes = (torch.float32, torch.float64, torch.int64)
    return [figures(n, Reused(dtype, in_place), None) for n in SIZES for dtype in dtypes for in_place in (True, False)]


@pytest.mark.parametrize("n", [1, 3])
def test_sums_may_be_numbers_or_tensors_that_the_next_batch_overwrites(n: int) -> None:
    means = [float(data(samples).tensors[1].double().mean()) for samples in SIZES for _ in range(6)]
    for found in on_ranks(n, by_sums):
        assert found == [pytest.approx({"eval_y": mean, "eval_mixed": mean}, abs=1e-12) for mean in means]


# --- objects of torchmetrics


def test_an_evaluation_of_any_length_keeps_the_values_of_few_batches() -> None:
    kept: list[int] = []

    def batches() -> Iterator[list[torch.Tensor]]:
        for number in range(4001):
            if number % 4000 == 0:
                kept.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
            yield [torch.tensor([float(number)])]

    evaluate = Evaluate(data(2), lambda _, x: {"loss": (x.sum(), 1), "acc": (2, torch.ones(())), "mixed": (number_of(x), 1)})
    assert evaluate.figures(nn.Linear(1, 1), batches=batches()) == {"eval_loss": 2000.0, "eval_acc": 2.0, "eval_mixed": 2000.0}
    assert kept[1] - kept[0] < 6 * 1024


def number_of(x: torch.Tensor) -> float | torch.Tensor:
    """A tensor for each second batch."""
    return x.sum() if x % 2 else x.item()


def made(names: tuple[str, ...]) -> dict[str, Any]:
    import torchmetrics

    several = {"task": "multiclass", "num_classes": CLASSES}
    every = {
        "f1": lambda: torchmetrics.F1Score(**several, average="macro"),
        "auroc": lambda: torchmetrics.AUROC(**several),  # lists of all scores
        "confusion": lambda: torchmetrics.ConfusionMatrix(**several),
        "pearson": lambda: torchmetrics.PearsonCorrCoef(),  # a state without a reduction: each rank has its own
        "spearman": lambda: torchmetrics.SpearmanCorrCoef(),
        "largest": lambda: torchmetrics.MaxMetric(),
        "perplexity": lambda: torchmetrics.text.Perplexity(),
        "wer": lambda: torchmetrics.text.WordErrorRate(),
        "each": lambda: torchmetrics.ClasswiseWrapper(torchmetrics.Accuracy(**several, average=None)),
        "some": lambda: torchmetrics.MetricCollection(
            {kind: getattr(torchmetrics, kind)(**several, average="macro") for kind in ("Precision", "Recall", "F1Score")}
        ),
    }
    return {name: every[name]() for name in names}


def tell(metrics: dict[str, Any], batch: Any) -> None:
    x, y, k = batch
    for name, metric in metrics.items():
        if name in ("pearson", "spearman"):
            metric.update(x[:, 0], x[:, 1] + 0.1 * k)
        elif name == "largest":
            metric.update(x)
        elif name == "perplexity":
            metric.update(x[:, None], y[:, None])
        elif name == "wer":
            metric.update([f"a word {n}" for n in k.tolist()], [f"a word {n}" for n in y.tolist()])
        else:
            metric.update(x.softmax(1), y)


def of_no_batch() -> dict[str, float]:
    evaluate = Evaluate(rankwise.Loader(data(9), global_batch_size=3), tell, metrics=made(("f1", "largest", "auroc")[:2]))
    return evaluate.figures(nn.Identity(), batches=[])


TOGETHER = ("f1", "auroc", "largest", "perplexity", "wer", "each", "some")


def by_torchmetrics() -> list[dict[str, float]]:
    answers = []
    for samples in SIZES:
        metrics = made(names_for(samples))
        answers.append(figures(samples, lambda model, batch, told=metrics: tell(told, batch), metrics))
    return answers


def names_for(samples: int) -> tuple[str, ...]:
    return (*TOGETHER, "pearson", "spearman") if samples > 3 else TOGETHER


def in_one_process(samples: int, names: tuple[str, ...]) -> dict[str, float]:
    """The values of torchmetrics, with all samples in one batch."""
    metrics = made(names)
    tell(metrics, data(samples)[:])
    expected: dict[str, float] = {}
    for name, metric in metrics.items():
        value = metric.compute()
        values = {f"_{key}": one for key, one in value.items()} if isinstance(value, dict) else {"": value}
        expected |= {f"eval_{name}{key}": float(one) for key, one in values.items()}
    return expected


def by_a_collection() -> dict[str, float]:
    collection = made(("some",))["some"]
    return figures(29, lambda model, batch: collection.update(batch[0].softmax(1), batch[1]), collection)


def by_an_object_that_would_wait() -> dict[str, float]:
    """It synchronises at each call, which hangs if ranks have different numbers of batches."""
    import torchmetrics

    accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES, dist_sync_on_step=True)

    def eval_fn(model: Any, batch: Any) -> None:
        accuracy(batch[0], batch[1])
        accuracy.compute()  # the value so far must not be the result at the end

    return figures(29, eval_fn, {"accuracy": accuracy}, size=4)


def by_all_of_them() -> tuple[list[dict[str, float]], dict[str, float], dict[str, float], dict[str, float]]:
    return by_torchmetrics(), by_a_collection(), by_an_object_that_would_wait(), of_no_batch()


def by_one_process_and_by_ranks() -> tuple[list[dict[str, float]], dict[str, float], Any, dict[int, list[Any]]]:
    """The values of torchmetrics; and ours of this process, and of the ranks that it forks: torchmetrics takes many seconds to
    import, and is imported once for all of them."""
    warnings.simplefilter("ignore")  # torchmetrics warns about lists that grow and classes without a sample
    expected = [in_one_process(samples, names_for(samples)) for samples in SIZES]
    some = {name.replace("some_", ""): value for name, value in in_one_process(29, ("some",)).items()}
    alone = by_all_of_them()
    ranks._CONTEXT = multiprocessing.get_context("fork")
    return expected, some, alone, {n: on_ranks(n, by_all_of_them) for n in (2, 3)}


@pytest.mark.stress  # it imports torchmetrics; how metric objects are merged: below
def test_metrics_of_torchmetrics_and_collections_are_those_of_one_process_and_none_waits_for_other_ranks() -> None:
    if importlib.util.find_spec("torchmetrics") is None:
        pytest.skip("torchmetrics is not installed (pip install torchmetrics)")
    [(expected, some, alone, by_ranks)] = on_ranks(1, by_one_process_and_by_ranks, timeout_s=600.0)
    assert alone[3]["eval_f1"] == 0.0  # of no batch: as of an object that was never updated
    x, y, _ = data(29)[:]
    right = (x.argmax(1) == y).float().mean().item()
    assert len(expected[0]) == 13
    assert len(some) == 3
    assert [len(answers) for answers in by_ranks.values()] == [2, 3]
    for answer, collection, waited, of_nothing in [alone, *by_ranks[2], *by_ranks[3]]:
        for got, wanted in zip(answer, expected, strict=True):
            assert got.keys() == wanted.keys()
            assert got == pytest.approx(wanted, rel=1e-5, nan_ok=True)
        assert collection == pytest.approx(some)
        assert waited == {"eval_accuracy": pytest.approx(right)}
        assert of_nothing == alone[3]


# --- other objects


class Words:
    """A set of words: the size of the set is not a sum over ranks."""

    def __init__(self) -> None:
        self.words: set[int] = set()

    def update(self, words: list[int]) -> None:
        self.words |= set(words)

    def compute(self) -> int:
        return len(self.words)

    def reset(self) -> None:
        self.words = set()


class Merged(Words):
    def merge_state(self, others: list[Merged]) -> None:
        for other in others:
            self.words |= other.words


class Moves(Merged):
    """It has a `to` of its own, which returns nothing."""

    def to(self, device: Any) -> None:
        self.device = device


class OneNumber(Merged):
    def compute(self) -> Any:
        return np.array([len(self.words)])


class Communicates(Words):
    def compute(self) -> int:
        return len(set().union(*rankwise.all_gather_object(self.words)))


class Raises(Merged):
    def compute(self) -> int:
        raise KeyError("no such word")


class Vector(Merged):
    def compute(self) -> Any:
        return torch.zeros(3)


def distinct(kind: type[Words], samples: int = 29) -> tuple[dict[str, float], list[int]]:
    words = kind()
    seen: list[int] = []

    def eval_fn(model: Any, batch: Any) -> dict[str, Any]:
        seen.extend(batch[2].tolist())
        words.update((batch[2] % 5).tolist())
        return {"number": (batch[2].sum(), len(batch[2]))}

    return figures(samples, eval_fn, {"words": words}), seen


@pytest.mark.parametrize("kind", [Merged, Moves, Communicates, OneNumber])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.one_in(2)
def test_an_object_of_ones_own_is_merged_or_communicates_itself(kind: type[Words], n: int) -> None:
    for samples in SIZES:
        answers = on_ranks(n, distinct, kind, samples)
        for figures, _ in answers:
            assert figures == {"eval_words": min(samples, 5), "eval_number": pytest.approx((samples - 1) / 2)}
        assert sorted(k for _, seen in answers for k in seen) == sorted([*range(samples)] * 2)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Words, r"compute\(\) of 'words' gave .* on rank 0 and .*merge_state\(others\)"),
        (Raises, "KeyError: 'no such word'"),
        (Vector, r"compute\(\) of 'words' returned Tensor of shape \(3,\); a metric is one number"),
    ],
)
def test_a_metric_that_cannot_be_told_is_an_error_on_every_rank(kind: type[Words], text: str) -> None:
    samples = 1 if kind is not Vector else 29  # with 1 the main rank has none
    with pytest.raises(RankError, match=text) as raised:
        on_ranks(2, distinct, kind, samples)
    assert str(raised.value).count("Traceback (most recent call last)") >= 2


def test_what_is_no_metric_object_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'f1' \(function\) has no update and no compute and no reset"):
        Metrics({"f1": tell})
    with pytest.raises(ConfigError, match=r'give metric objects by name: \{"f1": f1\}'):
        Metrics([Merged()])
    with pytest.raises(ConfigError, match=r"'f1' is the class Merged; create an object: Merged\(\.\.\.\)"):
        Metrics({"f1": Merged})


def test_two_figures_of_one_name_are_an_error() -> None:
    with pytest.raises(StepError, match="two metrics have the name 'x'"):
        figures(3, lambda model, batch: {"x": (1.0, 1)}, {"x": Merged()})
    with pytest.raises(StepError, match="the function of Evaluate returned NoneType"):
        figures(3, lambda model, batch: None, None)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "NoneType for 'x', which is not a number"),
        ("3", "str for 'x', which is not a number"),
        (1j, "complex for 'x', which is not a number"),
        (np.arange(2), "ndarray for 'x', which is not a number"),
        (torch.tensor(1j), "a complex number for 'x'"),
    ],
)
def test_what_is_not_one_real_number_is_an_error_at_the_first_batch(value: Any, said: str) -> None:
    calls: list[int] = []

    def fn(model: Any, batch: Any) -> Any:
        calls.append(1)
        return {"x": (value, 1)}

    with pytest.raises(StepError, match=f"the function of Evaluate returned {said}; return a mapping of pairs"):
        figures(29, fn, None)
    assert calls == [1]


def test_numbers_of_numpy_are_numbers() -> None:
    assert figures(3, lambda model, batch: {"x": (np.float32(2.5), np.array(2)), "y": (np.bool_(True), 1)}, None) == {
        "eval_x": 1.25, "eval_y": 1.0,
    }  # fmt: skip


class OfRank(IterableDataset[Any]):
    """Rank r has 3 + r samples."""

    split_by_rank = True

    def __iter__(self) -> Any:
        yield from (torch.tensor(10 * comm.rank() + k) for k in range(3 + comm.rank()))


def seen_on_all_ranks(split: bool) -> list[int]:
    comm.init()
    dataset, settings = (OfRank(), {"uneven": "pad"}) if split else (data(29), {"drop_last": True})
    seen: list[int] = []

    def fn(model: Any, batch: Any) -> Any:
        numbers = batch if split else batch[2]
        seen.extend(numbers.tolist())
        return {"n": (len(numbers), 1)}

    Evaluate(rankwise.Loader(dataset, global_batch_size=4, **settings), fn).figures(nn.Identity())
    return sorted(n for numbers in comm.all_gather_object(seen) for n in numbers)


@pytest.mark.parametrize("n", [1, 2])
def test_an_evaluation_sees_each_sample_once_also_where_the_training_drops_and_repeats(n: int) -> None:
    assert on_ranks(n, seen_on_all_ranks, False) == [list(range(29))] * n
    assert on_ranks(n, seen_on_all_ranks, True) == [[0, 1, 2, 10, 11, 12, 13][: 3 + 4 * (n - 1)]] * n


def test_a_count_may_be_a_tensor_of_one_number_and_of_no_more() -> None:
    comm.init()
    assert figures(29, lambda model, batch: {"x": (batch[2].sum(), torch.tensor([len(batch[2])]))}, None) == {"eval_x": 14}
    with pytest.raises(StepError, match=r"the function of Evaluate returned a tensor of shape \(7,\) for 'x'; return"):
        figures(29, lambda model, batch: {"x": (batch[2], 7)}, None)


# --- in a Trainer


def trained(run_dir: Path) -> tuple[dict[str, float], list[str]]:
    words = Merged()

    def step_fn(model: Any, batch: Any) -> Any:
        return (model(batch[0]) ** 2).sum(), len(batch[0])

    model = nn.Linear(CLASSES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = trainer_of(
        model, optimizer, step_fn, data(29), global_batch_size=7, max_steps=2, eval_data=data(4), run_dir=run_dir,
        eval_fn=lambda model, batch: words.update(batch[2].tolist()), eval_metrics={"words": words}, keep_best="eval_words",
        larger_is_better=True,
    )  # fmt: skip
    state = trainer.fit()
    return state.metrics, [path.name for path in (run_dir / "checkpoints").iterdir()]


def test_the_trainer_evaluates_metric_objects_and_can_keep_the_best_by_one(tmp_path: Path) -> None:
    for metrics, names in on_ranks(2, trained, tmp_path):
        assert metrics["eval_words"] == 4
        assert names == ["step-00000002"]


def test_metric_objects_that_nobody_updates_are_an_error() -> None:
    with pytest.raises(ConfigError, match="needs a function that updates them: fn="):
        Evaluate(data(4), metrics={"words": Merged()})


def test_every_decides_when_an_evaluation_inside_it_is_due(tmp_path: Path) -> None:
    model = nn.Linear(CLASSES, 1)
    steps: list[int] = []
    evaluate = Evaluate(data(4), lambda model, batch: {"k": (batch[2].sum(), len(batch[2]))})
    trainer_of(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: ((model(batch[0]) ** 2).sum(), len(batch[0])),
        data(29), global_batch_size=7, max_steps=6, run_dir=tmp_path,
        actions=[every(evaluate, steps=2), lambda state: steps.append(state.step) if "eval_k" in state.new_metrics else None],
    ).fit()  # fmt: skip
    assert steps == [2, 4, 6]
