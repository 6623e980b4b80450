"""The Trainer on iterable datasets: as on the same samples in a map, but for a length that nobody knows."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.utils.data import IterableDataset

import rankwise


class Stream(IterableDataset[Any]):
    """Pairs of which y = 3 x."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for k in range(self.samples):
            yield torch.tensor([float(k)]), torch.tensor([3.0 * k])


class Hinted(Stream):
    def __len__(self) -> int:
        return self.samples


def step(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    return ((model(x / 10) - y / 10) ** 2).sum(), len(x)


def fitted(data: Any, run_dir: Path, **settings: Any) -> tuple[list[float], dict[str, float], int, str]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"global_batch_size": 5, "eval_data": Stream(7), "save_every_s": 1e9, **settings}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        state = rankwise.Trainer(model, optimizer, step, data, run_dir=run_dir, **settings).fit()
    return [p.item() for p in model.parameters()], state.metrics, state.step, said.getvalue()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_trains_to_the_same_model_on_any_number_of_ranks(workers: int, tmp_path: Path) -> None:
    ((alone, metrics, steps, said),) = on_ranks(1, fitted, Stream(13), tmp_path / "1", max_epochs=2)
    assert steps == 6
    assert "a stream of unknown length, in its own order\n" in said
    for n in (2, 3):
        for parameters, others, number, _ in on_ranks(n, fitted, Stream(13), tmp_path / f"{n}", max_epochs=2, workers=workers):
            assert number == 6
            assert parameters == pytest.approx(alone, rel=1e-5)
            assert others == pytest.approx(metrics, rel=1e-4)


def test_the_evaluation_of_a_stream_is_over_each_sample_once(tmp_path: Path) -> None:
    def count(model: nn.Module, batch: Any) -> Any:
        return {"x": (batch[0].sum(), len(batch[0]))}

    pairs = [(torch.tensor([float(k)]), 0) for k in range(7)]
    for name, eval_data in (("stream", Stream(7)), ("map", pairs)):
        _, metrics, _, _ = fitted(Stream(13), tmp_path / name, max_epochs=1, eval_data=eval_data, eval_fn=count)
        assert metrics["eval_x"] == 3.0


def stopped_and_resumed(run_dir: Path) -> tuple[list[float], int]:
    fitted(Stream(13), run_dir, max_steps=4)
    parameters, _, steps, _ = fitted(Stream(13), run_dir, max_epochs=3)
    return parameters, steps


def test_a_stream_goes_on_in_the_middle_of_an_epoch_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    resumed = on_ranks(2, stopped_and_resumed, tmp_path / "a")
    unbroken_runs = on_ranks(2, fitted, Stream(13), tmp_path / "b", max_epochs=3)
    for (got, steps), (unbroken, _, number, _) in zip(resumed, unbroken_runs, strict=True):
        assert steps == number == 9
        assert got == unbroken


def test_max_steps_ends_a_stream_of_unknown_length_and_what_a_stream_says_is_the_total(tmp_path: Path) -> None:
    _, _, steps, _ = fitted(Stream(13), tmp_path / "a", max_steps=7)
    assert steps == 7
    _, _, steps, said = fitted(Hinted(13), tmp_path / "b", max_epochs=1)
    assert steps == 3
    assert "a stream of 13 samples (its __len__), 3 steps an epoch, in its own order\n" in said
