"""The Trainer with batches by length, and with those of a batch sampler: the same training on any number of ranks."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.utils.data import BatchSampler, Dataset, RandomSampler
from trainers import trainer_of

import rankwise
from rankwise.checks.trainer import findings_of
from rankwise.data import LengthBatches
from rankwise.dist import comm
from rankwise.errors import ConfigError

SAMPLES = 61
LENGTHS = np.random.default_rng(5).integers(1, 30, SAMPLES)


class Sequences(Dataset[Any]):
    """Of different lengths; y is the sum of each three features."""

    lengths = LENGTHS

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(int(LENGTHS[index]), 3, generator=generator, dtype=torch.float64)


def padded(samples: list[torch.Tensor]) -> Any:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True), torch.tensor([len(s) for s in samples])


def step(model: nn.Module, batch: Any) -> Any:
    """Over the tokens that are not padding."""
    x, lengths = batch
    real = torch.arange(x.shape[1])[None] < lengths[:, None]
    loss = (model(x)[..., 0] - x.sum(-1)) ** 2
    return (loss * real).sum(), int(lengths.sum())


def batches(way: str) -> LengthBatches | BatchSampler:
    if way == "sampler":
        return BatchSampler(RandomSampler(range(SAMPLES)), 7, drop_last=False)
    return LengthBatches(global_tokens=120, max_samples=6 if way == "tokens and samples" else None)


WAYS = ("tokens", "tokens and samples", "sampler")


def made(folder: Path, way: str, max_steps: int, accumulate: int = 1) -> rankwise.Trainer:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return trainer_of(
        model, optimizer, step, rankwise.Loader(Sequences(), batches=batches(way), collate_fn=padded, accumulate=accumulate),
        max_steps=max_steps, eval_data=Sequences(), eval_every=max_steps, run_dir=folder, every_s=1e9,
    )  # fmt: skip


def fitted(folder: Path, way: str, max_steps: int, accumulate: int = 1) -> tuple[list[float], dict[str, float], str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        state = made(folder, way, max_steps, accumulate).fit()
    return torch.cat([p.detach().flatten() for p in state.model.parameters()]).tolist(), state.metrics, said.getvalue()


def all_fitted(folder: Path, accumulate: int) -> dict[str, Any]:
    return {way: fitted(folder / f"{comm.world_size()}-{accumulate}-{way}", way, 14, accumulate) for way in WAYS}


def test_batches_of_uneven_length_train_to_the_same_model_on_any_number_of_ranks(tmp_path: Path) -> None:
    expected = on_ranks(1, all_fitted, tmp_path, 1)[0]
    assert "global batch 120 tokens (about 8 samples, 61 sorted together)\n" in expected["tokens"][2]
    for n, accumulate in ((1, 3), (2, 1), (3, 2)):
        for answer in on_ranks(n, all_fitted, tmp_path, accumulate):
            for way, (parameters, metrics, _) in answer.items():
                assert parameters == pytest.approx(expected[way][0], abs=1e-10), (way, n)
                assert metrics["eval_loss"] == pytest.approx(expected[way][1]["eval_loss"], rel=1e-8)


def stopped(folder: Path) -> None:
    for way in WAYS:
        fitted(folder / way, way, 5)


def resumed(folder: Path) -> dict[str, Any]:
    return {way: fitted(folder / way, way, 14) for way in WAYS}


def test_a_run_by_length_goes_on_in_the_middle_of_an_epoch_on_another_number_of_ranks(tmp_path: Path) -> None:
    expected = on_ranks(1, all_fitted, tmp_path, 1)[0]
    on_ranks(3, stopped, tmp_path)
    for answer in on_ranks(2, resumed, tmp_path):
        for way, (parameters, _, _) in answer.items():
            assert parameters == pytest.approx(expected[way][0], abs=1e-10), way


def of_the_selftest(folder: Path) -> dict[str, list[tuple[str, str, str]]]:
    return {way: [(f.check, f.status, f.evidence) for f in findings_of(made(folder / way, way, 3))] for way in WAYS}


@pytest.mark.stress
def test_the_selftest_finds_nothing_wrong_with_batches_of_uneven_length(tmp_path: Path) -> None:
    for findings in on_ranks(2, of_the_selftest, tmp_path):
        for way, found in findings.items():
            assert len(found) > 5
            assert not [f for f in found if f[1] == "FAILED"], way


def test_a_batch_is_given_in_one_way(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = rankwise.Loader(Sequences(), batch_size=2, max_epochs=4)
    for given, settings, text in (
        (Sequences(), {}, "give batch_size"),
        (
            loader,
            {"batch_size": 2},
            r"Trainer\(batch_size=2\), but the Loader decides this: give batch_size to the Loader only",
        ),
        (loader, {"accumulate": 1}, r"Trainer\(accumulate=1\), but the Loader decides this"),
        (loader, {"max_epochs": 1}, r"Trainer\(max_epochs=1\) and Loader\(max_epochs=4\) say the same"),
    ):
        with pytest.raises(ConfigError, match=text):
            trainer_of(model, optimizer, step, given, max_steps=1, run_dir=tmp_path, **settings)  # type: ignore[arg-type]


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shuffle is True": ({}, {"shuffle": False}),
    "split is None": ({}, {"split": "files"}),
    "global_batch_size is 8 on rank 0 and None on rank 1": ({}, {"global_batch_size": None, "batches": [[0, 1, 2], [3, 4]]}),
    "the sum of the indices of the first batch is 3 on": (
        {"global_batch_size": None, "batches": [[0, 1, 2], [3, 4]]},
        {"global_batch_size": None, "batches": [[3, 4], [0, 1, 2]]},
    ),
    "pool is 30": (
        {"global_batch_size": None, "batches": LengthBatches(global_tokens=120, pool=30)},
        {"global_batch_size": None, "batches": LengthBatches(global_tokens=120, pool=31)},
    ),
    "the sum of lengths is": (
        {"global_batch_size": None, "batches": LengthBatches(global_tokens=120)},
        {"global_batch_size": None, "batches": LengthBatches(global_tokens=120, lengths=LENGTHS + 1)},
    ),
}  # fmt: skip


def trainers_with_other_settings(folder: Path) -> dict[str, str]:
    """What the constructor raised."""
    found = {}
    for name, settings in OTHERS.items():
        model = nn.Linear(3, 1).double()
        loader = rankwise.Loader(Sequences(), collate_fn=padded, **{"global_batch_size": 8, **settings[comm.rank()]})
        try:
            rankwise.Trainer(
                model, torch.optim.SGD(model.parameters(), lr=0.1), step, loader, max_steps=1, run_dir=folder / "run"
            )
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_ranks_that_cut_or_order_their_data_in_other_ways_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    for found in on_ranks(2, trainers_with_other_settings, tmp_path):
        assert found.keys() == OTHERS.keys()
        for name, text in found.items():
            assert text.startswith(f"the ranks have different settings: {name}"), text
