"""The gradient of the whole global batch, compared with a plain loop in one process; and one message per step."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from ranks import RankError, on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rankwise
from rankwise.agent import private_names
from rankwise.data.loader import share
from rankwise.dist import accelerator, comm, shared_memory
from rankwise.errors import ConfigError, StepError
from rankwise.sync import AllReduce, Mine, Shared, StepResult
from rankwise.training.precision import LossScale

GLOBAL_BATCHES = (13, 13, 5, 1)
"""The number of samples in each optimizer step: full batches, a smaller one, and one in which all ranks but one have
nothing."""

TOKENS = [3, 1, 7, 2, 5, 1, 1, 9, 4, 2, 6, 8, 1]
"""For each sample, the number of tokens over which its loss is summed."""

ACCUMULATE = (1, 2, 4)
CLIP = (None, 0.05, 1e6)
WAYS = (False, True)


def sequences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each sample of all steps: inputs of different lengths (tokens x 6) and targets (tokens)."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(t, 6, dtype=torch.float64, generator=generator), torch.randint(0, 4, (t,), generator=generator))
        for _, t in zip(range(sum(GLOBAL_BATCHES)), itertools.cycle(TOKENS), strict=False)
    ]


def plain_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def loss_of(model: nn.Module, samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, int]:
    """(sum, count) over the tokens of all samples."""
    x, y = torch.cat([x for x, _ in samples]), torch.cat([y for _, y in samples])
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


Flat = list[npt.NDArray[np.float64]]


def flat_parameters(model: nn.Module) -> npt.NDArray[np.float64]:
    # numpy: a process that exits cannot send a tensor.
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]).numpy()


def same(ours: Flat, others: Flat) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, others, strict=True))


def distance(ours: Flat, others: Flat) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, others, strict=True))


def plain_loop(clip_norm: float | None) -> tuple[Flat, list[tuple[int, float]]]:
    """A single process over the whole global batch. Returns the parameters, and (count, gradient norm), after each step."""
    model = plain_model()
    optimizer = adamw(model)
    data = iter(sequences())
    parameters, results = [], []
    for size in GLOBAL_BATCHES:
        total, count = loss_of(model, list(itertools.islice(data, size)))
        optimizer.zero_grad()
        (total / count).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm if clip_norm is not None else math.inf)
        optimizer.step()
        parameters.append(flat_parameters(model))
        results.append((count, float(norm)))
    return parameters, results


def runs(parts: int, low: int, high: int) -> list[range]:
    """Positions [low, high) in `parts` micro-batches; those without a sample are skipped."""
    n = high - low
    cuts = [low + n * k // parts for k in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(cuts) if a < b]


def parallel_loop(
    accumulate: int,
    clip_norm: float | None,
    nominal: float = 1.0,
    spoil: bool = True,
    after_step: Callable[[torch.optim.Optimizer], None] | None = None,
    overlap: bool | None = None,
) -> tuple[Flat, list[StepResult]]:
    """The same on this rank's part of each global batch."""
    rank, world_size = comm.rank(), comm.world_size()
    model = plain_model()
    if spoil and rank > 0:
        with torch.no_grad():  # attach makes the ranks equal, whatever they had before
            for parameter in model.parameters():
                parameter.add_(rank)
    optimizer = adamw(model)
    sync = AllReduce(overlap=overlap).attach(model, optimizer, clip_norm=clip_norm, typical_count=nominal)
    data = sequences()
    parameters, results = [], []
    start = 0
    for size in GLOBAL_BATCHES:
        micro_batches = runs(accumulate, *share(start, start + size, rank, world_size))
        start += size
        for i, positions in enumerate(micro_batches):
            loss_sum, count = loss_of(model, [data[p] for p in positions])
            sync.backward(loss_sum, count if i % 2 == 0 else torch.tensor(count), last=i == len(micro_batches) - 1)
        results.append(sync.step())
        if after_step is not None:
            after_step(optimizer)
        parameters.append(flat_parameters(model))
    return parameters, results


def all_configurations(overlap: bool | None) -> dict[tuple[int, float | None, float], tuple[Flat, list[StepResult]]]:
    return {
        (accumulate, clip, nominal): parallel_loop(accumulate, clip, nominal, overlap=overlap)
        for accumulate, clip, nominal in itertools.product(ACCUMULATE, CLIP, (1.0, 37.0))
    }


@pytest.mark.parametrize(
    ("n", "overlap", "backend"), [(1, None, None), *((n, way, None) for n in (2, 3, 4) for way in WAYS), (3, False, "gloo")]
)
@pytest.mark.one_in(3)
def test_parameters_are_those_of_a_plain_loop_over_the_global_batch(n: int, overlap: bool | None, backend: str | None) -> None:
    answers = on_ranks(n, all_configurations, overlap, init={"backend": backend})
    for clip in CLIP:
        expected, figures = plain_loop(clip)
        if clip == 0.05:
            assert any(norm > 0.05 for _, norm in figures), "the case of clipping does not clip"
        for accumulate, nominal in itertools.product(ACCUMULATE, (1.0, 37.0)):
            for answer in answers:
                parameters, results = answer[accumulate, clip, nominal]
                assert distance(parameters, expected) < 1e-10
                for (mine, shared), (count, norm) in zip(results, figures, strict=True):
                    assert shared is not None
                    assert mine == (count, shared.grad_norm, True)
                    assert (shared.total, shared.finite, shared.skipped) == (count, True, 0)
                    assert abs(shared.grad_norm - norm) < 1e-10
    first = answers[0]
    for answer in answers[1:]:
        for key, (parameters, results) in first.items():
            assert same(parameters, answer[key][0]), "ranks drifted apart"
            assert results == answer[key][1]


def test_a_nominal_count_changes_no_bit() -> None:
    expected, _ = parallel_loop(2, 0.05, 1.0)
    for nominal in (0.1, 37.0, 64.0, 1e6):
        assert same(parallel_loop(2, 0.05, nominal)[0], expected)


def test_a_clip_norm_of_nothing_does_not_clip() -> None:
    expected, _ = parallel_loop(1, None)
    for clip in (0.0, -1.0):
        assert same(parallel_loop(1, clip)[0], expected)


def converted(layer: int | None, overlap: bool = False) -> Flat:
    """The parameters after each step. `layer`: which one (-1: all) is float64 for a moment, in a step and between two."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    model[1].unused = nn.Parameter(torch.ones(2))
    optimizer = adamw(model)
    sync = AllReduce(overlap=overlap).attach(model, optimizer)
    part = {None: nn.Identity(), -1: model}.get(layer) or model[layer or 0]
    parameters = []
    for step in range(4):
        for k in range(2):
            sync.backward(model(torch.full((1, 6), 1.0 + comm.rank() + step + k)).square().sum(), 1, last=k == 1)
            if (step, k) in ((1, 0), (2, 1)):
                part.double().float()
        sync.step()
        parameters.append(flat_parameters(model))
        if step == 0:
            part.double().float()
    return parameters


@pytest.mark.parametrize("layer", [-1, 0, 2])
def test_a_model_that_was_converted_and_back_is_trained_with_the_gradients_of_all_ranks(layer: int) -> None:
    first, second = on_ranks(2, converted, layer)
    assert same(first, second)
    assert same(first, on_ranks(2, converted, None)[0])


def converted_for_good(overlap: bool) -> list[str]:
    said = []
    for between in (lambda optimizer: None, lambda optimizer: optimizer.zero_grad()):
        model = nn.Linear(6, 2)
        sync = AllReduce(overlap=overlap).attach(model, optimizer := adamw(model))
        between(optimizer)
        model.double()
        if comm.is_main():  # a rank without a sample sees it, too
            sync.backward(model(torch.ones(1, 6, dtype=torch.float64)).sum(), 1, last=True)
        with pytest.raises(StepError) as caught:
            sync.step()
        said.append(str(caught.value))
    return said


def test_a_model_that_has_another_dtype_than_its_gradients_is_an_error_on_all_ranks() -> None:
    for said in on_ranks(2, converted_for_good, False):
        for text in said:
            assert text.startswith("the parameters were torch.float32 on cpu at the start of the training, and are torch.f")
    for said in on_ranks(2, converted_for_good, True):
        assert all(text.startswith("the gradients were not sent: DDP's reducer lost the parameters") for text in said)
    with pytest.raises(RankError, match="DDP's reducer lost the parameters"):
        on_ranks(2, converted, -1, True)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError("out of memory")


def given_up(fails: bool, overlap: bool, last: bool = False) -> Any:
    """The last layer has its gradient when the pass fails."""
    model = plain_model()
    sync = AllReduce(overlap=overlap).attach(model, adamw(model))
    data, stepped = sequences(), []
    for step in range(3):
        if fails and step == 1 and not (last and comm.rank() == 1):
            handle = model[2].register_forward_pre_hook(lambda _, inputs: Fails.apply(inputs[0]))
            total, count = loss_of(model, data[:4])
            handle.remove()
            with pytest.raises(RuntimeError, match="out of memory"):
                sync.backward(total, count, last=last)
        if not (fails and last and step == 1 and comm.rank() == 0):
            total, count = loss_of(model, data[4 * step : 4 * step + 3])
            sync.backward(total, count, last=True)
        stepped.append(sync.step().mine.stepped)
    return stepped, [flat_parameters(model)]


@pytest.mark.parametrize("overlap", WAYS)
def test_a_micro_batch_whose_backward_pass_failed_and_that_the_script_gives_up_counts_for_nothing(overlap: bool) -> None:
    for n in (1, 2):
        for reference, ours in zip(on_ranks(n, given_up, False, overlap), on_ranks(n, given_up, True, overlap), strict=True):
            assert ours[0] == [True] * 3
            assert same(reference[1], ours[1])


def test_a_step_whose_last_backward_pass_failed_while_gradients_were_sent_is_skipped_on_all_ranks() -> None:
    for stepped, _ in on_ranks(2, given_up, True, True, last=True):
        assert stepped == [True, False, True]


def without_targets(overlap: bool, accumulate: int) -> Flat:
    """Rank 1 has no target in its first micro-batches, so that their loss does not depend on the parameters."""
    model = plain_model()
    sync = AllReduce(overlap=overlap).attach(model, adamw(model))
    data = sequences()
    for step in range(3):
        for part in range(accumulate):
            begin = 8 * step + 2 * comm.rank() + 4 * part
            total, count = loss_of(model, data[begin : begin + 2])
            if comm.rank() == 1 and part == 0:
                total, count = torch.zeros((), dtype=torch.float64), 0
            sync.backward(total, count, last=part == accumulate - 1)
        sync.step()
    return [flat_parameters(model)]


@pytest.mark.parametrize("overlap", WAYS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_constant_loss_with_a_count_of_nothing_adds_nothing(overlap: bool, accumulate: int) -> None:
    model = plain_model()
    optimizer = adamw(model)
    data = sequences()
    for step in range(3):
        begins = [4 * part + 2 * rank for part in range(accumulate) for rank in range(2) if (part, rank) != (0, 1)]
        total, count = loss_of(model, [data[8 * step + begin + i] for begin in begins for i in range(2)])
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    for ours in on_ranks(2, without_targets, overlap, accumulate):
        assert np.allclose(ours[0], flat_parameters(model), rtol=1e-9, atol=0)


class UsedTwice(nn.Module):
    """One layer in two checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.shared, self.first(x) if _ == 0 else x, use_reentrant=self._reentrant)
        return x


def trained_twice(reentrant: bool, overlap: bool) -> Any:
    torch.manual_seed(0)
    model = UsedTwice(reentrant)
    sync = AllReduce(overlap=overlap).attach(model, adamw(model))
    for step in range(2):
        x = torch.arange(12, dtype=torch.float64).view(2, 6) / (3 + step + comm.rank())
        try:
            sync.backward(model(x).square().sum(), 2, last=True)
            sync.step()
        except StepError as error:
            return str(error)
    return [flat_parameters(model)]


def test_a_layer_that_is_used_in_two_checkpoints_has_the_gradient_of_both_or_is_an_error() -> None:
    expected = on_ranks(2, trained_twice, False, False)
    for reentrant, overlap in ((True, False), (False, True)):
        for theirs, ours in zip(expected, on_ranks(2, trained_twice, reentrant, overlap), strict=True):
            assert same(theirs, ours)
    for said in on_ranks(2, trained_twice, True, True):
        assert "in two reentrant checkpoints; give checkpoint(..., use_reentrant=False)" in said


def test_a_norm_of_just_the_clip_norm_is_not_clipped() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 5.0)
    sync = AllReduce().attach(model, torch.optim.SGD(model.parameters(), lr=1.0), clip_norm=2.0)
    sync.backward(model(torch.full((1,), 2.0, dtype=torch.float64)).sum(), 1)
    assert sync.step().mine.grad_norm == 2.0
    assert model.weight.item() == 3.0


# --- messages

COLLECTIVES = [
    "all_reduce", "broadcast", "barrier", "all_gather", "all_gather_object", "broadcast_object_list", "reduce", "gather",
    "scatter", "reduce_scatter", "all_gather_into_tensor", "reduce_scatter_tensor", "send", "recv", "isend", "irecv",
    "all_to_all", "all_to_all_single", "gather_object", "scatter_object_list", "all_reduce_coalesced", "monitored_barrier",
]  # fmt: skip


def count_collectives(overlap: bool | None) -> list[list[str]]:
    """The calls of torch.distributed in each step, and what the backend itself did in one."""
    called: list[str] = []

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counted(name, getattr(dist, name)))
    model = nn.Sequential(plain_model(), nn.BatchNorm1d(4).double())
    sync = AllReduce(overlap=overlap).attach(model, adamw(model), clip_norm=0.05)
    steps = []
    data = sequences()
    for size in (3, 1, 0):  # of this rank: three micro-batches, one, none
        called.clear()
        for k in range(size):
            sync.backward(*loss_of(model, [data[0]]), last=k == size - 1)
        sync.step()
        steps.append(list(called))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for last in (False, True):
            sync.backward(*loss_of(model, [data[0]]), last=last)
        sync.step()
        time.sleep(0.1)  # gloo's own thread notes the end of its work after we have its result
    events = [e.name for e in profile.events() if e.name.startswith("gloo:") or e.name.startswith("c10d::")]
    return [*steps, sorted(events)]


@pytest.mark.parametrize("overlap", WAYS)
def test_a_step_is_one_all_reduce_and_no_other_message_with_batch_norm_too(overlap: bool | None) -> None:
    for answer in on_ranks(2, count_collectives, overlap, init={"backend": "gloo"}):
        assert answer[:3] == [["all_reduce"]] * 3
        assert [e for e in answer[3] if e.startswith("gloo:")] == ["gloo:all_reduce"]
        assert [e for e in answer[3] if e.startswith("c10d::")] in ([], ["c10d::allreduce_"])


def count_in_memory() -> list[tuple[int, int]]:
    """How many collectives each step has: in shared memory, and of torch."""
    model = nn.Sequential(plain_model(), nn.BatchNorm1d(4).double())
    sync = AllReduce().attach(model, adamw(model), clip_norm=0.05)
    counts = []
    for size in (3, 1, 0):
        before, sent = shared_memory.begun, messages()
        for k in range(size):
            sync.backward(*loss_of(model, [sequences()[0]]), last=k == size - 1)
        sync.step()
        counts.append((shared_memory.begun - before, messages() - sent))
    return counts


def messages() -> int:
    return private_names.begun(dist.group.WORLD)


def test_a_step_of_ranks_on_one_host_is_one_all_reduce_in_memory_and_no_message() -> None:
    assert on_ranks(2, count_in_memory) == [[(1, 0)] * 3] * 2


def summed_and_mean(overlap: bool | None) -> tuple[float, float, str, int]:
    """(norm of the summed gradient, of the mean, how the strategy describes itself, bytes sent); equal counts on all ranks."""
    norms, told = [], []
    for reduce in ("sum", "mean"):
        model = plain_model()
        sync = AllReduce(overlap=overlap, reduce=reduce).attach(model, adamw(model))
        sync.backward(*loss_of(model, [sequences()[0]]))
        shared = sync.step().shared
        assert shared is not None
        norms.append(shared.grad_norm)
        told.append(sync.describe())
    return norms[0], norms[1], told[0], int(sync.figures()["sent_bytes"])


@pytest.mark.parametrize("overlap", WAYS)
def test_a_summed_gradient_is_the_mean_times_the_number_of_ranks(overlap: bool | None) -> None:
    gradient = 8 * sum(p.numel() for p in plain_model().parameters())
    for summed, mean, told, sent in on_ranks(3, summed_and_mean, overlap):
        assert summed == pytest.approx(3 * mean, rel=1e-12)
        assert told.endswith(", times 3, the number of ranks")
        assert gradient < sent < gradient + 8 * 30  # the tail of the message is short


# --- gradients that are not finite


def spoilt_steps(bad: float, spoil_count: bool, overlap: bool | None) -> list[Any]:
    """Steps 0 and 2 are good; in step 1 only the last rank has a bad gradient (or count)."""
    model = plain_model()
    optimizer = adamw(model)
    sync = AllReduce(overlap=overlap).attach(model, optimizer, clip_norm=1.0)
    seen: list[Any] = []
    for step in range(3):
        before = copy.deepcopy((flat_parameters(model), optimizer.state_dict()["state"]))
        loss_sum, count = loss_of(model, [sequences()[comm.rank() + step]])
        if step == 1 and comm.rank() == comm.world_size() - 1:
            loss_sum, count = (loss_sum, bad) if spoil_count else (loss_sum * bad, count)
        sync.backward(loss_sum, count)
        shared = sync.step().shared
        assert shared is not None
        after = (flat_parameters(model), optimizer.state_dict()["state"])
        kept = np.array_equal(before[0], after[0]) and all(
            torch.equal(value, after[1][k][name]) for k, state in before[1].items() for name, value in state.items()
        )
        seen.append((shared.finite, kept, bool(np.isfinite(after[0]).all()), after[0]))
    return seen


@pytest.mark.parametrize(("n", "overlap"), [(1, None), (3, False), (3, True)])
def test_a_gradient_that_is_not_finite_on_one_rank_leaves_the_step_out_on_all(n: int, overlap: bool | None) -> None:
    for bad, spoil_count in ((math.nan, False), (math.inf, False), (-math.inf, False), (math.nan, True)):
        answers = on_ranks(n, spoilt_steps, bad, spoil_count, overlap)
        for answer in answers:
            assert [finite for finite, *_ in answer] == [True, False, True]
            assert [kept for _, kept, *_ in answer] == [False, True, False]
            assert all(good for _, _, good, _ in answer)
            assert np.array_equal(answer[2][3], answers[0][2][3])


def step_over_nothing(overlap: bool | None) -> tuple[StepResult, bool]:
    model = plain_model()
    sync = AllReduce(overlap=overlap).attach(model, adamw(model))
    before = flat_parameters(model)
    result = sync.step()
    return result, np.array_equal(before, flat_parameters(model))


def test_a_step_over_nothing_changes_nothing() -> None:
    for n, overlap in ((1, None), (2, False), (2, True)):
        assert (
            on_ranks(n, step_over_nothing, overlap)
            == [(StepResult(Mine(0.0, 0.0, False), Shared(0.0, 0.0, True, 0)), True)] * n
        )


# --- users who change the gradients themselves


def zero_grad_between_steps(set_to_none: bool, overlap: bool | None) -> Flat:
    after = lambda optimizer: optimizer.zero_grad(set_to_none=set_to_none)  # noqa: E731
    return parallel_loop(2, 0.05, after_step=after, overlap=overlap)[0]


def test_zero_grad_between_steps_does_no_harm() -> None:
    expected = plain_loop(0.05)[0]
    for n, overlap in ((1, None), (2, False), (2, True)):
        for set_to_none in (True, False):
            for answer in on_ranks(n, zero_grad_between_steps, set_to_none, overlap):
                assert distance(answer, expected) < 1e-10


def discarded_gradient(set_to_none: bool, overlap: bool | None) -> tuple[list[float], list[float]]:
    """(the gradients after a step in which a first backward pass was discarded, the gradients without this first pass)."""
    both = []
    for discard in (True, False):
        model = plain_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = AllReduce(overlap=overlap).attach(model, optimizer)
        before = flat_parameters(model)
        if discard:
            sync.backward(loss_of(model, sequences()[:4])[0], 0)
            optimizer.zero_grad(set_to_none=set_to_none)
        if comm.rank() == comm.world_size() - 1:  # the other ranks do nothing after the discarded pass
            sync.backward(*loss_of(model, sequences()[4:6]))
        sync.step()
        both.append((before - flat_parameters(model)).tolist())
    return both[0], both[1]


def test_zero_grad_after_a_backward_discards_that_gradient() -> None:
    for n, overlap in ((1, None), (2, False), (2, True)):
        for set_to_none in (True, False):
            for discarded, never in on_ranks(n, discarded_gradient, set_to_none, overlap):
                assert discarded == never
                assert any(discarded)


def replaced_gradient(overlap: bool | None) -> bool:
    model = plain_model()
    sync = AllReduce(overlap=overlap).attach(model, torch.optim.SGD(model.parameters(), lr=1.0))
    expected = []
    sync.backward(*loss_of(model, sequences()[:1]))
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 3  # a tensor of the user
        expected.append(parameter.detach() - parameter.grad / TOKENS[0])
    sync.step()
    return all(torch.allclose(p, e, rtol=0, atol=1e-12) for p, e in zip(model.parameters(), expected, strict=True))


def test_a_gradient_that_the_user_replaced_is_the_one_that_counts() -> None:
    for overlap in WAYS:
        assert on_ranks(2, replaced_gradient, overlap) == [True, True]


# --- models of many kinds


class Tied(nn.Module):
    """An embedding used at both ends, a frozen part, and one parameter in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4).double()
        self.inner = nn.Linear(4, 4).double()
        self.frozen = nn.Linear(4, 4).double().requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float32))
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.head = nn.Linear(4, 5, bias=False).double()
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.frozen(torch.tanh(self.inner(self.embedding(words)))) * self.scale
        out: torch.Tensor = self.head(x * self.scalar)
        return out


def tied_model() -> Tied:
    torch.manual_seed(4)
    return Tied()


def grouped(model: Tied) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {"params": [model.embedding.weight], "weight_decay": 0.0, "lr": 0.02},
            {"params": [*model.inner.parameters(), model.scale], "weight_decay": 0.3},
            {"params": [*model.frozen.parameters(), model.scalar]},
        ],
        lr=0.05,
    )


def word_loss(model: nn.Module, words: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(model(words), (words + 1) % 5, reduction="sum"), len(words)


WORDS = torch.tensor([0, 1, 2, 3, 4, 4, 3, 2, 0, 0, 1])


def each_parameter(model: nn.Module) -> Flat:
    return [p.detach().clone().numpy() for p in model.parameters()]


def tied_plain(clip: float | None) -> Flat:
    model = tied_model()
    optimizer = grouped(model)
    for _ in range(4):
        total, count = word_loss(model, WORDS)
        optimizer.zero_grad()
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else math.inf)
        optimizer.step()
    return each_parameter(model)


def tied_parallel(clip: float | None, overlap: bool | None) -> tuple[Flat, bool, list[str]]:
    model = tied_model()
    sync = AllReduce(overlap=overlap).attach(model, grouped(model), clip_norm=clip)
    for _ in range(4):
        low, high = share(0, len(WORDS), comm.rank(), comm.world_size())
        sync.backward(*word_loss(model, WORDS[low:high]), last=True)
        sync.step()
    tied = model.head.weight is model.embedding.weight
    return each_parameter(model), tied, list(model.state_dict())


@pytest.mark.parametrize("clip", [None, 0.01])
def test_tied_frozen_and_mixed_parameters_in_groups_are_those_of_a_plain_loop(clip: float | None) -> None:
    expected = tied_plain(clip)
    begun = each_parameter(tied_model())
    names = [name for name, _ in tied_model().named_parameters()]
    for n, overlap in ((1, None), *itertools.product((2, 3), WAYS)):
        for parameters, tied, keys in on_ranks(n, tied_parallel, clip, overlap):
            assert tied
            assert keys == list(tied_model().state_dict())  # no prefix
            for name, ours, plain, before in zip(names, parameters, expected, begun, strict=True):
                assert ours.dtype == plain.dtype
                # The float32 parameter has a gradient of 24 bits, so what depends on it in float64 is not more exact.
                assert np.abs(ours - plain).max() < 1e-5, name
                assert np.array_equal(ours, before) == name.startswith("frozen"), name


def single_dtype(overlap: bool | None = None) -> Flat:
    model = tied_model()
    model.scale = nn.Parameter(model.scale.detach().double())
    sync = AllReduce(overlap=overlap).attach(model, grouped(model), clip_norm=0.01)
    for _ in range(4):
        low, high = share(0, len(WORDS), comm.rank(), comm.world_size())
        sync.backward(*word_loss(model, WORDS[low:high]))
        sync.step()
    return each_parameter(model)


def test_tied_and_frozen_parameters_in_float64_are_exact() -> None:
    expected = single_dtype()
    for n, overlap in itertools.product((2, 3), WAYS):
        for answer in on_ranks(n, single_dtype, overlap):
            assert distance(answer, expected) < 1e-10


# --- parameters without a gradient


class Choosing(nn.Module):
    """Which half a sample passes depends on the sample; one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([nn.Linear(6, 4).double(), nn.Linear(6, 4).double()])
        self.never = nn.Linear(3, 3).double()
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor, half: int) -> torch.Tensor:
        out: torch.Tensor = self.halves[half](x) + self.bias
        return out


CHOICES = ((0, 0, 0, 0), (0, 1, 0, 1), (1, 1, 1, 1), (1, 0, 0, 0), (0, 0, 0, 1))
"""For each step, the half that each of its four micro-batches uses."""


def choosing(positions: range, sync: AllReduce | None) -> Flat:
    """AdamW with weight decay, which changes a parameter whose gradient is zero, but not one without a gradient."""
    torch.manual_seed(3)
    model = Choosing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3)
    if sync is not None:
        sync.attach(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    parameters = []
    for choices in CHOICES:
        batches = [torch.randn(2, 6, dtype=torch.float64, generator=generator) for _ in choices]
        optimizer.zero_grad() if sync is None else None
        for i in positions:
            loss = model(batches[i], choices[i]).square().sum()
            if sync is None:
                (loss / 8).backward()
            else:
                sync.backward(loss, 2, last=i == positions[-1])
        sync.step() if sync is not None else optimizer.step()
        parameters.append(flat_parameters(model))
    return parameters


def choosing_on_ranks(overlap: bool | None) -> Flat:
    low, high = share(0, 4, comm.rank(), comm.world_size())
    return choosing(range(low, high), AllReduce(overlap=overlap))


@pytest.mark.parametrize(("n", "overlap"), [(1, None), *itertools.product((2, 3, 4), WAYS)])
def test_a_parameter_without_a_gradient_on_any_rank_is_left_alone_as_in_a_plain_loop(n: int, overlap: bool | None) -> None:
    expected = choosing(range(4), None)
    answers = on_ranks(n, choosing_on_ranks, overlap)
    for answer in answers:
        assert distance(answer, expected) < 1e-10
        assert same(answer, answers[0])


class Counts(nn.Module):
    """Keeps how often each class came, as the codebook of a VQ-VAE does."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.classes = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(3)
        self.together = together
        self.register_buffer("counts", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x.detach().sum(0)
        self.last.copy_(found)
        self.counts += rankwise.all_reduce(found) if self.together else found
        return self.classes(self.norm(x))


def kept_buffers(together: bool) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model = Counts(together)
    sync = AllReduce().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for _ in range(3):
            with sync.averaged():
                pass
            sync.backward(model(torch.full((2, 3), 1.0 + comm.rank())).sum(), 2)
            sync.step()
        with sync.averaged():
            return model.counts.tolist(), out.getvalue()


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("together", [False, True])
def test_buffers_that_each_rank_computes_from_its_own_samples_are_named_once(n: int, together: bool) -> None:
    (counts, said), *others = on_ranks(n, kept_buffers, together)
    assert counts == [2.0 * 3 * (sum(range(1, n + 1)) if together else 1)] * 3
    assert others == [(counts, "")] * (n - 1)
    warning = "warning: the ranks have different values of counts, which forward computes from each rank's own samples"
    assert said.count(warning) == said.count("different values") == (0 if n == 1 or together else 1), said


def test_parameters_without_a_gradient_are_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    choosing(range(4), AllReduce())
    said = [line for line in capfd.readouterr().out.splitlines() if "no gradient" in line]
    assert len(said) == 1
    assert "4 of 7 parameters" in said[0]
    assert "halves.1.weight, halves.1.bias, never.weight, never.bias;" in said[0]


def test_of_many_parameters_without_a_gradient_four_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    sync = AllReduce().attach(model, adamw(model))
    sync.backward(model[0](torch.ones(2)).sum(), 1)
    sync.step()
    assert ": 1.weight, 1.bias, 2.weight, 2.bias and 2 more;" in capfd.readouterr().out


def test_an_overlap_that_is_no_truth_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"AllReduce\(overlap='ddp'\): give True \(.*\), False \(.*\), or None"):
        AllReduce(overlap="ddp")  # type: ignore[arg-type]


def descriptions() -> list[str]:
    said = []
    for overlap in (None, False, True):
        model = plain_model()
        said.append(AllReduce(overlap=overlap).attach(model, adamw(model)).describe())
    return said


def test_the_way_is_said_where_there_is_a_choice() -> None:
    assert on_ranks(1, descriptions) == [["", "", ""]]
    flat = "gradients: one all-reduce of 832 B per step"
    assert on_ranks(2, descriptions)[0] == [
        flat, flat, "gradients: DDP, 736 B in buckets of 25 MB during the backward pass"
    ]  # fmt: skip


def test_a_model_with_nothing_to_train_is_a_config_error() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        AllReduce().attach(model, adamw(model))


def test_a_loss_that_is_no_sum_is_a_step_error() -> None:
    model = plain_model()
    sync = AllReduce().attach(model, adamw(model))
    x = torch.ones(3, 6, dtype=torch.float64)
    with pytest.raises(StepError, match=r"shape \(3, 4\).*loss.sum"):
        sync.backward(model(x), 3)
    with pytest.raises(StepError, match=r"and needs no gradient; return"):
        sync.backward(model(x).sum().detach(), 3)
    with torch.no_grad(), pytest.raises(StepError, match=r"gradients are switched off here \(torch.set_grad_enabled"):
        sync.backward(model(x).sum(), 3)


def count_in(dtype: torch.dtype, overlap: bool | None) -> float:
    model = nn.Linear(2, 1).to(dtype)
    sync = AllReduce(overlap=overlap).attach(model, torch.optim.SGD(model.parameters(), lr=0.0), typical_count=100_000)
    sync.backward(model(torch.ones(1, 2, dtype=dtype)).sum(), 100_001, last=True)
    return sync.step().mine.total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_count_is_exact_in_a_model_of_half_precision(dtype: torch.dtype) -> None:
    assert count_in(dtype, None) == 100_001
    for overlap in WAYS:
        assert on_ranks(2, count_in, dtype, overlap) == [200_002, 200_002]


# --- buffers, state, the clock


def buffers() -> list[Any]:
    """The running means before, inside and after `averaged`, and this rank's own values in these moments."""
    model = nn.BatchNorm1d(2)
    sync = AllReduce().attach(model, adamw(model))
    assert isinstance(model.running_mean, torch.Tensor)
    with torch.no_grad():
        model.running_mean.fill_(comm.rank() + 1.0)
    seen: list[Any] = [model.running_mean.tolist()]
    with sync.averaged():
        own = sync.rank_state_dict()
        seen += [model.running_mean.tolist(), None if own is None else {n: b.tolist() for n, b in own["buffers"].items()}]
    seen += [model.running_mean.tolist(), sync.rank_state_dict()]
    sync.finish()
    return [*seen, model.running_mean.tolist()]


def test_a_look_sees_the_first_ranks_running_statistics_and_leaves_each_its_own() -> None:
    first, second = on_ranks(2, buffers)
    one, two = [1.0, 1.0], [2.0, 2.0]
    assert first == [one, one, None, one, None, one]
    assert second == [two, one, {"running_mean": two}, two, None, one]


def waiting(overlap: bool | None) -> tuple[float, float]:
    """(the seconds in communication, all seconds)."""
    began = time.perf_counter()
    model = plain_model()
    sync = AllReduce(overlap=overlap).attach(model, adamw(model))
    for step in range(3):
        sync.backward(*loss_of(model, sequences()[step : step + 1]))
        sync.step()
    return sync.wait_s, time.perf_counter() - began


@pytest.mark.parametrize("overlap", WAYS)
def test_the_time_in_communication_is_a_part_of_the_time_that_has_passed(overlap: bool | None) -> None:
    for wait_s, all_s in on_ranks(2, waiting, overlap):
        assert 0.0 < wait_s < all_s


def scaled_loop(scale: float | None, overlap: bool | None) -> tuple[Flat, float, dict[str, Any]]:
    loss_scale = LossScale(scale, growth_interval=2) if scale is not None else None
    model = plain_model()
    sync = AllReduce(overlap=overlap).attach(model, adamw(model), clip_norm=0.05, loss_scale=loss_scale)
    parameters = []
    for step in range(5):
        loss_sum, count = loss_of(model, [sequences()[comm.rank() + 2 * step]])
        if step == 3 and comm.rank() == 0:
            loss_sum = loss_sum * math.inf
        sync.backward(loss_sum, count)
        sync.step()
        parameters.append(flat_parameters(model))
    return parameters, loss_scale.scale if loss_scale is not None else 1.0, sync.state_dict()


@pytest.mark.parametrize("overlap", WAYS)
def test_a_loss_scale_changes_no_parameter_and_is_the_same_on_all_ranks(overlap: bool | None) -> None:
    plain = on_ranks(2, scaled_loop, None, overlap)
    scaled = on_ranks(2, scaled_loop, 1024.0, overlap)
    assert scaled[0][1] == scaled[1][1] == 1024.0  # 2 finite steps have doubled it, and the overflow has halved it
    assert list(plain[0][2]) == ["trained"]
    for (a, _, _), (b, _, _) in zip(plain, scaled, strict=True):
        assert same(a, b)
    model = plain_model()
    again = AllReduce().attach(model, adamw(model), loss_scale=LossScale(2.0))
    again.load_state_dict(scaled[0][2])
    assert again.state_dict() == scaled[0][2]
    again.load_state_dict({})  # of an older checkpoint, without this state
    assert again.state_dict() == scaled[0][2]


def test_a_model_that_is_left_on_the_cpu_beside_a_gpu_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for found, said in ((None, False), (torch.device("cuda"), True)):
        monkeypatch.setattr(accelerator, "current", lambda env, found=found: found)
        model = nn.Linear(1, 1)
        AllReduce().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        warning = "warning: the model is on the CPU although there is a GPU; call model.to(rankwise.local_device(world))"
        assert (warning in capsys.readouterr().out) is said


# --- a backward pass of the user


def steps_after_a_users_own_backward(overlap: bool | None) -> list[str]:
    """What a step reports: after loss.backward() alone, with nothing, and after a zero_grad that writes into the gradients."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = AllReduce(overlap=overlap).attach(model, optimizer)
    said = []
    for prepare in (
        lambda: model(torch.ones(1, 2)).sum().backward(),
        lambda: optimizer.zero_grad(set_to_none=True),
        lambda: (optimizer.zero_grad(set_to_none=True), model(torch.ones(1, 2)).sum().backward()),
        lambda: optimizer.zero_grad(set_to_none=False),
    ):
        prepare()
        try:
            sync.step()
            said.append("")
        except StepError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(("n", "overlap"), [(1, False), (2, False), (2, True)])
def test_gradients_that_came_by_loss_backward_alone_are_refused_and_a_rank_without_any_is_not(
    n: int, overlap: bool | None
) -> None:
    refused = "loss.backward() does not count samples; call sync.backward(loss_sum, count) instead"
    for said in on_ranks(n, steps_after_a_users_own_backward, overlap):
        assert said == [refused, "", refused, ""]


def backward_after_the_last(at: int) -> str:
    model = nn.Linear(2, 1)
    sync = AllReduce(overlap=True).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for number in range(2):
            sync.backward(model(torch.ones(3, 2)).sum(), 3, last=number >= at)
        sync.step()
    except StepError as error:
        return str(error)
    return ""


def test_a_backward_pass_after_the_last_is_an_error() -> None:
    assert on_ranks(2, backward_after_the_last, 1) == ["", ""]
    assert (
        on_ranks(2, backward_after_the_last, 0)
        == ["backward() was called after the micro-batch with last=True; give last=True to the last one only"] * 2
    )


@pytest.mark.parametrize("count", [0, -1, math.nan, math.inf])
def test_a_typical_count_that_no_step_can_have_is_refused(count: float) -> None:
    with pytest.raises(ConfigError, match=rf"^typical_count={count}: give about the number of samples"):
        AllReduce().attach(model := plain_model(), adamw(model), typical_count=count)


def adversaries(overlap: bool, zeroed: bool | None) -> Any:
    """Two networks, of which one's loss goes through the other. `zeroed`: whether gradients are cleared; None: with zeros."""
    torch.manual_seed(0)
    makes, judges = nn.Linear(2, 3).double(), nn.Linear(3, 1).double()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (makes, judges)]
    syncs = [AllReduce(overlap=overlap).attach(m, o) for m, o in zip((makes, judges), optimizers, strict=True)]
    x = torch.arange(4, dtype=torch.float64).view(2, 2) + comm.rank()
    try:
        for _ in range(3):
            if zeroed is not False:
                optimizers[1].zero_grad(set_to_none=zeroed is True)
            syncs[1].backward(judges(makes(x).detach()).square().sum(), 2, last=True)
            syncs[1].step()
            syncs[0].backward(judges(makes(x)).sum(), 2, last=True)
            syncs[0].step()
    except StepError as error:
        return str(error)
    return [flat_parameters(makes), flat_parameters(judges)]


def test_a_gradient_that_the_loss_of_another_model_has_left_is_an_error_or_cleared() -> None:
    x = torch.cat([torch.arange(4, dtype=torch.float64).view(2, 2) + rank for rank in range(2)])
    torch.manual_seed(0)
    makes, judges = nn.Linear(2, 3).double(), nn.Linear(3, 1).double()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (makes, judges))
    for _ in range(3):
        second.zero_grad()
        (judges(makes(x).detach()).square().sum() / 4).backward()
        second.step()
        first.zero_grad()
        (judges(makes(x)).sum() / 4).backward()
        first.step()
    for n, overlap in ((1, False), (2, False), (2, True)):
        for said in on_ranks(n, adversaries, overlap, False):
            assert said.startswith("the parameters have gradients of another backward pass, which would be added to this step")
    for overlap, zeroed in ((False, True), (True, True), (False, None)):
        for ours in on_ranks(2, adversaries, overlap, zeroed):
            assert np.allclose(ours[0], flat_parameters(makes), rtol=1e-9, atol=0)
            assert np.allclose(ours[1], flat_parameters(judges), rtol=1e-9, atol=0)


@pytest.mark.parametrize("shared", ["optimizer", "model"])
def test_a_strategy_that_is_attached_later_takes_over(shared: str) -> None:
    model, data = plain_model(), sequences()
    optimizer = adamw(model)
    first = AllReduce().attach(model, optimizer)
    total, count = loss_of(model, data[:3])
    first.backward(total, count)
    first.step()
    other = nn.Sequential(model) if shared == "optimizer" else model
    second = AllReduce().attach(other, optimizer if shared == "optimizer" else adamw(model))
    with pytest.raises(StepError, match=r"^another strategy was attached to this model or optimizer later; use that one"):
        first.backward(*loss_of(model, data[:3]))
    before = flat_parameters(model)
    second.backward(*loss_of(model, data[3:6]))
    assert second.step().mine.stepped
    assert not np.array_equal(flat_parameters(model), before)
