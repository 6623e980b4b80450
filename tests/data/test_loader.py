"""Global batches: one order on every number of ranks, and no sample lost or repeated."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import random
import re
from collections.abc import Iterator
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batches import all_of, flat, global_batches, loaders, steps_of, world
from ranks import on_ranks
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from rankwise.data import LengthBatches, Loader
from rankwise.data.order import share
from rankwise.dist import comm
from rankwise.errors import ConfigError, DataError, WorldError


class Items(Dataset[int]):
    """Sample k is the number k."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        assert type(index) is int  # like torch's own samplers
        return index


class ListOfItems(Items):
    """`__getitems__` in torch's way: returns a list of samples."""

    def __getitem__(self, index: int) -> int:
        raise AssertionError("__getitems__ is there")

    def __getitems__(self, indices: list[int]) -> list[int]:
        assert type(indices) is list
        assert all(type(i) is int for i in indices)
        return indices


class ReadyBatches(ListOfItems):
    """`__getitems__` that returns a batch."""

    def __getitems__(self, indices: list[int]) -> Any:
        return {"x": torch.tensor(indices)}


KINDS = {
    "getitem": Items,
    "getitems": ListOfItems,
    "ready": ReadyBatches,
    "tensors": lambda n: TensorDataset(torch.arange(n), torch.arange(n) * 2.0),
    "subset": lambda n: Subset(Items(2 * n), range(n)),
}


def reference(samples: int, size: int, seed: int, epochs: int, drop_last: bool = False) -> list[list[int]]:
    """The global batches, computed in the simplest way."""
    from rankwise.data import Order

    batches = []
    for epoch in range(epochs):
        order = Order(samples, seed).indices(epoch, 0, samples).tolist()
        cut = [order[i : i + size] for i in range(0, samples, size)]
        batches += [b for b in cut if len(b) == size or not drop_last]
    return batches


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(2)
def test_each_sample_of_an_epoch_once_and_one_order_on_every_number_of_ranks(kind: str) -> None:
    for samples, size, accumulate, drop_last in itertools.product((1, 4, 13, 32), (1, 4, 5, 8, 40), (1, 2, 3), (False, True)):
        if drop_last and samples < size:
            continue
        expected = reference(samples, size, 7, 2, drop_last)
        if not drop_last:
            assert sorted(flat(expected)) == sorted(list(range(samples)) * 2)
        for world_size in (1, 2, 3, 5):
            got = all_of(KINDS[kind](samples), world_size, global_batch_size=size, accumulate=accumulate, max_epochs=2,
                         seed=7, drop_last=drop_last)  # fmt: skip
            assert got == expected, (samples, size, accumulate, drop_last, world_size)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_change_neither_order_nor_samples(kind: str) -> None:
    for world_size, accumulate in ((1, 1), (2, 2)):
        got = all_of(KINDS[kind](13), world_size, accumulate=accumulate, max_epochs=2, seed=7, workers=2)
        assert got == reference(13, 5, 7, 2)


def test_ranks_and_micro_batches_are_of_nearly_equal_size() -> None:
    for world_size in range(1, 9):
        for n in range(40):
            parts = [share(100, 100 + n, rank, world_size) for rank in range(world_size)]
            assert parts[0][0] == 100
            assert parts[-1][1] == 100 + n
            assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
            sizes = [high - low for low, high in parts]
            assert max(sizes) - min(sizes) <= 1
    for loader in loaders(Items(1000), 3, global_batch_size=100, accumulate=4):
        for micro_batches in loader:
            sizes = [len(m) for m in micro_batches]
            assert len(sizes) == 4
            assert max(sizes) - min(sizes) <= 1


def test_more_ranks_than_samples_leaves_some_without_and_all_at_the_same_step() -> None:
    per_rank = [steps_of(loader) for loader in loaders(Items(2), 5, global_batch_size=64, max_epochs=3)]
    assert global_batches(per_rank) == reference(2, 64, 0, 3)
    assert all(len(steps) == 3 for steps in per_rank)
    assert sum(steps[0] == [] for steps in per_rank) == 3


def test_steps_per_epoch_and_the_state_after_each_step() -> None:
    for drop_last, steps in ((False, 3), (True, 2)):
        (loader,) = loaders(Items(13), 1, drop_last=drop_last, max_epochs=2)
        assert loader.samples == 13
        assert loader.steps_per_epoch == steps
        seen = [(loader.epoch, loader.position, loader.finished) for _ in loader]
        within = [5, 10][: steps - 1]
        assert seen == [
            *((0, p, False) for p in within), (1, 0, False), *((1, p, False) for p in within), (2, 0, True)
        ]  # fmt: skip
        assert list(loader) == []  # it remains finished


def test_an_epoch_without_end_goes_on_into_the_next() -> None:
    got = all_of(Items(7), 2, limit=50, max_epochs=None)
    assert got == reference(7, 5, 0, 25)


def test_a_loop_over_epochs_around_the_loop_over_the_loader_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    loader = Loader(Items(8), global_batch_size=4, max_epochs=1)
    assert len(list(loader)) == 2
    assert capsys.readouterr().out == ""
    assert list(loader) == []
    assert "a loop over a Loader got no batch, because its max_epochs=1 were over" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (len, "a Loader has no len(): loader.steps_per_epoch is the number of steps of an epoch"),
        (lambda loader: loader.dataset, "a Loader has no dataset: loader.samples is its number of samples"),
        (lambda loader: loader.batch_size, "a Loader has no batch_size: loader.global_batch_size is"),
        (lambda loader: loader.sampler.set_epoch(1), "a Loader has no sampler: a Loader shuffles by itself"),
        (lambda loader: loader.set_epoch(1), "a Loader has no set_epoch: a Loader shuffles by itself"),
        (lambda loader: loader.nothing, "'Loader' object has no attribute 'nothing'"),
    ],
)
def test_what_only_a_dataloader_has_is_an_error_that_says_what_to_write_instead(ask: Any, said: str) -> None:
    loader = Loader(Items(8), global_batch_size=4)
    assert loader
    assert not hasattr(loader, "dataset")
    with pytest.raises((AttributeError, TypeError), match=re.escape(said)):
        ask(loader)


class Unfinished(Items):
    def __len__(self) -> int:
        raise AttributeError("'Unfinished' object has no attribute 'missing'")


def test_an_attribute_error_of_the_dataset_is_not_hidden() -> None:
    with pytest.raises(AttributeError, match="'Unfinished' object has no attribute 'missing'"):
        _ = Loader(Unfinished(8), global_batch_size=4).steps_per_epoch


def test_a_loop_begins_with_a_warning_if_the_script_has_looked_at_a_batch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankwise.dist.log._warned", set())
    loader = Loader(Items(8), global_batch_size=4, shuffle=False)
    assert [batch.tolist() for batch in next(iter(loader.once()))] == [[0, 1, 2, 3]]
    assert [batch.tolist() for batch in next(iter(loader))] == [[0, 1, 2, 3]]
    assert capsys.readouterr().out == ""
    assert [batch.tolist() for batch in next(iter(loader))] == [[4, 5, 6, 7]]
    said = capsys.readouterr().out
    assert "an earlier loop over this Loader has ended after its first step, so this one begins after these 4 samples" in said


@pytest.mark.parametrize("steps", [2, 3])
def test_a_loop_that_continues_another_one_begins_without_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr("rankwise.dist.log._warned", set())
    loader = Loader(Items(8), global_batch_size=4, shuffle=False)
    for _ in itertools.islice(loader, steps):
        pass
    state = loader.state_dict()
    next(iter(loader))
    resumed = Loader(Items(8), global_batch_size=4, shuffle=False)
    next(iter(resumed))
    resumed.load_state_dict({**state, "epoch": 0, "position": 4})  # a checkpoint after the first step
    next(iter(resumed))
    assert capsys.readouterr().out == ""


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    assert flat(all_of(Items(13), 2, shuffle=False)) == list(range(13))


@pytest.mark.parametrize("workers", [0, 2])
def test_no_sample_lost_or_repeated_when_world_size_changes(workers: int) -> None:
    expected = reference(23, 5, 3, 3)
    stops = range(len(expected)) if workers == 0 else (0, 2, 5)
    for stop in stops:
        for before, after in ((1, 3), (3, 2), (4, 1), (2, 2), (1, 9)) if workers == 0 else ((3, 2),):
            first = loaders(Items(23), before, seed=3, max_epochs=3, workers=workers)
            got = global_batches([steps_of(loader, stop) for loader in first])
            states = [loader.state_dict() for loader in first]
            assert all(state == states[0] for state in states)  # equal on all ranks
            second = loaders(Items(23), after, seed=3, max_epochs=3, workers=workers)
            for loader in second:
                loader.load_state_dict(states[0])
            got += global_batches([steps_of(loader) for loader in second])
            assert got == expected, (stop, before, after)


def test_a_loader_that_was_read_already_goes_back_to_the_state_it_is_given() -> None:
    (loader,) = loaders(Items(23), 1, max_epochs=2)
    steps_of(loader, 3)
    state = loader.state_dict()
    rest = steps_of(loader)
    loader.load_state_dict(state)
    assert steps_of(loader) == rest


def test_a_global_batch_that_changed_goes_on_as_recorded_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    (first,) = loaders(Items(23), 1)
    got = [[s for micro in step for s in micro] for step in steps_of(first, 2)]
    (second,) = loaders(Items(23), 1, global_batch_size=8)
    second.load_state_dict(first.state_dict())
    assert second.global_batch_size == 5
    assert second.steps_per_epoch == 5
    assert got + [[s for micro in step for s in micro] for step in steps_of(second)] == reference(23, 5, 0, 1)
    assert "global batch of 5 instead of 8" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "change"), [("seed", {"seed": 1}), ("shuffle", {"shuffle": False}), ("samples", {})])
def test_the_state_of_another_training_is_refused(name: str, change: dict[str, Any]) -> None:
    (first,) = loaders(Items(23), 1)
    (second,) = loaders(Items(24 if name == "samples" else 23), 1, **change)
    before = second.state_dict()
    cure = {"seed": "give seed=0", "shuffle": "give shuffle=True", "samples": "use the same data and the same Loader"}[name]
    with pytest.raises(
        ConfigError, match=rf"{name}=.* this run has {name}=.*; {cure}, or start a new run with --fresh.*--name"
    ):
        second.load_state_dict(first.state_dict())
    assert second.state_dict() == before


def test_the_state_is_plain_values() -> None:
    (loader,) = loaders(Items(23), 1)
    steps_of(loader, 2)
    assert all(type(value) in (int, bool) for value in loader.state_dict().values())


def test_a_state_loaded_where_the_last_batch_is_dropped_does_not_hang() -> None:
    """The saved position is in the part that is now dropped: the next step is the first of the next epoch."""
    (first,) = loaders(Items(13), 1)
    steps_of(first, 2)
    (second,) = loaders(Items(13), 1, drop_last=True, max_epochs=2)
    second.load_state_dict(first.state_dict())
    spins = 0
    ordered = second._ordered

    def counted(order: Any) -> Iterator[Any]:
        nonlocal spins
        spins += 1
        assert spins < 5, "it spins without a batch"
        return ordered(order)

    second._ordered = counted  # type: ignore[method-assign]
    assert [[s for micro in step for s in micro] for step in steps_of(second)] == reference(13, 5, 0, 2, True)[2:]


# --- datasets that are invalid, or fail


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


def test_what_cannot_be_trained_on_is_a_data_error() -> None:
    with pytest.raises(DataError, match="has no samples"):
        loaders(Items(0), 1)
    with pytest.raises(DataError, match=r"NoLength has no length.*__len__.*iterable"):
        loaders(NoLength(), 1)
    with pytest.raises(DataError, match="generator can be read only once"):
        loaders((i for i in range(3)), 1)
    with pytest.raises(DataError, match="drop_last drops all samples: 4 samples are fewer than a global batch of 5"):
        loaders(Items(4), 1, drop_last=True)


@pytest.mark.parametrize("max_epochs", [1, None])
def test_a_loop_over_fewer_samples_than_a_batch_of_all_ranks_ends_in_an_error(max_epochs: int | None) -> None:
    alone = Loader(Items(5), batch_size=4, drop_last=True, max_epochs=max_epochs)
    assert len(next(iter(alone))) == 1
    two = Loader(Items(5), batch_size=4, drop_last=True, max_epochs=max_epochs).at(world(0, 2))
    with pytest.raises(DataError, match="drop_last drops all samples: 5 samples are fewer than a global batch of 8"):
        next(iter(two))


@pytest.mark.parametrize("setting", ["global_batch_size", "accumulate"])
def test_a_batch_of_nothing_is_a_config_error(setting: str) -> None:
    for value in (0, -1):
        with pytest.raises(ConfigError, match=f"{setting}={value}"):
            loaders(Items(4), 1, **{setting: value})


class Broken(Items):
    def __getitem__(self, index: int) -> int:
        if index == 11:
            raise OSError("cannot read the file")
        return index


def text_of_failure(workers: int) -> str:
    multiprocessing.set_start_method("fork", force=True)
    (loader,) = loaders(Broken(23), 1, workers=workers)
    try:
        steps_of(loader)
    except OSError as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return ""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_fails_is_named(workers: int) -> None:
    # In a separate process: to collect what a traceback holds of torch's loader takes 5 s.
    (said,) = on_ranks(1, text_of_failure, workers)
    assert "cannot read the file" in said
    assert "in sample 11 of Broken" in said


# --- batches


def test_samples_go_through_the_collate_function() -> None:
    def collate(samples: list[int]) -> dict[str, Any]:
        assert type(samples) is list
        return {"x": torch.tensor(samples), "n": len(samples)}

    for dataset in (Items(13), ListOfItems(13), Subset(Items(99), range(13))):
        (loader,) = loaders(dataset, 1, collate_fn=collate, shuffle=False)
        assert [step[0]["n"] for step in loader] == [5, 5, 3]
    (loader,) = loaders(TensorDataset(torch.arange(13)), 1, shuffle=False, collate_fn=len)
    assert [step[0] for step in loader] == [5, 5, 3]


def test_batches_are_those_of_torchs_own_loader() -> None:
    data = [{"x": torch.randn(3), "y": k, "name": f"n{k}"} for k in range(7)]
    (loader,) = loaders(data, 1, shuffle=False, global_batch_size=3)
    ours = [step[0] for step in loader]
    torchs = list(DataLoader(data, batch_size=3))  # type: ignore[arg-type]
    assert len(ours) == len(torchs)
    for a, b in zip(ours, torchs, strict=True):
        assert torch.equal(a["x"], b["x"])
        assert torch.equal(a["y"], b["y"])
        assert a["name"] == b["name"]


class Doubled(TensorDataset):
    """A subclass that returns other samples."""

    def __getitem__(self, index: int) -> Any:
        assert isinstance(index, int)
        return tuple(2 * tensor[index] for tensor in self.tensors)


def test_a_subclass_of_tensor_dataset_is_asked_for_single_samples() -> None:
    (loader,) = loaders(Doubled(torch.arange(13)), 1, shuffle=False)
    assert torch.cat([step[0][0] for step in loader]).tolist() == [2 * k for k in range(13)]


def test_batches_are_placed_on_the_device() -> None:
    for workers in (0, 1):
        (loader,) = loaders(TensorDataset(torch.arange(13.0)), 1, device=torch.device("meta"), workers=workers)
        assert all(step[0][0].device.type == "meta" for step in loader)


# --- random streams


class Noise(Items):
    """Draws in every sample, like augmentation."""

    def __getitem__(self, index: int) -> Any:
        return np.int64(index), torch.rand((), dtype=torch.float64), np.random.rand()


def test_fetching_with_workers_does_not_move_the_streams_of_training() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    (loader,) = loaders(Items(13), 1, workers=1, max_epochs=2)
    steps_of(loader)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("generator", ["torch", "numpy"])
def test_ranks_draw_different_noise_in_their_workers(generator: str) -> None:
    column = 1 if generator == "torch" else 2
    drawn = [
        [float(v) for step in loader for batch in step for v in batch[column]]
        for loader in loaders(Noise(40), 2, global_batch_size=20, workers=1)
    ]
    assert len(drawn[0]) == len(drawn[1]) == 20
    assert not set(drawn[0]) & set(drawn[1])


def test_epochs_draw_different_noise_in_their_workers() -> None:
    (loader,) = loaders(Noise(10), 1, global_batch_size=10, workers=1, max_epochs=2)
    first, second = ([float(v) for v in step[0][1]] for step in loader)
    assert not set(first) & set(second)


def test_waiting_for_data_is_metered() -> None:
    (loader,) = loaders(Items(13), 1)
    assert loader.wait_s == 0.0
    steps_of(loader)
    assert 0.0 < loader.wait_s < 60.0


def test_a_loader_anew_begins_again_for_any_rank_and_leaves_the_first_where_it_is() -> None:
    loader = loaders(list(range(13)), 1, global_batch_size=5)[0]
    first = steps_of(loader, 2)
    parts = [steps_of(loader.anew(world(rank, 2), 1), 2) for rank in range(2)]
    assert global_batches(parts) == global_batches([first])
    assert loader.position == 10
    assert [len(step) for step in steps_of(loader.anew(world(0, 1), 3), 1)] == [3]
    assert global_batches([steps_of(loader.anew(world(0, 1), 1, 4), 1)]) == [global_batches([first])[0][:4]]


class Noisy:
    """Each sample is a random number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


def test_what_a_dataset_draws_for_a_loader_anew_does_not_depend_on_how_it_is_shared() -> None:
    loader = loaders(Noisy(), 1, global_batch_size=8)[0]
    whole = global_batches([steps_of(loader.anew(world(0, 1), 1))])
    assert global_batches([steps_of(loader.anew(world(rank, 2), 2)) for rank in range(2)]) == whole


def test_a_stream_anew_begins_again_for_any_rank() -> None:
    class Count(IterableDataset):
        def __iter__(self):
            return iter(range(9))

    loader = loaders(Count(), 1, global_batch_size=4)[0]
    first = steps_of(loader, 1)
    assert global_batches([steps_of(loader.anew(world(rank, 2), 1), 1) for rank in range(2)]) == global_batches([first])


# --- as scripts describe it, and as evaluation uses it


def for_ranks(**given: Any) -> Loader:
    return Loader(Items(20), accumulate=2, **given).at(world(0, 2))


def test_a_size_of_one_rank_and_micro_batch_grows_with_the_ranks_and_one_of_all_does_not() -> None:
    assert for_ranks(batch_size=3).global_batch_size == 12
    assert for_ranks(global_batch_size=3).global_batch_size == 3
    with pytest.raises(ConfigError, match=r"give batch_size \(per rank and micro-batch\), global_batch_size"):
        for_ranks()
    with pytest.raises(ConfigError, match="batch_size and global_batch_size all set the batch"):
        for_ranks(batch_size=3, global_batch_size=3)


def test_a_pass_over_other_data_is_in_order_with_batches_as_large_as_a_micro_batch_as_it_was_given() -> None:
    for given in ({"global_batch_size": 12}, {"batch_size": 3}):
        loader = for_ranks(**given)
        state = loader.state_dict() | {"global_batch_size": 30, "accumulate": 1}
        loader.load_state_dict(state)  # from a training with another size
        first = loader.over(Items(7))
        assert (first.global_batch_size, first.max_epochs) == (6, 1)
        assert steps_of(first) == [[[0, 1, 2]], []]


def test_a_pass_over_other_data_is_cut_by_length_where_the_training_is_and_the_data_tells_lengths() -> None:
    told = Items(7)
    told.lengths = [2] * 7  # type: ignore[attr-defined]
    for batches, tokens in ((LengthBatches(global_tokens=8, lengths=[2] * 20), 4), (LengthBatches(3, lengths=[2] * 20), 6)):
        loader = for_ranks(batches=batches)
        assert f"{tokens} tokens" in loader.over(told).describe_batch()
        assert "tokens" not in loader.over(Items(7)).describe_batch()


# --- workers, like those of torch's DataLoader


def note_worker(worker: int) -> None:
    random.seed(worker)
    torch.manual_seed(worker)
    os.environ["WORKER"] = str(worker)


class Workers(Noise):
    def __getitem__(self, index: int) -> Any:
        assert os.environ["WORKER"]
        return super().__getitem__(index)


def test_a_function_that_begins_each_worker_is_called_there_and_its_draws_change_no_sample() -> None:
    expected = [[[column.tolist() for column in batch] for batch in step] for step in loaders(Noise(40), 1, workers=2)[0]]
    settings = {"num_workers": 2, "prefetch_factor": 1, "worker_init_fn": note_worker}
    (loader,) = loaders(Workers(40), 1, **settings)
    assert [[[column.tolist() for column in batch] for batch in step] for step in loader] == expected


class Waits(Items):
    def __getitem__(self, index: int) -> int:
        Event().wait()
        raise AssertionError


def test_workers_that_give_no_batch_in_time_are_a_data_error_that_says_so() -> None:
    (loader,) = loaders(Waits(5), 1, num_workers=1, timeout=0.2)
    with pytest.raises(DataError, match=r"no batch came from the loader workers for 0\.2 s \(timeout=0\.2\)"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"prefetch_factor": 2}, "prefetch_factor=2 works only with workers; give num_workers"),
        ({"timeout": 5}, "timeout=5 works only with workers"),
        ({"sampler": [3]}, r"Loader\(sampler=...\): give batches=torch.utils.data.BatchSampler"),
        ({"generator": 1}, r"Loader\(generator=...\): the order follows from seed"),
        ({"global_batch_tokens": 9}, r"it is now batches=LengthBatches\(global_tokens=...\)"),
        ({"world": 1}, r"Loader\(world=...\): leave it out; the Loader calls rankwise.init\(\)"),
        ({"num_worker": 1}, r"Loader\(num_worker=...\): there is no such argument; did you mean num_workers\?"),
        (
            {"global_batch_size": "5"},
            r"Loader\(global_batch_size='5'\): give a whole number of at least 1, or None, without quotes",
        ),
        ({"device": "gpu0"}, r"Loader\(device='gpu0'\): give a device"),
    ],
)
def test_what_a_loader_cannot_do_is_one_line_with_the_cure(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Loader(Items(5), **{"global_batch_size": 2, **given})
    with pytest.raises(ConfigError, match=r"Loader\(world\): leave it out"):
        Loader(Items(5), world(0, 1), global_batch_size=2)  # type: ignore[call-arg, misc]


# --- no world is needed before the first use


def made_before_init() -> Any:
    """The order of a script: parts first, then init."""
    dist.destroy_process_group()
    saved, comm._world = comm._world, None
    loader = Loader(Items(12), batch_size=2)
    try:
        next(iter(loader))
    except WorldError as error:
        text = str(error)
    comm._world = saved
    return text


def test_a_loader_needs_no_world_before_it_is_used_and_then_says_that_init_was_not_called() -> None:
    for rank, text in enumerate(on_ranks(2, made_before_init)):
        assert text.startswith(f"rank {rank} of 2 has not joined the others; call rankwise.init() first")
    loader = Loader(Items(12), batch_size=2)
    assert loader.global_batch_size == 2


def test_a_micro_batch_stays_as_small_as_it_was_in_the_second_resume_on_fewer_ranks() -> None:
    first = Loader(Items(64), batch_size=4).at(world(0, 4))
    second = Loader(Items(64), batch_size=4).at(world(0, 2))
    second.load_state_dict(first.state_dict())
    third = Loader(Items(64), batch_size=4).at(world(0, 2))
    third.load_state_dict(second.state_dict())
    assert (second.accumulate, third.accumulate, third.global_batch_size) == (2, 2, 16)
    fourth = Loader(Items(64), batch_size=4).at(world(0, 4))
    fourth.load_state_dict(third.state_dict())
    assert fourth.accumulate == 1
    changed = Loader(Items(64), global_batch_size=16, accumulate=4).at(world(0, 2))
    changed.load_state_dict(Loader(Items(64), global_batch_size=16).at(world(0, 2)).state_dict())
    assert changed.accumulate == 4  # the user's wish
    changed = Loader(Items(64), global_batch_size=16, accumulate=4).at(world(0, 4))
    changed.load_state_dict(Loader(Items(64), global_batch_size=16).at(world(0, 2)).state_dict())
    assert changed.accumulate == 4  # and on another number of ranks
    fewer = Loader(Items(64), global_batch_size=16, accumulate=1).at(world(0, 1))
    fewer.load_state_dict(Loader(Items(64), global_batch_size=16, accumulate=2).at(world(0, 2)).state_dict())
    assert fewer.accumulate == 4  # a script that computes it from the ranks does not ask for a larger micro-batch


def test_a_micro_batch_is_as_large_as_before_when_the_ranks_are_as_many_as_before() -> None:
    state, found = None, []
    for world_size in (2, 3, 2, 5, 1, 3, 4, 1):
        loader = Loader(Items(64), global_batch_size=16).at(world(0, world_size))
        if state is not None:
            loader.load_state_dict(state)
        state = loader.state_dict()
        found.append(loader.accumulate)
    assert found == [1, 1, 1, 1, 2, 1, 1, 2]


def test_a_smaller_micro_batch_that_the_user_asks_for_is_kept_by_later_resumes() -> None:
    state = Loader(Items(64), global_batch_size=16).at(world(0, 4)).state_dict()
    for world_size, expected in ((2, 8), (4, 4), (3, 6)):
        loader = Loader(Items(64), global_batch_size=16, accumulate=8).at(world(0, world_size))
        loader.load_state_dict(state)
        assert loader.accumulate == expected
        state = loader.state_dict()


@pytest.mark.parametrize("kind", [Items, torch.utils.data.IterableDataset])
def test_a_class_is_no_dataset(kind: Any) -> None:
    with pytest.raises(DataError, match=rf"^the dataset is the class {kind.__name__}; give an object of it: "):
        Loader(kind, batch_size=2)


@pytest.mark.parametrize("state", [None, {}, [], {"epoch": 1, "position": 0}])
def test_a_state_of_something_else_is_refused(state: Any) -> None:
    loader = Loader(Items(12), batch_size=2)
    with pytest.raises(ConfigError, match=r"load_state_dict\(state=.*\): give what state_dict\(\) of a Loader returned"):
        loader.load_state_dict(state)


class OfLengthOne(Items):
    lengths = (1,) * 40


def test_other_data_has_no_more_samples_in_a_batch_than_the_training() -> None:
    data = OfLengthOne(40)
    loader = Loader(data, batches=LengthBatches(tokens=100, max_samples=8), accumulate=2).at(world(0, 1))
    assert max(len(batch) for [batch] in loader.over(data)) == 4


# --- what begins a worker


class Opened(Items):
    """Draws from a generator of its own, which a worker sets."""

    generator: np.random.Generator | None = None

    def __getitem__(self, index: int) -> int:
        assert self.generator is not None
        return int(self.generator.integers(10**9))


def open_in_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    info.dataset.generator = np.random.default_rng(info.seed)


def test_a_function_that_begins_a_worker_finds_the_dataset_and_a_seed_that_no_epoch_rank_or_loader_shares() -> None:
    drawn: list[int] = []
    for seed in (0, 1):
        for loader in loaders(Opened(20), 2, seed=seed, num_workers=1, worker_init_fn=open_in_worker, max_epochs=2):
            drawn += [number for step in loader for batch in step for number in batch.tolist()]
    assert len(set(drawn)) == len(drawn) == 2 * 2 * 20


# --- several loops over one loader


def test_a_state_that_is_loaded_in_a_running_loop_is_where_the_loop_continues() -> None:
    expected = flat(all_of(Items(8), 1, global_batch_size=2, max_epochs=2))
    for workers in (0, 1):
        (loader,) = loaders(Items(8), 1, global_batch_size=2, max_epochs=2, workers=workers)
        taken, state = [], {}
        for number, [batch] in enumerate(loader):
            taken += batch.tolist()
            if number == 1:
                state = loader.state_dict()
            if number == 4:
                loader.load_state_dict(state)
        assert taken == expected[:10] + expected[4:]


def test_two_loops_at_once_share_the_samples_of_one_loader() -> None:
    expected = flat(all_of(Items(8), 1, global_batch_size=2))
    (loader,) = loaders(Items(8), 1, global_batch_size=2)
    pairs = [(a.tolist(), b.tolist()) for [a], [b] in zip(loader, loader, strict=True)]
    assert [number for pair in pairs for some in pair for number in some] == expected
    assert loader.epoch == 1


# --- numbers of numpy


@pytest.mark.parametrize("kind", [np.int64, np.int16, np.uint8])
def test_sizes_may_be_numbers_of_numpy(kind: Any) -> None:
    given: dict[str, Any] = {"global_batch_size": kind(100), "max_epochs": kind(1), "seed": kind(1), "accumulate": kind(2)}
    (loader,) = loaders(Items(1000), 1, **given)
    assert loader.describe() == "1000 samples, 10 steps per epoch"
    assert flat(global_batches([steps_of(loader)])) == flat(all_of(Items(1000), 1, global_batch_size=100, seed=1))
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    assert torch.load(file) == loader.state_dict()
