"""The Trainer on iterable datasets: the same as with a map-style dataset, but the length is unknown."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankError, on_ranks
from torch import nn
from torch.utils.data import IterableDataset
from trainers import trainer_of

import rankwise
from rankwise.checks.trainer import findings_of
from rankwise.data.order import share


class Stream(IterableDataset[Any]):
    """Pairs with y = 3 x."""

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
    settings = {"global_batch_size": 5, "eval_data": Stream(7), "every_s": 1e9, **settings}
    names = ("global_batch_size", "num_workers", "uneven", "drop_last")
    loader = rankwise.Loader(data, **{name: settings.pop(name) for name in names if name in settings})
    with contextlib.redirect_stdout(io.StringIO()) as said:
        state = trainer_of(model, optimizer, step, loader, run_dir=run_dir, **settings).fit()
    return [p.item() for p in model.parameters()], state.metrics, state.step, said.getvalue()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.one_in(2)
def test_a_stream_trains_to_the_same_model_on_any_number_of_ranks(workers: int, tmp_path: Path) -> None:
    ((alone, metrics, steps, said),) = on_ranks(1, fitted, Stream(13), tmp_path / "1", max_epochs=2)
    assert steps == 6
    assert "a stream of unknown length, in its own order\n" in said
    for n in (2, 3):
        for parameters, others, number, _ in on_ranks(
            n, fitted, Stream(13), tmp_path / f"{n}", max_epochs=2, num_workers=workers
        ):
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
    assert "a stream of 13 samples (its __len__),\n  3 steps per epoch, in its own order\n" in said


# --- a different stream on each rank

LENGTHS = (5, 13, 9)


class OfRank(Stream):
    """Pairs with y = 3 x, different on each rank, and not equally many."""

    split_by_rank = True

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        yield from own_pairs(rankwise.rank())


def own_pairs(rank: int) -> list[Any]:
    return [(torch.tensor([k + rank / 4]), torch.tensor([3 * k + rank])) for k in map(float, range(LENGTHS[rank]))]


def plain_loop(ranks: int, policy: str, epochs: int) -> tuple[list[float], int]:
    """Each step over the samples that all ranks have in it, in the simplest way. (parameters, steps)."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = [high - low for low, high in (share(0, 5, rank, ranks) for rank in range(ranks))]
    steps = 0
    for _ in range(epochs):
        for start in range(20):
            shares = [own_pairs(rank)[start * size : (start + 1) * size] for rank, size in enumerate(sizes)]
            if not (any if policy == "join" else all)(shares):
                break
            x, y = (torch.stack(column) for column in zip(*[pair for part in shares for pair in part], strict=True))
            loss, count = step(model, (x, y))
            optimizer.zero_grad()
            (loss / count).backward()
            optimizer.step()
            steps += 1
    return [p.item() for p in model.parameters()], steps


def fitted_by(run_dir: Path, policy: str, max_epochs: int, max_steps: int | None = None) -> Any:
    return fitted(
        OfRank(), run_dir, eval_data=OfRank(), uneven=policy, max_epochs=max_epochs, max_steps=max_steps, log_every=1,
        eval_fn=lambda model, batch: {"x": (batch[0].sum(), len(batch[0]))},
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["join", "stop"])
@pytest.mark.one_in(2)
def test_uneven_streams_train_as_one_process_on_what_all_ranks_have_in_a_step(policy: str, tmp_path: Path) -> None:
    for n in (1, 2, 3):
        expected, steps = plain_loop(n, policy, 2)
        every = [pair[0].item() for rank in range(n) for pair in own_pairs(rank)]
        answers = on_ranks(n, fitted_by, tmp_path / f"{n}", policy, 2)
        on_main = answers[0][3]
        for parameters, metrics, number, _ in answers:
            assert number == steps
            assert parameters == pytest.approx(expected, rel=1e-5)
            assert metrics["eval_x"] == pytest.approx(sum(every) / len(every))  # all samples, with any policy
        assert f"a separate stream on each rank (uneven: {policy})\n" in on_main


def stopped_and_resumed_by(run_dir: Path, policy: str) -> tuple[list[float], int]:
    fitted_by(run_dir, policy, 3, max_steps=4)
    parameters, _, steps, _ = fitted_by(run_dir, policy, 3)
    return parameters, steps


@pytest.mark.parametrize("policy", ["join", "pad"])
@pytest.mark.one_in(2)
def test_uneven_streams_go_on_in_the_middle_of_an_epoch_as_if_they_had_not_stopped(policy: str, tmp_path: Path) -> None:
    resumed = on_ranks(3, stopped_and_resumed_by, tmp_path / "a", policy)
    unbroken_runs = on_ranks(3, fitted_by, tmp_path / "b", policy, 3)
    for (got, steps), (unbroken, _, number, _) in zip(resumed, unbroken_runs, strict=True):
        assert steps == number > 12
        assert got == unbroken


def of_the_selftest(run_dir: Path) -> list[tuple[str, str, str]]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = trainer_of(
        model, optimizer, step, OfRank(), global_batch_size=5, max_epochs=1, run_dir=run_dir, eval_data=OfRank()
    )
    return [(f.check, f.status, f.evidence) for f in findings_of(trainer)]


def test_the_selftest_says_what_it_cannot_see_in_streams_of_each_ranks_own(tmp_path: Path) -> None:
    for findings in on_ranks(3, of_the_selftest, tmp_path):
        assert not [f for f in findings if f[1] == "FAILED"]
        cannot = [check for check, status, evidence in findings if "its own stream" in evidence]
        assert cannot == ["samples", "gradients", "evaluation"]


def predicted(run_dir: Path) -> Any:
    loader = rankwise.Loader(OfRank(), global_batch_size=5, max_epochs=1)
    return rankwise.predict(lambda model, batch: batch[0], nn.Linear(1, 1), loader)


def test_predictions_of_streams_of_each_ranks_own_have_no_order(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"ConfigError: predict\(\) needs one order of all samples"):
        on_ranks(2, predicted, tmp_path)
