"""Streams: one order on every number of ranks and workers, a split last batch, an end that all ranks find without a message."""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from batches import Steps, all_of, flat, global_batches, loaders, steps_of
from ranks import on_ranks
from torch import nn
from torch.utils.data import IterableDataset, default_collate, get_worker_info

import rankwise
from rankwise.data import Loader
from rankwise.data.habits import warn_of_split
from rankwise.dist import comm
from rankwise.errors import ConfigError, DataError


class Numbers(IterableDataset[int]):
    """0, 1, 2, ..."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        yield from range(self.samples)


class ByEpoch(Numbers):
    """Another order and length in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(100 * self.epoch, 100 * self.epoch + self.samples + self.epoch))
        random.Random(self.epoch).shuffle(numbers)
        yield from numbers


class SplitsItself(Numbers):
    """The example of torch's documentation: each worker yields a part."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(self.samples) if info is None else range(info.id, self.samples, info.num_workers)


class Shuffles(Numbers):
    """A shuffle buffer that uses the global generators, as people write it."""

    def __iter__(self) -> Iterator[int]:
        held: list[int] = []
        for number in range(self.samples):
            held.append(number)
            if len(held) == 4:
                yield held.pop(int(torch.randint(4, ())))
        np.random.shuffle(held)
        random.shuffle(held)
        yield from held


class Plain:
    """Iterable, but not a subclass of torch's."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


class OwnIterator(Numbers):
    """Its own iterator, which `iter()` resets."""

    def __iter__(self) -> OwnIterator:
        self.number = -1
        return self

    def __next__(self) -> int:
        self.number += 1
        if self.number == self.samples:
            raise StopIteration
        return self.number


class NoFile(Numbers):
    """Its files end before the first sample."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(next(iter(()))))


def test_a_stream_that_cannot_begin_is_an_error_and_no_end() -> None:
    for workers in (0, 1):
        (loader,) = loaders(NoFile(4), 1, workers=workers)
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(loader)


def cut(numbers: list[int], size: int, drop_last: bool = False) -> list[list[int]]:
    batches = [numbers[i : i + size] for i in range(0, len(numbers), size)]
    return [batch for batch in batches if len(batch) == size or not drop_last]


@pytest.mark.parametrize("kind", [Numbers, Plain, OwnIterator])
def test_each_sample_of_an_epoch_once_in_the_order_of_the_stream_on_every_number_of_ranks(kind: Any) -> None:
    for samples, size, accumulate, drop_last in itertools.product((1, 4, 10, 13), (1, 4, 5, 40), (1, 3), (False, True)):
        if drop_last and samples < size:
            continue
        expected = cut(list(range(samples)), size, drop_last) * 2
        for world_size in (1, 2, 3, 5):
            got = all_of(
                kind(samples), world_size, global_batch_size=size, accumulate=accumulate, drop_last=drop_last, max_epochs=2
            )
            assert got == expected, (samples, size, accumulate, drop_last, world_size)


@pytest.mark.parametrize("kind", [Numbers, SplitsItself])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_neither_order_nor_samples_of_a_stream(kind: Any, workers: int) -> None:
    for world_size, drop_last in ((1, False), (3, True)):
        got = all_of(kind(13), world_size, workers=workers, max_epochs=2, accumulate=2, drop_last=drop_last)
        assert got == cut(list(range(13)), 5, drop_last) * 2


def test_a_stream_is_told_its_epoch_and_may_be_of_another_length_in_each() -> None:
    dataset = ByEpoch(7)
    expected = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        expected += cut(list(dataset), 5)
    assert len(expected) == 6
    for world_size, workers in ((1, 0), (3, 0), (2, 2)):
        assert all_of(ByEpoch(7), world_size, max_epochs=3, workers=workers) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffle_buffer_draws_the_same_on_every_rank_and_worker_and_anew_each_epoch(workers: int) -> None:
    expected = all_of(Shuffles(23), 1, seed=3, max_epochs=2)
    first, second = flat(expected[:5]), flat(expected[5:])
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second
    assert first != list(range(23))
    for world_size in (2, 3):
        assert all_of(Shuffles(23), world_size, seed=3, max_epochs=2, workers=workers) == expected
    assert all_of(Shuffles(23), 1, seed=4, max_epochs=2) != expected


def noisy_collate(samples: list[int]) -> Any:
    """Draws only for the samples of a rank: this must not change what the stream draws."""
    return {"x": default_collate(samples), "noise": torch.rand(len(samples)), "more": [random.random(), np.random.randn()]}


def test_what_a_collate_function_draws_does_not_move_the_stream() -> None:
    expected = all_of(Shuffles(23), 1, seed=3)
    noise = []
    for world_size, workers in ((1, 0), (3, 0), (3, 2), (3, 2)):
        per_rank = loaders(Shuffles(23), world_size, seed=3, workers=workers, collate_fn=noisy_collate)
        steps = [list(loader) for loader in per_rank]
        numbers: list[Steps] = [[[b["x"].tolist() for b in step] for step in rank] for rank in steps]
        assert global_batches(numbers) == expected
        noise.append([(b["noise"].tolist(), b["more"]) for rank in steps for step in rank for b in step])
    assert noise[1] == noise[2] == noise[3]


@pytest.mark.parametrize("kind", [Numbers, Shuffles])
def test_a_stream_in_this_process_leaves_the_streams_of_training_where_they_were(kind: Any) -> None:
    def drawn(reads: bool) -> list[float]:
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)
        numbers: list[float] = []
        (loader,) = loaders(kind(23), 1, collate_fn=noisy_collate)
        for _ in loader if reads else range(5):
            numbers += [torch.randn(()).item(), np.random.randn(), random.gauss(0, 1)]
        return numbers

    assert drawn(True) == drawn(False)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_anywhere_on_another_number_of_ranks(workers: int) -> None:
    expected = all_of(Shuffles(23), 1, seed=3, max_epochs=2)
    for stop in range(len(expected)) if workers == 0 else (2, 5):
        first = loaders(Shuffles(23), 3, seed=3, max_epochs=2, workers=workers)
        got = global_batches([steps_of(loader, stop) for loader in first])
        states = [loader.state_dict() for loader in first]
        assert all(state == states[0] for state in states)
        second = loaders(Shuffles(23), 2, seed=3, max_epochs=2, workers=workers, global_batch_size=7)
        for loader in second:
            loader.load_state_dict(states[0])
        got += global_batches([steps_of(loader) for loader in second])
        assert got == expected, stop


def test_a_stream_that_was_read_already_goes_back_to_the_state_it_is_given() -> None:
    (loader,) = loaders(Shuffles(23), 1, max_epochs=2)
    steps_of(loader, 3)
    state = loader.state_dict()
    rest = steps_of(loader)
    loader.load_state_dict(state)
    assert steps_of(loader) == rest


def test_more_ranks_than_samples_of_a_stream_leaves_some_without_and_all_at_the_same_step() -> None:
    per_rank = [steps_of(loader) for loader in loaders(Numbers(2), 5, global_batch_size=64, max_epochs=2)]
    assert global_batches(per_rank) == [[0, 1]] * 2
    assert sum(steps[0] == [] for steps in per_rank) == 3


def test_an_endless_stream_is_read_no_further_than_one_sample_ahead() -> None:
    class Endless(IterableDataset[int]):
        read = 0

        def __iter__(self) -> Iterator[int]:
            for self.read in itertools.count():
                yield self.read

    dataset = Endless()
    assert flat(all_of(dataset, 1, limit=3, max_epochs=None)) == list(range(15))
    assert dataset.read == 15


class Hinted(Numbers):
    def __len__(self) -> int:
        return 12  # the stream has 13


def test_the_length_of_a_stream_is_unknown_or_a_hint_alone() -> None:
    (loader,) = loaders(Numbers(13), 1)
    assert (loader.is_stream, loader.samples, loader.steps_per_epoch) == (True, None, None)
    (loader,) = loaders(Hinted(13), 1)
    assert (loader.is_stream, loader.samples, loader.steps_per_epoch) == (True, 12, 3)
    assert flat([[s for m in step for s in m] for step in steps_of(loader)]) == list(range(13))
    state = loader.state_dict()
    assert state["samples"] is None
    loaders(Numbers(13), 1)[0].load_state_dict(state)  # another length alone is not another training


def test_a_stream_is_not_shuffled_and_says_so_when_asked_to() -> None:
    with pytest.raises(ConfigError, match=r"shuffle=True, but Numbers is a stream.*own order.*remove shuffle"):
        loaders(Numbers(13), 1, shuffle=True)
    assert flat(all_of(Numbers(13), 2, shuffle=False)) == list(range(13))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_without_a_sample_is_a_data_error(workers: int) -> None:
    with pytest.raises(DataError, match=r"Numbers.* is empty: its stream yields no samples"):
        all_of(Numbers(0), 1, workers=workers)
    with pytest.raises(
        DataError, match="drop_last drops all samples: the stream of Numbers ends before a global batch of 5 is full"
    ):
        all_of(Numbers(4), 2, drop_last=True, workers=workers)


def test_a_stream_that_is_shorter_than_its_checkpoint_is_a_data_error() -> None:
    (loader,) = loaders(Numbers(23), 1)
    steps_of(loader, 3)
    (shorter,) = loaders(Numbers(9), 1)
    shorter.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="stream of Numbers ends after 9 samples, before position 15 of the checkpoint"):
        steps_of(shorter)


def test_a_state_loaded_where_a_streams_tail_is_dropped_goes_on_with_the_next_epoch() -> None:
    (loader,) = loaders(Numbers(13), 1)
    steps_of(loader, 2)
    (dropping,) = loaders(Numbers(13), 1, drop_last=True, max_epochs=2)
    dropping.load_state_dict(loader.state_dict())
    assert steps_of(dropping) == [[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, 9]]]


def test_a_checkpoint_of_a_stream_and_one_of_a_map_are_not_each_others() -> None:
    (stream,) = loaders(Numbers(13), 1)
    (ordered,) = loaders(list(range(13)), 1)
    for one, other in ((stream, ordered), (ordered, stream)):
        with pytest.raises(ConfigError, match="start a new run with --fresh"):
            one.load_state_dict(other.state_dict())


class Broken(Numbers):
    at = 11

    def __iter__(self) -> Iterator[int]:
        for number in range(self.samples):
            if number == self.at:
                raise OSError(5, "cannot read the file")
            yield number


def failure(workers: int) -> tuple[str, str, list[str], int]:
    multiprocessing.set_start_method("fork", force=True)
    (loader,) = loaders(Broken(23), 1, workers=workers)
    taken = 0
    try:
        for _ in loader:
            taken += 1
    except Exception as error:
        return type(error).__name__, str(error), error.__notes__, taken
    return "", "", [], taken


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_fails_is_named_with_the_sample(workers: int) -> None:
    ((kind, text, notes, taken),) = on_ranks(1, failure, workers)
    assert (kind, text) == ("OSError", "[Errno 5] cannot read the file")
    assert "in sample 11 of Broken" in notes
    assert taken == 2


@pytest.mark.parametrize("at", [0, 10, 11])
def test_a_stream_that_failed_begins_anew_when_it_is_asked_again(at: int) -> None:
    dataset = Broken(13)
    dataset.at = at
    (loader,) = loaders(dataset, 1)
    got: Steps = []
    with pytest.raises(OSError, match="cannot read"):
        got.extend([batch.tolist() for batch in step] for step in loader)
    dataset.at = -1
    assert [s for step in got + steps_of(loader) for micro in step for s in micro] == list(range(13))


class OneBuffer(Numbers):
    """As a reader of frames that fills the same memory again."""

    def __iter__(self) -> Iterator[Any]:
        buffer = torch.zeros(())
        for number in range(self.samples):
            yield buffer.fill_(number)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_stream_may_use_the_memory_of_a_sample_again_after_its_batch(workers: int, drop_last: bool) -> None:
    batches = all_of(OneBuffer(5), 1, global_batch_size=1, workers=workers, drop_last=drop_last, max_epochs=2)
    assert flat(batches) == [0, 1, 2, 3, 4] * 2


class NotImplementedLength(Numbers):
    def __len__(self) -> int:
        raise NotImplementedError


def test_a_stream_whose_length_is_not_implemented_has_none() -> None:
    (loader,) = loaders(NotImplementedLength(5), 1)
    assert loader.samples is None
    assert flat(global_batches([steps_of(loader)])) == [0, 1, 2, 3, 4]


class OfRank(Numbers):
    """Divides itself by rank, which the Loader does too."""

    def __iter__(self) -> Iterator[Any]:
        yield from ([float(n)] for n in range(comm.rank(), self.samples, comm.world_size()))


class Object:
    """Its text has its address."""


class Objects(Numbers):
    def __iter__(self) -> Iterator[Any]:
        return (Object() for _ in range(self.samples))


class ThatSaysSo(OfRank):
    split_by_rank = True


def warned_of(dataset: Any, workers: int, position: int = 0) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        loader = Loader(dataset, global_batch_size=4, max_epochs=1, num_workers=workers, collate_fn=len)
        loader.position = position
        next(iter(loader))
        warn_of_split(loader.begins_with)
    return out.getvalue()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_divides_itself_by_rank_is_reported_with_its_first_samples(workers: int) -> None:
    first, second = on_ranks(2, warned_of, OfRank(20), workers)
    assert (
        "warning: the stream begins with [0.0] on rank 0 and with [1.0] on rank 1: a Loader takes each for the whole" in first
    )
    assert "the stream begins with" not in second


@pytest.mark.parametrize("dataset", [Numbers(20), SplitsItself(20), Shuffles(20), ThatSaysSo(20), Objects(20)])
def test_other_streams_are_not(dataset: Any) -> None:
    assert on_ranks(2, warned_of, dataset, 0) == ["", ""]


def test_a_stream_that_is_resumed_is_not_compared() -> None:
    assert on_ranks(2, warned_of, OfRank(20), 0, 4) == ["", ""]


def trained(dataset: Any) -> str:
    model = nn.Linear(1, 1)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        rankwise.Trainer(
            model=model, optimizer=torch.optim.SGD(model.parameters(), 0.001), actions=[rankwise.actions.Log(every_steps=1)],
            train_data=Loader(dataset, global_batch_size=4, max_epochs=1, collate_fn=torch.tensor),
            step_fn=lambda model, batch: (model(batch).sum(), len(batch)),
        ).fit()  # fmt: skip
    return out.getvalue()


def test_a_trainer_says_so_at_its_first_step() -> None:
    printed, _ = on_ranks(2, trained, OfRank(20))
    assert (
        0
        <= printed.index("warning: the stream begins with [0.0] on rank 0 and with [1.0] on rank 1")
        < printed.index("epoch 1")
    )
