"""Global batches by length, or by a batch sampler: the same on any number of ranks, of similar cost, no sample lost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from batches import all_of, flat, global_batches, loaders, steps_of
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, RandomSampler, WeightedRandomSampler

from rankwise.data import Loader, Order, batching
from rankwise.data.batching import ByCount, BySampler, ByTokens, LengthBatches, LengthOf, balanced_runs
from rankwise.data.order import Indices
from rankwise.errors import ConfigError, DataError

SAMPLES = 211
LENGTHS = np.random.default_rng(5).integers(1, 60, SAMPLES)
TOKENS = 240


class Items(Dataset[int]):
    """Sample k is the number k."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Sized(Items):
    lengths = LENGTHS


def padded(samples: list[int]) -> int:
    return int(len(samples) * max(LENGTHS[samples], default=0))


def by_tokens(tokens: float = TOKENS, **given: Any) -> dict[str, Any]:
    batches = LengthBatches(global_tokens=tokens, **{"lengths": LENGTHS, "pool": 64, **given})
    return {"global_batch_size": None, "batches": batches}


BY_TOKENS = by_tokens()


# --- by count


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_steps_of_an_epoch_are_as_many_as_its_global_batches(drop_last: bool) -> None:
    for samples, size in itertools.product((1, 8, 9, 211), (1, 4, 9)):
        batching = ByCount(Order(samples), size, drop_last)
        sizes = [len(batch) for _, _, [batch] in batching.plan(epoch=0, start=0, rank=0, world_size=1, accumulate=1)]
        assert batching.steps_per_epoch() == len(sizes), (samples, size)
        assert min(sizes, default=size) == batching.fewest(), (samples, size)


def test_tokens_of_one_rank_and_micro_batch_count_once_for_each_of_them() -> None:
    for world_size, accumulate in ((1, 1), (2, 1), (3, 2)):
        batches = LengthBatches(40, lengths=LENGTHS, pool=64)
        expected = all_of(Items(), 1, **by_tokens(40 * world_size * accumulate))
        assert all_of(Items(), world_size, global_batch_size=None, batches=batches, accumulate=accumulate) == expected
    for tokens in ({}, {"tokens": 5, "global_tokens": 9}):
        with pytest.raises(ConfigError, match=r"give tokens \(per rank and micro-batch\) or global_tokens"):
            LengthBatches(**tokens)  # type: ignore[arg-type]


# --- by tokens


def test_each_sample_of_an_epoch_once_within_the_tokens_and_alike_on_every_number_of_ranks() -> None:
    expected = all_of(Items(), 1, max_epochs=2, seed=7, **BY_TOKENS)
    assert sorted(flat(expected)) == sorted([*range(SAMPLES)] * 2)
    assert all(padded(batch) <= TOKENS for batch in expected)
    assert len({len(batch) for batch in expected}) > 4
    for world_size, accumulate in itertools.product((1, 2, 3, 5), (1, 2)):
        got = all_of(Items(), world_size, accumulate=accumulate, max_epochs=2, seed=7, **BY_TOKENS)
        assert got == expected, (world_size, accumulate)
    first, second = expected[: len(expected) // 2], expected[len(expected) // 2 :]
    assert {tuple(sorted(b)) for b in first} != {tuple(sorted(b)) for b in second}  # another order in each epoch


def test_global_batches_are_as_full_as_sorted_pools_make_them_and_come_in_no_order_of_length() -> None:
    batches = all_of(Items(), 1, seed=7, **by_tokens(pool=None))
    assert sum(LENGTHS) / sum(map(padded, batches)) > 0.93  # the rest is padding
    assert sum(map(padded, batches)) / (TOKENS * len(batches)) > 0.85  # the rest is unused
    assert sum(LENGTHS) / sum(map(padded, all_of(Items(), 1, global_batch_size=7))) < 0.65  # of batches by count
    longest = [int(max(LENGTHS[batch])) for batch in batches]
    ascends = sum(a < b for a, b in itertools.pairwise(longest)) / (len(longest) - 1)
    assert 0.25 < ascends < 0.75


def test_all_micro_batches_of_a_step_cost_about_the_same() -> None:
    settings = by_tokens(1500, pool=None)
    for world_size, accumulate in ((2, 1), (4, 1), (2, 3)):
        per_rank = [steps_of(loader) for loader in loaders(Items(), world_size, accumulate=accumulate, **settings)]
        slowest = sum(max(padded(micro) for rank in step for micro in rank) for step in zip(*per_rank, strict=True))
        fair = sum(LENGTHS) / (world_size * accumulate)
        assert slowest / fair < 1.35, (world_size, accumulate, slowest / fair)
        for step in zip(*per_rank, strict=True):
            micro_batches = [micro for rank in step for micro in rank]
            assert len(micro_batches) == min(len(flat(micro_batches)), world_size * accumulate)


def test_runs_are_of_the_least_largest_cost_and_none_is_empty_if_that_can_be() -> None:
    def cost(lengths: list[float], runs: list[tuple[int, int]]) -> float:
        return max(((b - a) * lengths[b - 1] for a, b in runs if b > a), default=0)

    random = np.random.default_rng(1)
    for samples, parts in itertools.product(range(8), (1, 2, 3, 4)):
        lengths = sorted(random.integers(0, 20, samples).astype(float).tolist())
        runs = balanced_runs(lengths, parts)
        assert len(runs) == parts
        assert [k for a, b in runs for k in range(a, b)] == list(range(samples))
        assert sum(b > a for a, b in runs) == min(samples, parts)
        inner = itertools.combinations_with_replacement(range(samples + 1), parts - 1)
        ways = [list(itertools.pairwise((0, *cuts, samples))) for cuts in inner]
        allowed = [way for way in ways if sum(b > a for a, b in way) == min(samples, parts)]
        assert cost(lengths, runs) <= min(cost(lengths, way) for way in allowed) * (1 + 1e-6)


def test_a_sample_longer_than_the_tokens_is_a_batch_of_its_own_and_a_number_of_samples_is_the_most() -> None:
    batches = all_of(Items(), 3, **by_tokens(30))
    assert sorted(flat(batches)) == list(range(SAMPLES))
    assert all(padded(batch) <= 30 or len(batch) == 1 for batch in batches)
    assert any(padded(batch) > 30 for batch in batches)
    batches = all_of(Items(), 2, **by_tokens(max_samples=6))
    assert sorted(flat(batches)) == list(range(SAMPLES))
    assert max(map(len, batches)) == 6


def test_workers_change_nothing_and_lengths_come_from_a_function_or_the_dataset_too() -> None:
    expected = all_of(Items(), 2, seed=3, **BY_TOKENS)
    assert all_of(Items(), 2, seed=3, workers=2, **BY_TOKENS) == expected
    asked: list[int] = []

    def length(index: int) -> int:
        asked.append(index)
        return int(LENGTHS[index])

    assert all_of(Items(), 1, seed=3, **by_tokens(lengths=length)) == expected
    assert sorted(asked) == list(range(SAMPLES))
    assert all_of(Sized(), 2, seed=3, **by_tokens(lengths=None)) == expected


def test_without_shuffling_the_batches_of_each_pool_come_from_the_shortest_on() -> None:
    batches = all_of(Items(), 2, shuffle=False, **BY_TOKENS)
    assert batches == all_of(Items(), 1, shuffle=False, max_epochs=1, seed=9, **BY_TOKENS)
    assert sorted(flat(batches)[:64]) == list(range(64))
    assert [int(LENGTHS[k]) for k in flat(batches)[:64]] == sorted(LENGTHS[:64].tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_by_tokens_go_on_anywhere_on_another_number_of_ranks(workers: int, capsys: Any) -> None:
    expected = all_of(Items(), 1, seed=3, max_epochs=2, **BY_TOKENS)
    for stop in (*range(0, len(expected), 3), len(expected) // 2) if workers == 0 else (4,):
        first = loaders(Items(), 3, seed=3, max_epochs=2, workers=workers, **BY_TOKENS)
        got = global_batches([steps_of(loader, stop) for loader in first])
        states = [loader.state_dict() for loader in first]
        assert all(state == states[0] for state in states)
        other = by_tokens(999, pool=None)
        second = loaders(Items(), 2, seed=3, max_epochs=2, workers=workers, accumulate=2, **other)
        for loader in second:
            loader.load_state_dict(states[0])
        assert second[0].accumulate == 2  # a micro-batch must not become larger
        got += global_batches([steps_of(loader) for loader in second])
        assert got == expected, stop
    assert "resuming with the checkpoint's global batch of 240 tokens instead of 999" in capsys.readouterr().out


def test_lengths_that_changed_since_the_checkpoint_are_an_error_in_the_middle_of_a_batch() -> None:
    (loader,) = loaders(Items(), 1, **{**BY_TOKENS, "shuffle": False})
    steps_of(loader, 2)
    (other,) = loaders(Items(), 1, **by_tokens(lengths=LENGTHS * 3 + 7), shuffle=False)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match=f"position {loader.position} of epoch 0 is in the middle of a global batch"):
        steps_of(other)


def test_batches_by_another_measure_are_another_training() -> None:
    (tokens,) = loaders(Items(), 1, **BY_TOKENS)
    (count,) = loaders(Items(), 1)
    (sampler,) = loaders(Items(), 1, global_batch_size=None, batches=Batches())
    for one, other in itertools.permutations((tokens, count, sampler), 2):
        with pytest.raises(ConfigError, match=r"batches by=.*start a new run"):
            one.load_state_dict(other.state_dict())


def test_a_resume_of_a_million_samples_plans_one_pool() -> None:
    planned: list[int] = []

    class Counts(ByTokens):
        def _of_pool(self, epoch: int, number: int) -> list[Indices]:
            planned.append(number)
            return super()._of_pool(epoch, number)

    lengths = np.random.default_rng(0).integers(50, 1500, 1_000_000)
    batching = Counts(Order(1_000_000, 1), LengthOf(lengths, 1_000_000), 30_000.0)
    start = 700 * batching.pool
    stop, _, [samples] = next(batching.plan(epoch=2, start=start, rank=0, world_size=1, accumulate=1))
    assert planned == [700]
    assert stop == start + len(samples)
    assert batching.pool == 32 * batching.size


def test_the_indices_that_were_handed_out_are_told() -> None:
    for settings in (BY_TOKENS, {}, {"global_batch_size": None, "batches": Batches()}):
        for loader in loaders(Items(), 2, accumulate=2, **settings):
            for micro_batches in loader:
                assert [batch.tolist() for batch in micro_batches] == loader.indices


# --- by a batch sampler


class Batches:
    """Batches of different sizes, other ones in each epoch, drawn with the global generators."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(SAMPLES - self.epoch).tolist()
        while order:
            size = min(int(np.random.randint(1, 9)), len(order))
            yield [order.pop() for _ in range(size)]


def test_a_batch_sampler_names_global_batches_that_are_shared_out_over_ranks() -> None:
    settings: dict[str, Any] = {"global_batch_size": None, "batches": Batches(), "max_epochs": 2, "seed": 4}
    expected = all_of(Items(), 1, **settings)
    assert sorted(flat(expected)) == sorted([*range(SAMPLES), *range(SAMPLES - 1)])
    for world_size, accumulate in itertools.product((1, 2, 3, 12), (1, 2)):
        assert all_of(Items(), world_size, accumulate=accumulate, **settings) == expected
    assert all_of(Items(), 2, workers=1, **settings) == expected
    assert all_of(Items(), 2, **{**settings, "seed": 5}) != expected


def test_a_step_does_not_look_at_all_batches_of_a_batch_sampler() -> None:
    """It takes as long for a million of them as for ten."""

    class Listed(list[Indices]):
        def __iter__(self) -> Iterator[Indices]:
            raise AssertionError("a step has looked at all batches")

    order = BySampler([[0, 1], [2], [3, 4]], 0, None, 5)
    steps = order.plan(epoch=0, start=0, rank=0, world_size=1, accumulate=1)
    assert next(steps)[:2] == (2, False)
    order._batches = Listed(order._batches)
    assert [step[:2] for step in steps] == [(3, False), (5, True)]


def test_torchs_batch_sampler_works_as_it_is() -> None:
    sampler = BatchSampler(RandomSampler(range(SAMPLES)), 8, drop_last=True)
    batches = all_of(Items(), 3, global_batch_size=None, batches=sampler, max_epochs=2)
    assert [len(batch) for batch in batches] == [8] * (2 * (SAMPLES // 8))
    assert batches[: SAMPLES // 8] != batches[SAMPLES // 8 :]


@pytest.mark.parametrize("state", [None, {"batches by": "a batch sampler"}], ids=["new", "of an earlier version"])
def test_the_sampler_inside_a_batch_sampler_knows_the_epoch(state: dict[str, str] | None) -> None:
    inner: Any = DistributedSampler(range(SAMPLES), num_replicas=1, rank=0)
    [loader] = loaders(Items(), 1, global_batch_size=None, batches=BatchSampler(inner, 8, drop_last=True), max_epochs=2)
    if state is not None:
        loader.load_state_dict({name: value for name, value in loader.state_dict().items() if name != "epoch passed on"})
    batches = global_batches([steps_of(loader)])
    first, second = batches[: SAMPLES // 8], batches[SAMPLES // 8 :]
    assert (first == second) == (state is not None)  # a run that has begun with one order keeps it


class Shuffled:
    """A batch sampler with a generator of its own, of any kind."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        draws = {torch.Generator: lambda g: torch.randint(1 << 30, (), generator=g).item(), Random: Random.random}
        draw = draws.get(type(self.generator), lambda g: g.uniform())
        order = sorted(range(SAMPLES), key=lambda _: draw(self.generator))
        return iter([order[k : k + 8] for k in range(0, SAMPLES, 8)])


OWN: dict[str, Callable[[], Any]] = {
    "torch, inside torch's": lambda: BatchSampler(
        WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), 40, generator=torch.Generator().manual_seed(3)), 8, False
    ),
    "torch": lambda: Shuffled(torch.Generator().manual_seed(3)),
    "numpy": lambda: Shuffled(np.random.default_rng(3)),
    "numpy's old": lambda: Shuffled(np.random.RandomState(3)),
    "Python": lambda: Shuffled(Random(3)),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_sampler_with_a_generator_of_its_own_goes_on_with_the_same_batches(kind: str) -> None:
    settings: dict[str, Any] = {"global_batch_size": None, "max_epochs": 3}
    whole = all_of(Items(), 1, batches=OWN[kind](), **settings)
    per_epoch = len(whole) // 3
    assert whole[:per_epoch] != whole[per_epoch : 2 * per_epoch] != whole[2 * per_epoch :]
    assert all_of(Items(), 3, batches=OWN[kind](), **settings) == whole
    assert all_of(Items(), 1, batches=OWN[kind](), **settings, seed=1) != whole
    for stop in (1, per_epoch, per_epoch + 2, 2 * per_epoch + 1):
        [loader] = loaders(Items(), 1, batches=OWN[kind](), **settings)
        assert len(list(itertools.islice(loader, stop))) == stop
        [other] = loaders(Items(), 1, batches=OWN[kind](), **settings)
        other.load_state_dict(loader.state_dict())
        assert global_batches([steps_of(other)]) == whole[stop:]


def test_a_generator_of_a_sampler_draws_for_others_as_if_no_loader_used_it() -> None:
    generator, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    [loader] = loaders(Items(), 1, global_batch_size=None, max_epochs=2, batches=Shuffled(generator))
    assert len(list(loader)) == 2 * math.ceil(SAMPLES / 8)
    assert torch.equal(torch.randn(9, generator=generator), torch.randn(9, generator=other))
    assert generator.initial_seed() == 3


def test_a_run_of_an_earlier_version_keeps_the_order_that_its_first_epoch_has_begun_with() -> None:
    [loader] = loaders(Items(), 1, global_batch_size=None, max_epochs=1, batches=Shuffled(torch.Generator().manual_seed(3)))
    state = loader.state_dict()
    assert state.pop("own generators keyed")
    loader.load_state_dict(state)
    assert global_batches([steps_of(loader)]) == [*Shuffled(torch.Generator().manual_seed(3))]


def test_a_batch_sampler_with_lengths_is_shared_out_by_cost() -> None:
    settings: dict[str, Any] = {"global_batch_size": None, "batches": Batches()}
    expected = all_of(Sized(), 1, **settings)
    per_rank = [steps_of(loader) for loader in loaders(Sized(), 3, **settings)]
    assert [sorted(b) for b in global_batches(per_rank)] == [sorted(b) for b in expected]
    assert global_batches(per_rank) == expected  # sorted in both
    evenly = [steps_of(loader) for loader in loaders(Items(), 3, **settings)]

    def slowest(ranks: list[Any]) -> int:
        return sum(max(padded(flat(rank)) for rank in step) for step in zip(*ranks, strict=True))

    assert slowest(per_rank) < 0.9 * slowest(evenly)


def test_a_batch_sampler_goes_on_anywhere_on_another_number_of_ranks() -> None:
    settings: dict[str, Any] = {"global_batch_size": None, "max_epochs": 2, "seed": 4}
    expected = all_of(Items(), 1, batches=Batches(), **settings)
    for stop in range(0, len(expected), 5):
        first = loaders(Items(), 3, batches=Batches(), **settings)
        got = global_batches([steps_of(loader, stop) for loader in first])
        second = loaders(Items(), 2, batches=Batches(), **settings)
        for loader in second:
            loader.load_state_dict(first[0].state_dict())
        assert got + global_batches([steps_of(loader) for loader in second]) == expected, stop


# --- what is refused


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, r"give batch_size \(per rank and micro-batch\), global_batch_size \(of a whole step\), or batches"),
        (
            by_tokens(100, lengths=None),
            r"needs to know how long samples are: give lengths=\[\.\.\.\].*add an attribute `lengths` to Items",
        ),
        (by_tokens(9) | {"drop_last": True}, "drop_last works only with batch_size or global_batch_size"),
        (
            {"global_batch_size": 5, "batches": Batches()},
            "global_batch_size and batches all set the batch; keep one of them",
        ),
        ({"batches": iter([[1]])}, "list_iterator cannot be read once per epoch; give lists of indices"),
        ({"batches": RandomSampler(range(9))}, r"yields int, not lists of indices; wrap it in torch.utils.data.BatchSampler"),
        (
            {"batches": BatchSampler(DistributedSampler(range(9), num_replicas=2, rank=0), 2, False)},  # type: ignore[arg-type]
            "DistributedSampler divides the samples among ranks, and the Loader does this too",
        ),
    ],
)
def test_what_cannot_work_is_said_with_the_cure(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        loaders(Items(), 1, **{"global_batch_size": None, **settings})


def test_a_stream_is_cut_by_count_alone() -> None:
    stream: Any = type("Stream", (), {"__iter__": lambda self: iter([1, 2, 3])})()
    for batches in (LengthBatches(5), [[1]]):
        with pytest.raises(
            ConfigError,
            match=r"batches=\.\.\. cannot be used with a stream \(Stream\); give global_batch_size instead",
        ):
            loaders(stream, 1, global_batch_size=None, batches=batches)


@pytest.mark.parametrize("lengths", [["3", "x"], [[1], [1, 2]]])
def test_lengths_that_are_no_numbers_are_a_data_error(lengths: Any) -> None:
    with pytest.raises(DataError, match=r"^lengths is \[.*; give one number per sample$"):
        LengthOf(lengths, 2)


def test_lengths_that_are_none_are_a_data_error() -> None:
    for lengths, text in (
        (LENGTHS[:5], r"shape \(5,\) for 211 samples"),
        (LENGTHS - 30.0, "the length of sample .* is -"),
        (lambda index: float("nan"), "the length of sample 0 is nan"),
    ):
        with pytest.raises(DataError, match=text):
            loaders(Items(), 1, **by_tokens(lengths=lengths))
    with pytest.raises(DataError, match=r"the batch sampler .list. yields no batch in epoch 0"):
        loaders(Items(), 1, global_batch_size=None, batches=[[]])


def test_a_batch_sampler_that_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        def __iter__(self) -> Iterator[list[int]]:
            return itertools.repeat([1, 2])

    monkeypatch.setattr(batching, "_MOST_LISTED", 5000)
    with pytest.raises(DataError, match=r"^the batch sampler \(Endless\) has not ended after 5002 samples, .* one that ends"):
        next(iter(Loader(list(range(4)), batches=Endless())))
    assert len(list(Loader(list(range(4)), batches=[[0]] * 4999, max_epochs=1))) == 4999  # few samples may be used often


@pytest.mark.parametrize("index", [211, -1])
def test_an_index_that_the_dataset_does_not_have_is_a_data_error_with_the_sampler(index: int) -> None:
    with pytest.raises(DataError, match=rf"batches: list yields the index {index}, and the dataset has 211 samples, 0 to 210"):
        loaders(Items(), 1, global_batch_size=None, batches=[[0, index]])


def test_what_there_is_to_train_on_is_described_without_a_number_of_steps() -> None:
    (loader,) = loaders(Items(), 1, **BY_TOKENS)
    assert loader.steps_per_epoch is None
    assert loader.describe() == "211 samples"
    assert loader.describe_batch() == "global batch 240 tokens (about 7 samples, 64 sorted together)"
    (short,) = loaders(Items(), 1, **by_tokens(30, lengths=[20] * 105 + [40] * 106))
    assert "(about 1 sample, 64 sorted together; 50 % of the samples are longer: batches of one)" in short.describe_batch()
    two: Loader = loaders(Items(), 2, global_batch_size=None, batches=Batches(), accumulate=2)[0]
    assert two.describe_batch() == "global batch by a batch sampler (Batches), up to 8 samples over 2 ranks x 2 accumulated"


def test_of_many_samples_some_are_asked_for_their_length_to_estimate_the_size_of_a_batch() -> None:
    asked = []
    lengths = LengthOf(lambda index: asked.append(index) or 10.0, 100_000)  # type: ignore[func-returns-value]
    assert ByTokens(Order(100_000), lengths, tokens=100).size == 10
    assert 1_000 < len(asked) < 2_000


class SeedsItself(Batches):
    def set_epoch(self, epoch: int) -> None:
        torch.manual_seed(100 + epoch)


def test_a_batch_sampler_that_seeds_does_not_change_the_streams_of_the_training() -> None:
    def drawn(batches: Any) -> list[float]:
        torch.manual_seed(7)
        (loader,) = loaders(Items(), 1, global_batch_size=None, batches=batches, max_epochs=2)
        return [torch.rand(()).item() for _ in zip(loader, range(60), strict=False)]

    assert drawn(SeedsItself()) == drawn(BatchSampler(range(SAMPLES), 4, drop_last=False))[:60]


@pytest.mark.parametrize(
    "batch", [[0.5, 1.9], np.array([True] * SAMPLES), [True, False], [None], [{"a": 1}], ["3"], [[1], [2, 3]], [[1, 2]]]
)
def test_a_batch_that_is_no_list_of_whole_numbers_is_a_config_error(batch: Any) -> None:
    with pytest.raises(ConfigError, match=r"^batches: list yields .*; give lists of indices, whole numbers from 0 to 210$"):
        next(iter(loaders(Items(), 1, global_batch_size=None, batches=[batch])[0]))


@pytest.mark.parametrize(
    "batch", [(3, 1), np.array([3, 1]), torch.tensor([3, 1]), [torch.tensor(3), np.int32(1)], range(3, 0, -2)]
)
def test_a_batch_may_have_whole_numbers_of_any_kind(batch: Any) -> None:
    assert all_of(Items(), 1, global_batch_size=None, batches=[batch]) == [[3, 1]]
