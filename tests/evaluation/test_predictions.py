"""Predictions: one per sample, in the order of the dataset, for any ranks, batches and order of evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ranks import RankError, on_ranks
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
from trainers import trainer_of

import rankwise
from rankwise.dist import comm
from rankwise.errors import ConfigError, StepError

SAMPLES = 29


def data(samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(samples), torch.arange(samples) * 0.5)


def all_kinds(model: Any, batch: Any) -> Any:
    k, half = batch
    assert not model.training
    assert not torch.is_grad_enabled()
    return {
        "tensor": torch.stack([k, half], 1),
        "array": half.numpy(),
        "words": [f"word {n}" for n in k.tolist()],
        "pair": (k, [torch.full((int(n) % 3,), int(n)) for n in k]),  # rows of different lengths
    }


def checked(answer: Any, samples: int) -> None:
    k, half = data(samples)[:]
    assert torch.equal(answer["tensor"], torch.stack([k, half], 1))
    assert np.array_equal(answer["array"], half.numpy())
    assert answer["words"] == [f"word {n}" for n in range(samples)]
    assert torch.equal(answer["pair"][0], k)
    assert [row.tolist() for row in answer["pair"][1]] == [[n] * (n % 3) for n in range(samples)]


LOADERS: dict[str, dict[str, Any]] = {
    "by count": {"global_batch_size": 4, "shuffle": False},
    "accumulated": {"global_batch_size": 7, "shuffle": False, "accumulate": 3},
    "shuffled": {"global_batch_size": 7},
    "by tokens": {"batches": rankwise.LengthBatches(global_tokens=40, lengths=lambda index: 1 + index % 11)},
    "without the last": {"global_batch_size": 7, "drop_last": True},
    "workers": {"global_batch_size": 7, "shuffle": False, "workers": 1},
}


def predicted(on: str) -> list[str]:
    """The loaders for which this rank got the result; the result is checked."""
    comm.init()
    answered = []
    model = nn.Linear(1, 1)
    for samples in (SAMPLES, 1):
        for name, settings in LOADERS.items():
            if samples < 7 and "drop_last" in settings:
                continue  # an error: it would drop all
            loader = rankwise.Loader(data(samples), max_epochs=1, **settings)
            answer = rankwise.predict(all_kinds, model, loader, on=on)
            assert model.training
            if answer is not None:
                checked(answer, samples)
                answered.append(name)
    return answered


@pytest.mark.parametrize(("n", "on"), [(1, "main"), (2, "all"), (3, "main")])
def test_predictions_come_in_the_order_of_the_dataset_each_once(n: int, on: str) -> None:
    for rank, answered in enumerate(on_ranks(n, predicted, on)):
        assert answered == (
            [*LOADERS, *(name for name in LOADERS if name != "without the last")] if rank == 0 or on == "all" else []
        )


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (torch.tensor([float(k)]) for k in range(SAMPLES))


def bit_by_bit(folder: Path, samples: int) -> list[int]:
    """The predictions in the order in which they come; how many a rank holds at a time."""
    world = comm.init()
    sizes = []

    def write(indices: list[int], rows: Any) -> None:
        sizes.append(len(indices))
        with (folder / "words.txt").open("a") as file:
            file.writelines(f"{k} {row:g}\n" for k, row in zip(indices, rows.tolist(), strict=True))

    loader = rankwise.Loader(data(samples), global_batch_size=4, shuffle=False, max_epochs=1)
    assert rankwise.predict(lambda model, batch: batch[1], nn.Identity(), loader, into=write) is None
    stream = rankwise.Loader(Stream(), global_batch_size=4, max_epochs=1)
    rows = rankwise.predict(lambda model, batch: batch[:, 0], nn.Identity(), stream)
    assert (rows is None) == (world.rank > 0)
    assert rows is None or rows.tolist() == list(range(SAMPLES))
    return sizes


def test_predictions_can_be_written_bit_by_bit_in_order(tmp_path: Path) -> None:
    sizes = on_ranks(3, bit_by_bit, tmp_path, 300)
    assert sizes == [[128, 128, 44], [], []]
    lines = (tmp_path / "words.txt").read_text().splitlines()
    assert lines == [f"{k} {k / 2:g}" for k in range(300)]


def failing(kind: str) -> None:
    comm.init()

    def full(indices: list[int], rows: Any) -> None:
        raise OSError(28, "No space left on device")

    functions = {
        "scalar": lambda model, batch: batch[0].sum(),
        "short": lambda model, batch: {"x": batch[0][:-1]},
        "uneven": lambda model, batch: torch.zeros(len(batch[0]), int(batch[0][0]) + 1),
        "full disk": lambda model, batch: batch[0],
    }
    loader = rankwise.Loader(data(SAMPLES), global_batch_size=8, shuffle=False, max_epochs=1)
    rankwise.predict(functions[kind], nn.Identity(), loader, into=full if kind == "full disk" else None)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "scalar",
            r"StepError: predict_fn returned a Tensor without rows for a batch of 4; return a tensor with one row per sample",
        ),
        ("short", r"StepError: predict_fn returned 3 rows in \['x'\] for a batch of 4"),
        (
            "uneven",
            r"StepError: predict_fn returned different shapes or types for different batches: .* a list, one per sample",
        ),
        ("full disk", r"OSError: \[Errno 28\] No space left on device"),
    ],
)
def test_what_cannot_be_put_together_is_an_error_on_every_rank(kind: str, text: str) -> None:
    with pytest.raises(RankError, match=text) as raised:
        on_ranks(2, failing, kind)
    assert "rank 0:" in str(raised.value)
    assert "rank 1:" in str(raised.value)


def test_where_predictions_are_wanted_is_checked() -> None:
    loader = rankwise.Loader(data(3), global_batch_size=2, max_epochs=1)
    with pytest.raises(ConfigError, match=r"^predict\(on='every'\): give one of 'main', 'all'$"):
        rankwise.predict(all_kinds, nn.Identity(), loader, on="every")
    with pytest.raises(ConfigError, match=r"into=\.\.\. is called only on rank 0"):
        rankwise.predict(all_kinds, nn.Identity(), loader, on="all", into=print)
    assert issubclass(StepError, rankwise.RankwiseError)


def test_arguments_in_another_order_are_an_error_that_has_the_order(tmp_path: Path) -> None:
    order = "the order of the arguments is"
    with pytest.raises(ConfigError, match=rf"^predict\(model=.*: give a torch.nn.Module; {order} predict_fn, model, loader$"):
        rankwise.predict(nn.Identity(), all_kinds, data(3))  # type: ignore[arg-type]
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = trainer_of(model, optimizer, all_kinds, data(3), global_batch_size=2, max_steps=1, run_dir=tmp_path)
    with pytest.raises(ConfigError, match=rf"^predict\(data=.*\): give a dataset; {order} data, predict_fn$"):
        trainer.predict(all_kinds, data(3))  # type: ignore[arg-type]


def by_a_trainer(run_dir: Path) -> tuple[Any, Any]:
    def step(model: Any, batch: Any) -> Any:
        return (model(batch[1][:, None]) ** 2).sum(), len(batch[0])

    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = trainer_of(model, optimizer, step, data(SAMPLES), global_batch_size=8, max_steps=3, run_dir=run_dir)
    trainer.fit()
    with torch.no_grad():
        expected = model(data(SAMPLES)[:][1][:, None])[:, 0]
    got = trainer.predict(data(SAMPLES), lambda model, batch: model(batch[1][:, None])[:, 0])
    return got if got is None else got.tolist(), expected.tolist()


def test_the_trainer_predicts_with_what_it_has_trained(tmp_path: Path) -> None:
    (main, expected), (other, _) = on_ranks(2, by_a_trainer, tmp_path)
    assert main == pytest.approx(expected)
    assert other is None


def test_predictions_are_copies_and_do_not_keep_what_they_are_a_view_of() -> None:
    comm.init()
    model, whole = nn.Identity(), torch.zeros(4, 1000)

    def first_column(_: Any, batch: Any) -> Any:
        whole[: len(batch[0]), 0] = batch[0].float()  # the same memory in each batch
        return whole[: len(batch[0]), 0]

    found = rankwise.predict(first_column, model, rankwise.Loader(data(8), global_batch_size=4, shuffle=False))
    assert found.tolist() == list(range(8))
    assert found.untyped_storage().nbytes() == 8 * 4


class Box(NamedTuple):
    corner: torch.Tensor


def in_dicts(model: Any, batch: Any) -> Any:
    """Writes each batch into the same memory, as rows of other kinds than tensors."""
    memory[: len(batch[0])] = batch[0][:, None]
    return [{"row": row[:3], "pair": (row[:1], [row[:2].numpy()]), "box": Box(row[:1]), "name": "x"} for row in memory][
        : len(batch[0])
    ]


memory = torch.zeros(4, 100_000)


def test_what_a_list_of_dicts_holds_is_copied_too() -> None:
    loader = rankwise.Loader(data(SAMPLES), global_batch_size=4, shuffle=False, max_epochs=1)
    rows = rankwise.predict(in_dicts, nn.Linear(1, 1), loader)
    assert [row["row"].tolist() for row in rows] == [[k] * 3 for k in range(SAMPLES)]
    assert [(row["pair"][0].item(), row["pair"][1][0].tolist(), row["box"].corner.item()) for row in rows] == [
        (k, [k, k], k) for k in range(SAMPLES)
    ]
    assert rows[0]["row"].untyped_storage().nbytes() == 12
    assert isinstance(rows[0]["box"], Box)
