"""Fetching: random streams that belong to samples, errors that name them, workers of every start method."""

from __future__ import annotations

import multiprocessing
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from batches import all_of, flat, loaders, steps_of
from ranks import on_ranks
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from rankwise.data.fetch import Fetch


class Noise(Dataset[Any]):
    """Draws from every generator in every sample, as augmentation does."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index, "noise": noise()}


class AsksForEach(Noise):
    seed_each_sample = True


class AsksForEachInOne(AsksForEach):
    def __getitems__(self, indices: list[int]) -> Any:
        raise AssertionError("samples are taken one by one")


class InOne(Noise):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


def noise() -> torch.Tensor:
    """Three gaussians, two of them of generators that cache a second one."""
    return torch.tensor([torch.randn(()).item(), np.random.randn(), random.gauss(0, 1)], dtype=torch.float64)


def samples_of(dataset: Any, world_size: int, **settings: Any) -> dict[tuple[int, int], list[float]]:
    """(epoch, sample) -> what it drew."""
    drawn: dict[tuple[int, int], list[float]] = {}
    for loader in loaders(dataset, world_size, **{"max_epochs": 2, **settings}):
        for step, micro_batches in enumerate(loader):
            for batch in micro_batches:
                for index, values in zip(batch["x"].tolist(), batch["noise"].tolist(), strict=True):
                    drawn[step // loader.steps_per_epoch, index] = values  # type: ignore[operator]
    return drawn


@pytest.mark.parametrize("kind", [AsksForEach, AsksForEachInOne, lambda n: Subset(AsksForEach(n), range(n))])
def test_a_dataset_that_asks_has_the_same_augmented_samples_on_any_number_of_workers_and_ranks(kind: Any) -> None:
    expected = samples_of(kind(13), 1)
    assert len({tuple(values) for values in expected.values()}) == len(expected) == 26
    for world_size, accumulate, workers in ((2, 1, 0), (3, 2, 0), (1, 1, 1), (1, 1, 2), (3, 2, 2)):
        assert samples_of(kind(13), world_size, accumulate=accumulate, workers=workers) == expected
    assert samples_of(kind(13), 1, seed=1) != expected


def test_in_workers_samples_are_keyed_by_themselves_without_asking() -> None:
    expected = samples_of(AsksForEach(13), 1)
    assert samples_of(Noise(13), 2, workers=2) == expected
    assert samples_of(Subset(Noise(13), range(13)), 1, workers=1) == expected


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Noise, InOne, AsksForEach])
def test_a_resume_draws_what_would_have_been_drawn(kind: Any, workers: int) -> None:
    if kind is Noise and workers == 0:
        assert samples_of(kind(13), 1) != samples_of(kind(13), 3)  # by the batch's first sample: it depends on the batch

    def batches(loader: Any) -> list[Any]:
        return [[(b["x"].tolist(), b["noise"].tolist()) for b in step] for step in loader]

    (whole,) = loaders(kind(13), 1, workers=workers, max_epochs=2)
    expected = batches(whole)
    for stop in (1, 4):
        (first,) = loaders(kind(13), 1, workers=workers, max_epochs=2)
        got = [[(b["x"].tolist(), b["noise"].tolist()) for b in step] for step, _ in zip(first, range(stop), strict=False)]
        (second,) = loaders(kind(13), 1, workers=workers, max_epochs=2)
        second.load_state_dict({**first.state_dict(), "epoch": stop // 3, "position": stop % 3 * 5})
        assert got + batches(second) == expected


@pytest.mark.parametrize("kind", [Noise, InOne, AsksForEach])
def test_fetching_in_this_process_neither_moves_nor_sees_the_streams_of_training(kind: Any) -> None:
    def drawn(reads: bool, seed: int) -> tuple[list[float], list[Any]]:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        ours: list[float] = []
        theirs = []
        (loader,) = loaders(kind(23), 1)
        for step, batches in enumerate(loader if reads else [[]] * 5):
            theirs += [batch["noise"].tolist() for batch in batches]
            for _ in range(step % 3):  # with and without a cached second gaussian, and without a draw at all
                ours += noise().tolist()
        return ours, theirs

    read, fetched = drawn(True, 1)
    unread, _ = drawn(False, 1)
    assert read == unread
    assert drawn(True, 2)[1] == fetched


def count_keying(dataset: Any) -> int:
    fetch = Fetch(dataset, None, 0)
    before = torch.get_rng_state()
    calls = 0

    def key(*_: Any) -> None:
        nonlocal calls
        calls += 1

    fetch._key = key  # type: ignore[method-assign]
    next(fetch.here(iter([(0, [1, 2])])))
    assert torch.equal(torch.get_rng_state(), before)
    return calls


def test_a_dataset_that_draws_nothing_pays_nothing() -> None:
    class Quiet(Noise):
        draws_nothing = True

        def __getitem__(self, index: int) -> Any:
            return index

    assert count_keying(TensorDataset(torch.arange(5))) == 0
    assert count_keying(Quiet(5)) == 0
    assert count_keying(Noise(5)) == 1
    assert count_keying(AsksForEach(5)) == 3  # for the batch, as its collate function may draw, and each sample


# --- errors


class TwoArgumentsError(Exception):
    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


def with_a_lock() -> Exception:
    error = ValueError("with a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


ERRORS: dict[str, tuple[Any, str, str]] = {
    "OSError": (lambda: OSError(5, "Input/output error"), "OSError", "[Errno 5] Input/output error"),
    "KeyError": (lambda: KeyError("label"), "KeyError", "'label'"),
    "two arguments": (lambda: TwoArgumentsError("a.wav", "torn"), "TwoArgumentsError", "a.wav: torn"),
    "StopIteration": (lambda: StopIteration(), "RuntimeError", "StopIteration was raised in sample 11 of Broken"),
    "IndexError": (lambda: IndexError("out of range"), "IndexError", "out of range"),
}


class Broken(Noise):
    def __init__(self, samples: int, error: str) -> None:
        super().__init__(samples)
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 11:
            raise ERRORS[self.error][0]() if self.error in ERRORS else with_a_lock()
        return index


class BrokenInOne(Broken):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def broken_collate(samples: list[Any]) -> Any:
    raise RuntimeError("stack expects each tensor to be equal size")


def failure(kind: Any, error: str, workers: int, **settings: Any) -> tuple[str, str, str]:
    multiprocessing.set_start_method("fork", force=True)
    (loader,) = loaders(kind(23, error), 1, workers=workers, shuffle=False, **settings)
    try:
        steps_of(loader)
    except Exception as problem:
        return type(problem).__name__, str(problem), "\n".join(getattr(problem, "__notes__", []))
    return "", "", ""


def failures(workers: int) -> dict[str, tuple[str, str, str]]:
    told = {name: failure(Broken, name, workers) for name in ERRORS}
    told["unpicklable"] = failure(Broken, "with a lock", workers)
    told["in one"] = failure(BrokenInOne, "OSError", workers)
    told["collate"] = failure(Broken, "OSError", workers, collate_fn=broken_collate)
    told["collate of many"] = failure(Broken, "OSError", workers, collate_fn=broken_collate, global_batch_size=10)
    return told


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_dataset_raises_keeps_its_type_and_names_the_sample_and_the_dataset(workers: int) -> None:
    # In a process of its own: what a traceback holds of torch's loader takes 5 s to be collected.
    (told,) = on_ranks(1, failures, workers)
    for name, (_, kind, text) in ERRORS.items():
        assert told[name][:2] == (kind, text), name
        assert name == "StopIteration" or "in sample 11 of Broken" in told[name][2]
        assert ("raised in a loader worker:\nTraceback" in told[name][2]) == (workers > 0)
    kind, text, notes = told["unpicklable"]
    assert kind == ("DataError" if workers else "ValueError")
    assert "with a lock" in text
    assert "in sample 11 of Broken" in text + notes
    assert "in samples 10, 11, 12, 13, 14 of BrokenInOne" in told["in one"][2]
    assert told["collate"][:2] == ("RuntimeError", "stack expects each tensor to be equal size")
    assert "in the collate function, of samples 0, 1, 2, 3, 4 of Broken" in told["collate"][2]
    assert "of samples 0, 1, 2, 3, 4, 5, 6, 7 and 2 more of Broken" in told["collate of many"][2]


# --- hazards


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_of_one_sample(workers: int) -> None:
    for world_size in (1, 3):
        assert all_of([7], world_size, workers=workers, max_epochs=3) == [[7]] * 3


def spawned() -> tuple[dict[tuple[int, int], list[float]], list[int]]:
    multiprocessing.set_start_method("spawn", force=True)
    from test_stream import Shuffles

    # One each: a worker that is spawned imports torch. What several do is the same however they are started.
    return samples_of(AsksForEach(6), 1, workers=1, max_epochs=1), flat(all_of(Shuffles(13), 1, workers=1))


def test_workers_may_be_spawned() -> None:
    from test_stream import Shuffles

    ((noises, stream),) = on_ranks(1, spawned, timeout_s=240)
    assert noises == samples_of(AsksForEach(6), 1, max_epochs=1)
    assert stream == flat(all_of(Shuffles(13), 1))


def test_parts_of_a_random_split_are_datasets_like_any() -> None:
    first, second = random_split(AsksForEach(13), [9, 4], generator=torch.Generator().manual_seed(0))
    whole = samples_of(AsksForEach(13), 1)
    assert {index for _, index in samples_of(first, 2)} | {index for _, index in samples_of(second, 2)} == set(range(13))
    assert len(whole) == 26
