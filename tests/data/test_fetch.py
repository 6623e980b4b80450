"""Fetching: random streams that belong to samples, errors that name them, workers of every start method."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from batches import all_of, flat, loaders, steps_of
from ranks import on_ranks
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, random_split

from rankwise.data.fetch import Fetch, collate
from rankwise.dist import generator_memory
from rankwise.dist import seed as seeds


class Noise(Dataset[Any]):
    """Draws from every generator in every sample, like augmentation."""

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


class Still(Noise):
    draws_nothing = True

    def __getitem__(self, index: int) -> Any:
        return {"x": index, "noise": torch.zeros(3, dtype=torch.float64)}

    def read_batch(self, indices: Any) -> Any:
        return default_collate([self[index] for index in indices.tolist()])


class Augmented(Dataset[Any]):
    """As a user wraps a dataset, here one that draws nothing."""

    def __init__(self, samples: int) -> None:
        self.dataset = Still(samples)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.dataset[index], "noise": noise()}


class Delegates(Augmented):
    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)


class InOne(Noise):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


def noise() -> torch.Tensor:
    """Three gaussians, two of them from generators that cache a second one."""
    return torch.tensor([torch.randn(()).item(), np.random.randn(), random.gauss(0, 1)], dtype=torch.float64)


def samples_of(dataset: Any, world_size: int, **settings: Any) -> dict[tuple[int, int], list[float]]:
    """(epoch, sample) -> what the sample drew."""
    drawn: dict[tuple[int, int], list[float]] = {}
    for loader in loaders(dataset, world_size, **{"max_epochs": 2, **settings}):
        for step, micro_batches in enumerate(loader):
            for batch in micro_batches:
                for index, values in zip(batch["x"].tolist(), batch["noise"].tolist(), strict=True):
                    drawn[step // loader.steps_per_epoch, index] = values  # type: ignore[operator]
    return drawn


class Sometimes(Noise):
    """Draws only in a few samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index, "noise": noise() if index % 5 == 3 else torch.full((3,), float(index), dtype=torch.float64)}


class Never(Noise):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index, "noise": torch.full((3,), float(index), dtype=torch.float64)}


@pytest.mark.parametrize(
    "kind",
    [
        Noise, Sometimes, lambda n: Subset(Noise(n), range(n)), AsksForEachInOne, lambda n: Subset(AsksForEach(n), range(n)),
        Augmented, Delegates,
    ],
)  # fmt: skip
@pytest.mark.one_in(2)
def test_augmented_samples_are_the_same_on_any_number_of_workers_and_ranks(kind: Any) -> None:
    expected = samples_of(kind(13), 1)
    assert len(expected) == 26
    assert len({tuple(values) for values in expected.values()}) == (13 + 2 if kind is Sometimes else 26)
    for world_size, accumulate, workers in ((2, 1, 0), (3, 2, 0), (1, 1, 1), (1, 1, 2), (3, 2, 2)):
        assert samples_of(kind(13), world_size, accumulate=accumulate, workers=workers) == expected
    assert samples_of(kind(13), 1, seed=1) != expected


def test_a_sample_has_the_numbers_of_its_key_whether_or_not_others_draw() -> None:
    expected = samples_of(Noise(13), 1)
    for order in (False, True):
        for workers in (0, 1):
            drawn = samples_of(Sometimes(13), 1, shuffle=order, workers=workers)
            assert {key: values for key, values in drawn.items() if key[1] % 5 == 3} == {
                key: values for key, values in expected.items() if key[1] % 5 == 3
            }


def test_samples_are_taken_twice_once_in_a_run_where_the_first_of_them_draws_late() -> None:
    class Counts(Sometimes):
        taken: ClassVar[list[int]] = []

        def __getitem__(self, index: int) -> dict[str, Any]:
            self.taken.append(index)
            return super().__getitem__(index)

    (loader,) = loaders(Counts(13), 1, shuffle=False, max_epochs=2, global_batch_size=2)
    steps_of(loader)
    assert Counts.taken == [0, 1, 2, 3, 2, 3, *range(4, 13), *range(13)]


class LateMasks:
    """A collate function that changes its samples, and draws from the fourth batch on."""

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        x = torch.tensor([sample.pop("x") for sample in samples])
        mask = noise() if x.max() >= 8 else torch.zeros(3)
        return {"x": x, "noise": torch.stack([sample.pop("noise") + mask for sample in samples])}


@pytest.mark.parametrize("kind", [Never, Sometimes, Noise])
def test_what_a_collate_function_draws_does_not_depend_on_the_workers(kind: Any) -> None:
    def drawn(workers: int) -> Any:
        return samples_of(kind(13), 1, workers=workers, collate_fn=LateMasks(), shuffle=False, global_batch_size=3)

    expected = drawn(0)
    assert drawn(1) == drawn(2) == expected
    masked, plain = expected[0, 9], samples_of(kind(13), 1)[0, 9]
    assert not np.isclose(masked, plain).any()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", [Never, Sometimes, Noise])
def test_torchs_initial_seed_is_that_of_the_training_in_every_batch(
    kind: Any, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset that uses torch.initial_seed() gets the same numbers in the first batch after a resume."""

    class Reads(kind):  # type: ignore[misc]  # mypy takes no variable for a base class
        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "seed": torch.initial_seed()}

    def drawn(position: int) -> list[Any]:
        torch.manual_seed(9)
        (loader,) = loaders(Reads(13), 1, global_batch_size=2)
        loader.load_state_dict({**loader.state_dict(), "position": position})
        return [(b["seed"].tolist(), b["noise"].tolist()) for step in loader for b in step]

    if not known:
        monkeypatch.setattr(generator_memory, "of_torch", lambda: None)
    whole = drawn(0)
    assert {seed for seeds, _ in whole for seed in seeds} == {9}
    assert drawn(6) == whole[3:]
    assert torch.initial_seed() == 9


def test_what_a_sample_raises_after_it_drew_is_what_its_own_numbers_raise() -> None:
    class Unlucky(Noise):
        def __getitem__(self, index: int) -> Any:
            if index == 7:
                raise ValueError(f"{random.random()}")
            return index

    def told(**settings: Any) -> str:
        (loader,) = loaders(Unlucky(13), 1, shuffle=False, **settings)
        with pytest.raises(ValueError, match="0") as error:
            steps_of(loader)
        return str(error.value)

    assert told(global_batch_size=2) == told(global_batch_size=8) == told(global_batch_size=1)


_BATCH, _SAMPLE = 0.9593473387337654, -5.250219510861126
EARLIER = {
    ("Noise", 0): _BATCH, ("Noise", 1): _SAMPLE, ("InOne", 0): _BATCH, ("InOne", 1): _BATCH, ("AsksForEach", 0): _SAMPLE,
    ("AsksForEach", 1): _SAMPLE,
}  # fmt: skip
"""By the dataset and the number of workers: the sum of what the second batch of such a run drew (commit 45edb4f)."""


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Noise, InOne, AsksForEach])
def test_a_run_that_began_when_batches_had_the_key_goes_on_with_it(kind: Any, workers: int) -> None:
    (loader,) = loaders(kind(13), 1, workers=workers)
    state = loader.state_dict()
    assert state.pop("keyed by sample")
    loader.load_state_dict({**state, "position": 5})
    assert [batch["noise"].sum().item() for batch in next(iter(loader))] == [EARLIER[kind.__name__, workers]]
    assert loader.state_dict()["keyed by sample"] is False


def test_in_such_a_run_a_sample_that_is_twice_in_a_batch_draws_on() -> None:
    (loader,) = loaders(Noise(13), 1, global_batch_size=None, batches=[[3, 3, 1]])
    state = loader.state_dict()
    assert state.pop("keyed by sample")
    loader.load_state_dict(state)
    [[batch]] = loader
    assert not torch.equal(batch["noise"][0], batch["noise"][1])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Noise, InOne, AsksForEach])
def test_a_resume_draws_what_would_have_been_drawn(kind: Any, workers: int) -> None:
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
            for _ in range(step % 3):  # with and without a cached second gaussian, and without any draw
                ours += noise().tolist()
        return ours, theirs

    read, fetched = drawn(True, 1)
    unread, _ = drawn(False, 1)
    assert read == unread
    assert drawn(True, 2)[1] == fetched


def keys(dataset: Any, monkeypatch: pytest.MonkeyPatch, collate_fn: Any = None) -> list[int]:
    """The number of keys for each of three batches of two samples."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(seeds, "key_streams", lambda *a, given=seeds.key_streams: (found.append(a[0]), given(*a)))
        fetch, before = Fetch(dataset, collate_fn, 0), torch.get_rng_state()
        counts = []
        for _ in map(fetch.here, [(0, np.array([1, 2])), (0, np.array([3, 4])), (1, np.array([0, 1]))]):
            counts.append(len(found))
            found.clear()
    assert torch.equal(torch.get_rng_state(), before)
    return counts


def test_who_draws_nothing_has_no_key_after_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quiet(Never):
        draws_nothing = True

    for dataset in (TensorDataset(torch.arange(5)), [1, 2, 3, 4, 5], Subset([1, 2, 3, 4, 5], range(5)), Quiet(5)):
        assert keys(dataset, monkeypatch) == [0, 0, 0]
    assert keys(Never(5), monkeypatch) == [2, 0, 0]
    assert keys(Noise(5), monkeypatch) == keys(AsksForEachInOne(5), monkeypatch) == [2, 2, 2]
    assert keys(InOne(5), monkeypatch) == [1, 1, 1]
    assert keys(Quiet(5), monkeypatch, lambda samples: samples) == [1, 0, 0]
    assert keys(Quiet(5), monkeypatch, lambda samples: noise()) == [1, 1, 1]


# --- collating


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and one.layout == other.layout and torch.equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    return bool(type(one) is type(other) and one == other)


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.ones(3), torch.tensor(1)), (torch.zeros(3), torch.tensor(2))],
        [(torch.ones(3, 2).T, torch.tensor(True))] * 3,
        [(torch.ones(2), 1)] * 2,
        [[torch.ones(2), torch.ones(1)]] * 2,
        [(torch.ones(2), "name")] * 2,
        [(nn.Parameter(torch.ones(2)), torch.ones(2))] * 2,
        [(torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.complex64))] * 2,
        [(torch.ones(2), torch.ones(2)), [torch.ones(2), torch.ones(2)]],
        [Named(torch.ones(2), torch.ones(1))] * 2,
        [((torch.ones(2), torch.ones(1)), torch.ones(1))] * 2,
        [(torch.ones(0),)] * 2,
        [()] * 2,
        [torch.ones(2)] * 3,
        [(torch.ones(1, requires_grad=True),)] * 2,
        [{"x": torch.ones(2), "y": 1, "name": "a"}, {"name": "b", "y": 2, "x": torch.zeros(2)}],
        [{"x": np.ones((2, 3), "float16"), "in": {"y": np.ones(2, "int32").T}}] * 2,
        [(np.float64(1.5), np.arange(3)[::2])] * 2,
        [OrderedDict(x=torch.ones(2))] * 2,
        [torch.ones(2), nn.Parameter(torch.ones(2))],
        [{}] * 2,
    ],
)
def test_a_batch_is_what_torchs_default_collate_makes_of_it(samples: list[Any]) -> None:
    assert alike(collate(samples), default_collate(samples))


def jagged() -> list[Any]:
    """Not made when tests are collected: it imports torch's compiler."""
    return [(torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged),)] * 2


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.ones(2),), (torch.ones(3),)],
        [(torch.ones(2), torch.ones(2)), (torch.ones(2),)],
        [(torch.ones(2),), (None,)],
        [(torch.ones(2).to_sparse(),)] * 2,
        jagged,
        [(torch.ones(2),), 7],
        [torch.ones(2), 7],
        [{"x": torch.ones(2)}, {"y": torch.ones(2)}],
        [{"x": torch.ones(2)}, {"x": torch.ones(2), "y": torch.ones(2)}, 7],
        [np.array(["a"])] * 2,
        [np.ones(2), np.ones(3)],
        [np.ones(2), "a"],
    ],
)
def test_samples_that_do_not_fit_together_fail_as_in_torch(samples: list[Any] | Callable[[], list[Any]]) -> None:
    samples = samples() if callable(samples) else samples
    told = []
    for way in (collate, default_collate):
        with pytest.raises((RuntimeError, TypeError, KeyError)) as error:
            way(samples)
        told.append((error.type, str(error.value)))
    assert told[0] == told[1]


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
    # In a separate process: to collect what a traceback holds of torch's loader takes 5 s.
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


class Columns(Noise):
    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), index)


def spawned() -> tuple[dict[tuple[int, int], list[float]], list[int]]:
    multiprocessing.set_start_method("spawn", force=True)
    from test_stream import Shuffles

    # One worker each: a spawned worker imports torch. What several do does not depend on how they are started.
    [loader] = loaders(Columns(6), 1, num_workers=1, shuffle=False)
    kept = [batch for step in loader for batch in step]
    assert [batch.tolist() for batch in kept] == [[[n] * 2 for n in range(5)], [[5] * 2]]
    assert not any(batch.is_shared() for batch in kept)  # they arrive in slots, not in torch's way
    return samples_of(AsksForEach(6), 1, workers=1, max_epochs=1), flat(all_of(Shuffles(13), 1, workers=1))


@pytest.mark.stress
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


class AllAtOnce(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitems__(self, indices: list[int]) -> Any:
        return {"x": torch.tensor(indices)}


def test_a_collate_function_is_called_for_whatever_getitems_returns() -> None:
    def doubled(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": batch["x"] * 2}

    settings: dict[str, Any] = {"shuffle": False, "global_batch_size": 4, "max_epochs": 1}
    for workers in (0, 1):
        [loader] = loaders(AllAtOnce(), 1, collate_fn=doubled, num_workers=workers, **settings)
        assert [batch["x"].tolist() for step in loader for batch in step] == [[0, 2, 4, 6], [8, 10, 12, 14]]


class Wrapper(Dataset[Any]):
    """Has whatever the dataset inside has, and changes each sample."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return {"x": -index}


def test_a_wrapper_that_delegates_all_attributes_is_read_by_its_own_getitem() -> None:
    [loader] = loaders(Wrapper(AllAtOnce()), 1, shuffle=False, global_batch_size=4, max_epochs=1)
    assert [batch["x"].tolist() for step in loader for batch in step] == [[0, -1, -2, -3], [-4, -5, -6, -7]]
