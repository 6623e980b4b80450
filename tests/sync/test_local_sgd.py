"""Strategies that average replicas: compared with AllReduce, each other and closed forms, and resumed within a period."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import rankwise
from rankwise.dist import comm
from rankwise.errors import ConfigError, StepError
from rankwise.sync import AllReduce, DiLoCo, LocalSGD, SyncStrategy
from rankwise.sync.average import average, gather_numbers
from rankwise.training.precision import LossScale

Flat = npt.NDArray[np.float64]
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]

STEPS = 12


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def samples(step: int, rank: int, ranks: int, ragged: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One or two micro-batches of this rank. With `ragged`, each has another size, and sometimes there is none."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    sizes = [(step + 2 * rank) % 5, (step * rank) % 3] if ragged else [3]
    if ragged and (step + rank) % ranks == 0 and ranks > 1:
        sizes = []
    return [
        (torch.randn(n, 4, dtype=torch.float64, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in sizes
        if n
    ]


def flat(model: nn.Module) -> Flat:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]).numpy().copy()


def one_step(sync: SyncStrategy, model: nn.Module, step: int, ragged: bool) -> Any:
    batches = samples(step, comm.rank(), comm.world_size(), ragged)
    for i, (x, y) in enumerate(batches, start=1):
        sync.backward(F.cross_entropy(model(x), y, reduction="sum"), len(y), last=i == len(batches))
    return sync.step()


def trained(sync: SyncStrategy, make: Optimizers, ragged: bool, steps: int = STEPS) -> list[Flat]:
    """The average after each step (afterwards each rank gets its own weights back, so nothing changes), and at the end."""
    model = make_model()
    sync.attach(model, make(model), typical_count=8.0)
    seen = []
    for step in range(steps):
        one_step(sync, model, step, ragged)
        with sync.averaged():
            seen.append(flat(model))
    sync.finish()
    return [*seen, flat(model)]


def apart(ours: list[Flat], others: list[Flat]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, others, strict=True))


def identities() -> dict[str, float]:
    exact = {(make, ragged): trained(AllReduce(), make, ragged) for make in (sgd, momentum) for ragged in (False, True)}
    local = trained(LocalSGD(4), momentum, True)
    return {
        "local-sgd:1, plain SGD, ragged": apart(trained(LocalSGD(1), sgd, True), exact[sgd, True]),
        "local-sgd:1, momentum, equal counts": apart(trained(LocalSGD(1), momentum, False), exact[momentum, False]),
        "diloco H=1, lr 1, momentum 0": apart(trained(DiLoCo(1, lr=1.0, momentum=0.0), sgd, True), exact[sgd, True]),
        "diloco:4 (1, 0) is local-sgd:4": apart(trained(DiLoCo(4, lr=1.0, momentum=0.0), momentum, True), local),
        "only exact steps": apart(trained(LocalSGD(3, start=STEPS), momentum, True), exact[momentum, True]),
        "at named steps": apart(trained(LocalSGD(at_steps=[4, 8, 12]), momentum, True), local),
    }


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.one_in(2)
def test_averaging_strategies_are_each_other_and_all_reduce_where_they_should_be(n: int) -> None:
    for found in on_ranks(n, identities):
        assert {name: value for name, value in found.items() if value >= 1e-10} == {}


def post_local() -> tuple[float, float, bool]:
    """After `start` exact steps, the rest is local SGD from there."""
    model, steps = make_model(), 5
    sync = AllReduce().attach(model, optimizer := adam(model), typical_count=8.0)
    for step in range(steps):
        one_step(sync, model, step, True)
    sync.finish()
    start = flat(model)
    local = LocalSGD(3).attach(model, optimizer, typical_count=8.0)
    for step in range(steps, STEPS):
        one_step(local, model, step, True)
    local.finish()
    seen = trained(LocalSGD(3, start=steps), adam, True)
    return float(np.abs(seen[steps - 1] - start).max()), float(np.abs(seen[-1] - flat(model)).max()), True


def test_post_local_sgd_is_all_reduce_and_then_local_sgd() -> None:
    for first, last, _ in on_ranks(3, post_local):
        assert first < 1e-10
        assert last < 1e-10


def quadratic(every: int, steps: int, lr: float, outer_lr: float, mu: float) -> list[float]:
    """Rank r minimises (x - r)^2 / 2 from x = 8 by plain SGD. Returns what all ranks have after each average."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 8.0)
    sync = DiLoCo(every, lr=outer_lr, momentum=mu).attach(model, torch.optim.SGD(model.parameters(), lr=lr))
    seen = []
    for step in range(steps):
        sync.backward((model.weight - comm.rank()).square().sum() / 2, 1, last=True)
        sync.step()
        if (step + 1) % every == 0:
            seen.append(model.weight.item())
    return seen


def test_the_trajectory_on_a_quadratic_is_the_closed_form() -> None:
    n, every, lr, outer_lr, mu = 3, 4, 0.2, 0.7, 0.5
    shrink, centre, x, velocity, expected = (1 - lr) ** every, 1.0, 8.0, 0.0, []
    for _ in range(4):
        delta = x - (centre + shrink * (x - centre))
        velocity = mu * velocity + delta
        x -= outer_lr * (delta + mu * velocity)
        expected.append(x)
    for seen in on_ranks(n, quadratic, every, 16, lr, outer_lr, mu):
        assert np.abs(np.array(seen) - expected).max() < 1e-10


# --- stopped and resumed


def saved(sync: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint contains: the shared state, inside `averaged`, and this rank's own state."""
    with sync.averaged():
        shared = {"sync": sync.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return copy.deepcopy({**comm.broadcast_object(shared), "own": sync.rank_state_dict()})


class RunningMean(nn.Module):
    """A buffer that changes with each rank's own samples, and a counter of its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean: torch.Tensor
        self.passes: torch.Tensor
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.passes += 1
        return x


def resumed_equals_unbroken(make_sync: Callable[[], Any], make: Optimizers, cut: int) -> bool:
    def fresh() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
        model = make_model()
        model.append(RunningMean())
        optimizer = make(model)
        return make_sync().attach(model, optimizer, typical_count=8.0), model, optimizer

    sync, model, optimizer = fresh()
    for step in range(STEPS):
        if step == cut:
            state = saved(sync, model, optimizer)
        one_step(sync, model, step, True) if step % 2 else one_step(sync, model, step, False)
    sync.finish()
    again, other, its = fresh()
    again.load_state_dict(state["sync"])
    other.load_state_dict(state["model"])
    its.load_state_dict(state["optimizer"])
    again.load_rank_state_dict(state["own"])
    for step in range(cut, STEPS):
        one_step(again, other, step, True) if step % 2 else one_step(again, other, step, False)
    again.finish()
    return all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


STRATEGIES: dict[str, Callable[[], Any]] = {
    "local-sgd:4": lambda: LocalSGD(4),
    "local-sgd:4, averaged state": lambda: LocalSGD(4, optimizer_state="average"),
    "local-sgd:4, reset state": lambda: LocalSGD(4, optimizer_state="reset"),
    "post-local": lambda: LocalSGD(4, start=3),
    "diloco": lambda: DiLoCo(4),
    "diloco after exact steps": lambda: DiLoCo(4, start=5),
    "diloco in bf16": lambda: DiLoCo(4, compress="bf16"),
    "diloco in int8": lambda: DiLoCo(4, compress="int8"),
    "allreduce in bf16": lambda: AllReduce(compress="bf16"),
    "allreduce in int8": lambda: AllReduce(compress="int8"),
    "allreduce by powersgd": lambda: AllReduce(compress="powersgd:1"),
}


def all_resumed(cuts: tuple[int, ...]) -> list[str]:
    return [
        f"{name}, cut after {cut}"
        for name, strategy in STRATEGIES.items()
        for cut in cuts
        if not resumed_equals_unbroken(strategy, adam, cut)
    ]


@pytest.mark.parametrize(("n", "cuts"), [(3, (6,)), (2, (2, 4, 9))])
@pytest.mark.one_in(2)
def test_a_resume_between_two_averages_is_bit_equal_to_the_unbroken_training(n: int, cuts: tuple[int, ...]) -> None:
    for wrong in on_ranks(n, all_resumed, cuts):
        assert wrong == []


class Changing:
    """A training in which layers take turns, a group is added, one layer is frozen, and a weight of the loss is outside the
    model."""

    def __init__(self, make_sync: Callable[[], Any]) -> None:
        torch.manual_seed(5)
        self.model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)]).double()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        first = [*self.model[0].parameters(), *self.model[1].parameters(), self.weight]
        self.optimizer = torch.optim.Adam(first, lr=0.05)
        self.sync = make_sync().attach(self.model, self.optimizer, typical_count=8.0)

    def step(self, number: int) -> None:
        if number == 2:
            self.optimizer.add_param_group({"params": list(self.model[2].parameters()), "lr": 0.003})
        if number == 4:
            self.model[2].requires_grad_(False)
        self.model[0].requires_grad_(number % 2 == 0)
        self.model[1].requires_grad_(number % 2 == 1)
        self.sync.follow()
        for x, y in samples(number, comm.rank(), comm.world_size(), False):
            hidden = self.model[0](x).tanh()
            out = self.model[1](hidden) + self.model[2](hidden)
            self.sync.backward(F.cross_entropy(out * self.weight, y, reduction="sum"), len(y))
        self.sync.step()

    def numbers(self) -> list[float]:
        tensors = [*self.model.parameters(), self.weight]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [*rates, *(value for tensor in tensors for value in tensor.detach().flatten().tolist())]


def changing(make: str, cut: int | None) -> list[float]:
    training = Changing(STRATEGIES[make])
    for number in range(12):
        if number == cut:
            state = saved(training.sync, training.model, training.optimizer)
            training = Changing(STRATEGIES[make])
            training.sync.load_state_dict(state["sync"])
            training.model.load_state_dict(state["model"])
            training.optimizer.load_state_dict(state["optimizer"])
            training.sync.load_rank_state_dict(state["own"])
        training.step(number)
    training.sync.finish()
    return training.numbers()


@pytest.mark.parametrize(
    "make",
    ["local-sgd:4", "local-sgd:4, averaged state", "post-local", "diloco", "allreduce in int8", "allreduce by powersgd"],
)
@pytest.mark.one_in(3)
def test_what_was_trained_at_any_time_of_a_period_is_averaged_and_a_resume_there_changes_no_bit(make: str) -> None:
    unbroken = on_ranks(2, changing, make, None)
    assert unbroken[0] == unbroken[1]
    for cut in (3, 5, 6):
        assert on_ranks(2, changing, make, cut) == unbroken


def resumed_from_the_older(kind: Callable[..., Any]) -> bool:
    """Whether a training whose newer checkpoint (of local steps) has a corrupted model resumes from an older one (of exact
    steps) as if there were no newer one."""

    def fresh() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
        model = make_model()
        return kind(4, start=6).attach(model, optimizer := adam(model), typical_count=8.0), model, optimizer

    sync, model, optimizer = fresh()
    states = []
    for step in range(STEPS):
        if step in (4, 8):
            states.append(saved(sync, model, optimizer))
        one_step(sync, model, step, True)
    older, newer = states
    again, other, its = fresh()
    again.load_state_dict(newer["sync"])
    again.load_state_dict(older["sync"])
    other.load_state_dict(older["model"])
    its.load_state_dict(older["optimizer"])
    again.load_rank_state_dict(older["own"])
    for step in range(4, STEPS):
        one_step(again, other, step, True)
    return np.array_equal(flat(model), flat(other))


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_after_a_corrupted_checkpoint_of_local_steps_one_of_exact_steps_is_resumed_exactly(kind: Callable[..., Any]) -> None:
    assert on_ranks(2, resumed_from_the_older, kind) == [True, True]


def resumed_with_a_later_start() -> Flat:
    sync = LocalSGD(4).attach(model := make_model(), optimizer := adam(model), typical_count=8.0)
    for step in range(2):
        one_step(sync, model, step, False)
    state = saved(sync, model, optimizer)
    again = LocalSGD(4, start=9).attach(model := make_model(), optimizer := adam(model), typical_count=8.0)
    again.load_state_dict(state["sync"])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    again.load_rank_state_dict(state["own"])
    one_step(again, model, 2, False)
    return flat(model)


def test_local_steps_that_are_resumed_with_exact_ones_start_with_the_average() -> None:
    first, second = on_ranks(2, resumed_with_a_later_start)
    assert np.array_equal(first, second)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


class Experts(nn.Module):
    """The second expert has samples only on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x) if comm.rank() == 0 else self.first(x)


def of_experts(name: str) -> tuple[list[Any], list[Any], Flat]:
    """(the state for the second expert's bias before and after the first average, the parameters after two)."""
    sync = LocalSGD(2, optimizer_state="average").attach(model := Experts(), optimizer := OPTIMIZERS[name](model.parameters()))
    seen = []
    for step in range(4):
        x = torch.full((2, 4), 1.0 + step + comm.rank())
        sync.backward(model(x).square().sum(), 2, last=True)
        if step == 1:
            seen.append([v.tolist() for v in optimizer.state.get(model.second.bias, {}).values()])
        sync.step()
        if step == 1:
            seen.append([v.tolist() for v in optimizer.state[model.second.bias].values()])
    sync.finish()
    return seen[0], seen[1], flat(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("n", [2, 3])
def test_a_parameter_that_only_some_ranks_have_stepped_counts_as_zeros_in_an_averaged_state(n: int, name: str) -> None:
    first, *others = on_ranks(n, of_experts, name)
    assert len(first[0]) == len(first[1]) > 0
    for before, after, parameters in others:
        assert before == []
        assert after == first[1]
        assert np.array_equal(parameters, first[2])


def looked_at(look: bool) -> Flat:
    model = make_model()
    sync = DiLoCo(5).attach(model, adam(model), typical_count=8.0)
    for step in range(STEPS):
        one_step(sync, model, step, True)
        if look:
            with sync.averaged():
                model(torch.ones(2, 4, dtype=torch.float64))
            with sync.averaged(nn.Linear(2, 2)):
                sync.rank_state_dict()
    return flat(model)


def test_a_look_in_mid_period_changes_no_bit() -> None:
    for seen, unseen in zip(on_ranks(3, looked_at, True), on_ranks(3, looked_at, False), strict=True):
        assert np.array_equal(seen, unseen)


def shown_of_another_module(steps: int) -> list[float]:
    """What an evaluation uses of a module that is 3, 6, 9, ... on the ranks, after `steps` steps of periods of 2."""
    model, other = make_model(), nn.Linear(1, 1)
    nn.init.constant_(other.weight, 3.0 * (comm.rank() + 1))
    sync = LocalSGD(2).attach(model, adam(model), typical_count=8.0)
    for step in range(steps):
        one_step(sync, model, step, True)
    with sync.averaged(other):
        shown = other.weight.item()
    return [shown, other.weight.item()]


@pytest.mark.parametrize("steps", [0, 2, 4])
def test_another_module_is_shown_as_the_mean_of_the_ranks_also_right_after_an_average(steps: int) -> None:
    assert on_ranks(3, shown_of_another_module, steps) == [[6.0, own] for own in (3.0, 6.0, 9.0)]


def at_the_end(steps: int, compress: str | None) -> tuple[Flat, Flat, Flat, Flat]:
    """After `steps` steps: the average of the replicas, from a strategy that makes no outer step after the last of them; what
    `averaged` shows; the parameters; and those after `finish`."""
    found = []
    for every in ([4] * (steps - 1) + [99], [4] * steps):
        model = make_model()
        sync = DiLoCo(4, lr=1.0, momentum=0.3, compress=compress).attach(model, adam(model), typical_count=8.0)
        for step in range(steps):
            sync._next = -1 if every[step] == 99 else sync._next
            one_step(sync, model, step, False)
        with sync.averaged():
            found.append(flat(model))
    before = flat(model)
    sync.finish()
    return found[0], found[1], before, flat(model)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_evaluation_and_result_of_diloco_are_the_average_not_the_outer_step_beyond_it(n: int) -> None:
    for average_then, shown, before, result in on_ranks(n, at_the_end, 12, None):
        assert np.abs(shown - average_then).max() < 1e-15
        assert np.array_equal(result, shown)
        assert np.abs(before - shown).max() > 1e-4
    for average_then, shown, _, result in on_ranks(n, at_the_end, 10, None):  # in mid-period
        assert np.array_equal(shown, average_then)
        assert np.abs(result - shown).max() < 1e-15


def test_the_result_of_compressed_diloco_is_what_was_evaluated() -> None:
    for average_then, shown, before, result in on_ranks(2, at_the_end, 12, "int8"):
        assert np.array_equal(result, shown)
        assert np.abs(shown - average_then).max() < np.abs(before - average_then).max() / 10  # what a message loses
    for average_then, shown, _, result in on_ranks(2, at_the_end, 10, "int8"):
        assert np.array_equal(shown, average_then)
        assert np.abs(result - shown).max() < 1e-15  # the last message is not compressed


def looked_at_inside(every: int, kind: Callable[[int], Any]) -> tuple[bool, bool, bool]:
    """(whether nested looks after each step change no bit; whether an inner look shows the same as the outer; whether a state
    that was saved in the inner look resumes as the training without looks)."""

    def fresh() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
        model = make_model()
        return kind(every).attach(model, optimizer := sgd(model), typical_count=8.0), model, optimizer

    (sync, model, optimizer), (plain, other, _) = fresh(), fresh()
    same, shown, state = True, True, {}
    for step in range(8):
        one_step(sync, model, step, False)
        one_step(plain, other, step, False)
        with sync.averaged():
            outer = flat(model)
            with sync.averaged():
                shown &= np.array_equal(outer, flat(model))
            state = saved(sync, model, optimizer) if step == 3 else state
        with sync.averaged(nn.Linear(2, 2)), sync.averaged():
            pass
        with contextlib.suppress(KeyError), sync.averaged():
            raise KeyError
        same &= np.array_equal(flat(model), flat(other))
    again, its, optimizer = fresh()
    again.load_state_dict(state["sync"])
    its.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    again.load_rank_state_dict(state["own"])
    for step in range(4, 8):
        one_step(again, its, step, False)
    return same, shown, np.array_equal(flat(its), flat(other))


@pytest.mark.parametrize(("n", "every", "kind"), [(1, 2, DiLoCo), (2, 2, DiLoCo), (2, 3, DiLoCo), (2, 3, LocalSGD)])
def test_a_look_inside_a_look_changes_no_bit_and_may_be_saved(n: int, every: int, kind: Callable[[int], Any]) -> None:
    for found in on_ranks(n, looked_at_inside, every, kind):
        assert found == (True, True, True)


def resumed_twice() -> bool:
    """Whether the error memory of a compressed outer step survives a save that comes before the next outer step."""

    def fresh() -> tuple[DiLoCo, nn.Module, torch.optim.Optimizer]:
        model = make_model()
        return DiLoCo(3, compress="int8").attach(model, optimizer := adam(model), typical_count=8.0), model, optimizer

    sync, model, optimizer = fresh()
    plain, other, _ = fresh()
    for step in range(9):
        one_step(plain, other, step, False)
        if step in (4, 5):
            state = saved(sync, model, optimizer)
            sync, model, optimizer = fresh()
            sync.load_state_dict(state["sync"])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            sync.load_rank_state_dict(state["own"])
        one_step(sync, model, step, False)
    return np.array_equal(flat(model), flat(other))


def test_the_memory_of_what_a_message_lost_survives_two_stops_within_a_period() -> None:
    assert on_ranks(2, resumed_twice) == [True, True]


def after_the_last_step() -> tuple[float, bool, bool, bool]:
    """What the user does to the model after an outer step, or after `finish`, stays: (the largest clamped parameter in the
    result; whether a frozen one has its average; whether new weights are shown; whether a second training steps again)."""
    model = make_model()
    sync = DiLoCo(4, lr=1.0, momentum=0.3).attach(model, adam(model), typical_count=8.0)
    for step in range(8):
        one_step(sync, model, step, False)
    with sync.averaged():
        bias = model[0].bias.detach().clone()
    model[2].weight.data.clamp_(-0.01, 0.01)
    model[0].bias.requires_grad_(False)
    sync.finish()
    clamped, frozen = float(model[2].weight.detach().abs().max()), torch.equal(model[0].bias, bias)
    nn.init.zeros_(model[2].weight)
    with sync.averaged():
        new = not model[2].weight.any()
    model[0].bias.requires_grad_(True)
    for step in range(4):
        one_step(sync, model, step, False)
    with sync.averaged():
        shown = flat(model)
    return clamped, frozen, new, bool(np.abs(shown - flat(model)).max() > 1e-6)


@pytest.mark.parametrize("n", [1, 2])
def test_what_the_user_changes_after_an_outer_step_or_after_the_end_stays(n: int) -> None:
    for clamped, frozen, new, steps_again in on_ranks(n, after_the_last_step):
        assert 0 < clamped <= 0.01
        assert (frozen, new, steps_again) == (True, True, True)


def made_longer(alone: bool) -> tuple[list[float], bool]:
    """(how far a training of 8 steps that is then made longer, from its checkpoint, is from one of 12 steps, after each step;
    whether one that is started again at its end has the same result). `alone`: without the ranks' own states, as on another
    number of ranks."""

    def fresh() -> tuple[DiLoCo, nn.Module, torch.optim.Optimizer]:
        model = make_model()
        return DiLoCo(4, lr=1.0, momentum=0.3).attach(model, optimizer := sgd(model), typical_count=8.0), model, optimizer

    def resumed() -> tuple[DiLoCo, nn.Module, torch.optim.Optimizer]:
        sync, model, optimizer = fresh()
        sync.load_state_dict(state["sync"])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sync.load_rank_state_dict(None if alone else state["own"])
        return sync, model, optimizer

    short, model, optimizer = fresh()
    unbroken, straight, _ = fresh()
    for step in range(8):
        one_step(short, model, step, True)
        one_step(unbroken, straight, step, True)
    state = saved(short, model, optimizer)
    short.finish()
    again, its, _ = resumed()
    again.finish()
    longer, other, _ = resumed()
    far = [float(np.abs(flat(straight) - flat(other)).max())]
    for step in range(8, 12):
        one_step(unbroken, straight, step, True)
        one_step(longer, other, step, True)
        far.append(float(np.abs(flat(straight) - flat(other)).max()))
    return far, np.array_equal(flat(model), flat(its))


@pytest.mark.parametrize(("n", "alone"), [(1, False), (1, True), (2, False), (2, True)])
def test_a_diloco_training_can_be_made_longer_from_its_end_and_started_again_there(n: int, alone: bool) -> None:
    for far, again in on_ranks(n, made_longer, alone):
        assert far == [0.0] * 5
        assert again


@pytest.mark.parametrize(
    ("before", "after", "cut", "expected"),
    [
        ({"at_steps": [2, 4]}, {"at_steps": [2, 4, 9]}, 6, [2, 4, 9, 12]),
        ({"at_steps": [2, 10]}, {"at_steps": [2, 7, 10]}, 6, [2, 7, 10, 12]),
        ({"at_steps": [2, 4]}, {"every": 3}, 6, [2, 4, 9, 12]),
        ({"every": 4}, {"at_steps": [3, 7]}, 6, [4, 7, 12]),
        ({"every": 99}, {"every": 3}, 6, [9, 12]),
        ({"every": 4}, {"every": 4}, 6, [4, 8, 12]),
        ({"every": 4}, {"every": 2, "start": 9}, 6, [4, 11, 12]),
        ({"every": 4}, {"every": 2, "start": 8}, 6, [4, 10, 12]),
        ({"every": 4, "start": 99}, {"every": 4, "start": 3}, 10, [12]),
    ],
)
def test_a_resumed_run_averages_when_the_script_now_says(before: Any, after: Any, cut: int, expected: list[int]) -> None:
    def train(sync: LocalSGD, steps: range) -> LocalSGD:
        sync.attach(model := make_model(), sgd(model))
        if steps[0]:
            sync.load_state_dict(state)
        for step in steps:
            one_step(sync, model, step, False)
        return sync

    state: dict[str, Any] = {}
    state = train(LocalSGD(**before), range(cut)).state_dict()
    again = train(LocalSGD(**after), range(cut, STEPS))
    again.finish()
    assert again.averaged_at == expected


# --- what goes wrong


def poisoned() -> tuple[list[float], list[int], str]:
    """Rank 1's weights become nan in the middle of a period, and rank 2's gradient is not finite once."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        values, skipped = _poisoned()
    return values, skipped, said.getvalue()


def _poisoned() -> tuple[list[float], list[int]]:
    model = make_model()
    sync = LocalSGD(4).attach(model, momentum(model), typical_count=8.0)
    skipped = []
    for step in range(8):
        if step == 1 and comm.rank() == 1:
            with torch.no_grad():
                model[0].weight[0, 0] = math.nan  # type: ignore[index, operator]
        if step == 2 and comm.rank() == 2:
            sync.backward(model(torch.full((1, 4), math.inf, dtype=torch.float64)).sum(), 1, last=True)
            shared = sync.step().shared
        else:
            shared = one_step(sync, model, step, False).shared
        skipped += [shared.skipped] if shared is not None else []
    return flat(model).tolist(), skipped


def test_a_replica_that_is_not_finite_is_named_and_takes_the_average_of_the_others() -> None:
    answers = on_ranks(3, poisoned)
    for values, skipped, _ in answers:
        assert values == answers[0][0]
        assert all(map(math.isfinite, values))
        assert skipped == [4, 0]  # three steps of rank 1, and one of rank 2
    said = answers[0][2]
    assert "step 4: the replica of rank 1 is not finite and was replaced by the average of the others" in said
    assert "steps skipped since the last average because the gradient was not finite: " in said
    assert "1 on rank 2" in said


def all_poisoned() -> str:
    model = make_model()
    sync = LocalSGD(1).attach(model, sgd(model))
    with torch.no_grad():
        model[0].weight.fill_(math.nan)  # type: ignore[operator, union-attr]
    try:
        one_step(sync, model, 0, False)
    except StepError as error:
        return str(error)
    return ""


def test_replicas_none_of_which_is_finite_are_an_error_on_all_ranks() -> None:
    for told in on_ranks(2, all_poisoned):
        assert told == "after step 1 no replica is finite; check the learning rate and the data"


def grown_apart() -> str:
    model = make_model()
    sync = LocalSGD(2).attach(model, sgd(model))
    if comm.rank() == 1:
        model[0].bias.requires_grad_(False)  # type: ignore[operator, union-attr]
    try:
        one_step(sync, model, 0, False)
        sync_2 = nn.Linear(3, 3).double()
        if comm.rank() == 1:
            model.append(sync_2)  # type: ignore[operator]
        one_step(sync, model, 1, False)
    except StepError as error:
        return str(error)
    return ""


def test_replicas_of_other_tensors_are_an_error_on_all_ranks_that_names_one() -> None:
    first, second = on_ranks(2, grown_apart)
    assert first == second
    assert first.startswith("the replicas cannot be averaged: 3.bias is not the same on rank 0 and rank 1; change the model")


def frozen_in_mid_period() -> list[Flat]:
    """The parameters after the average that follows the freezing, and after the average that follows the unfreezing."""
    model, seen = make_model(), []
    sync = LocalSGD(4).attach(model, adam(model), typical_count=8.0)
    for step in range(8):
        if step in (2, 6):
            model[0].requires_grad_(step == 6)  # type: ignore[operator]
            sync.follow()
        one_step(sync, model, step, True)
        if step in (3, 7):
            seen.append(flat(model))
    return seen


def test_a_parameter_that_is_frozen_in_mid_period_is_averaged_once_more() -> None:
    first, *others = on_ranks(3, frozen_in_mid_period)
    assert all(np.array_equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def own_scales() -> tuple[float, float]:
    """Rank 1's loss scale is halved by a gradient that is not finite, and still is after a resume."""

    def fresh() -> tuple[LocalSGD, nn.Module, torch.optim.Optimizer]:
        model = make_model()
        optimizer = adam(model)
        return LocalSGD(5).attach(model, optimizer, loss_scale=LossScale(8.0)), model, optimizer

    sync, model, optimizer = fresh()
    one_step(sync, model, 0, False)
    sync.backward(model(torch.full((1, 4), math.inf if comm.rank() else 1.0, dtype=torch.float64)).sum(), 1, last=True)
    sync.step()
    state = saved(sync, model, optimizer)
    again, other, its = fresh()
    again.load_state_dict(state["sync"])
    again.load_rank_state_dict(state["own"])
    mine, resumed = saved(sync, model, optimizer)["own"], saved(again, other, its)["own"]
    return mine["local"]["loss_scale"]["scale"], resumed["local"]["loss_scale"]["scale"]


def test_each_ranks_loss_scale_is_its_own_and_is_resumed() -> None:
    assert on_ranks(2, own_scales) == [(8.0, 8.0), (4.0, 4.0)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LocalSGD(0), "LocalSGD(every=0): give a whole number of at least 1, or None"),
        (lambda: LocalSGD(2.5), "LocalSGD(every=2.5)"),
        (lambda: LocalSGD(True), "LocalSGD(every=True)"),
        (lambda: LocalSGD(seconds=0), "LocalSGD(seconds=0): give a number of seconds above 0"),
        (lambda: LocalSGD(seconds=math.nan), "LocalSGD(seconds=nan)"),
        (lambda: LocalSGD(4, seconds=3), "every, seconds and at_steps each set when"),
        (lambda: LocalSGD(4, start=-1), "LocalSGD(start=-1)"),
        (
            lambda: LocalSGD(4, optimizer_state="mean"),
            "LocalSGD(optimizer_state='mean'): give one of 'keep', 'average', 'reset'",
        ),
        (lambda: DiLoCo(0), "DiLoCo(every=0)"),
        (lambda: DiLoCo(4, lr=0), "DiLoCo(lr=0): give the outer learning rate"),
        (
            lambda: DiLoCo(4, compress="powersgd:2"),
            "DiLoCo(compress='powersgd:2'): give one of 'bf16', 'fp16', 'int8', or None",
        ),
        (lambda: DiLoCo(4, compress="int4"), "DiLoCo(compress='int4'): give one of 'bf16', 'fp16', 'int8', or None"),
        (lambda: DiLoCo(4, momentum=1), "DiLoCo(momentum=1): give a number of at least 0 and less than 1"),
    ],
)
def test_what_no_period_can_be_made_of_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert said in str(caught.value)


# --- seconds, buffers, bytes, drift


def timed(clock: list[float]) -> tuple[list[int], list[list[float]]]:
    """(the steps after which an average was made, if rank 1's steps take three times as long by its own clock; the weights at
    the end, and those of a training that averages after these steps)."""
    from rankwise.sync import local_sgd

    now = [0.0]
    local_sgd.time.perf_counter = lambda: now[0]  # type: ignore[attr-defined, assignment]
    found, ends = [], []
    for replayed in (False, True):
        model = make_model()
        strategy = LocalSGD(at_steps=found) if replayed else LocalSGD(seconds=clock[0])
        sync = strategy.attach(model, momentum(model))
        for step in range(60):
            now[0] += clock[1] * (3 if comm.rank() == 1 else 1)
            one_step(sync, model, step, False)
        found = list(sync.averaged_at)
        sync.finish()
        ends.append(flat(model).tolist())
    return found, ends


def test_averages_by_time_come_at_the_same_steps_on_all_ranks_though_one_is_slow() -> None:
    first, second = on_ranks(2, timed, [3.1, 0.1])
    assert first == second
    steps, (clocked, replayed) = first
    assert steps == [1, 2, 3, 13, 23, 33, 43, 53]  # ten steps of the slow rank are 3 s
    assert clocked == replayed


def test_a_resumed_training_measures_its_steps_from_the_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwise.sync import local_sgd

    now = [0.0]
    monkeypatch.setattr(local_sgd.time, "perf_counter", lambda: now[0])

    def train(sync: LocalSGD, steps: range) -> list[int]:
        sync.attach(model := make_model(), sgd(model))
        if steps[0]:
            sync.load_state_dict(state)
        for step in steps:
            now[0] += 0.1
            one_step(sync, model, step, False)
        return sync.averaged_at

    state: dict[str, Any] = {}
    unbroken, first = LocalSGD(seconds=1.05), LocalSGD(seconds=1.05)
    expected = train(unbroken, range(40))
    train(first, range(12))
    state = first.state_dict()
    assert train(LocalSGD(seconds=1.05), range(12, 40)) == expected == [1, 2, 3, 13, 23, 33]


def by_the_clock(period_s: float, seconds: float) -> tuple[list[int], list[float], list[float]]:
    """(the steps with an average, the seconds at which each was made, the weights at the end). Each step of rank 1 takes three
    times as long."""
    model = make_model()
    sync = LocalSGD(seconds=period_s).attach(model, sgd(model), typical_count=8.0)
    began, at, last = time.monotonic(), list[float](), False
    while not last:
        time.sleep(0.15 if comm.rank() == 1 else 0.05)
        one_step(sync, model, len(at), False)
        if len(sync.averaged_at) > len(at):
            at.append(time.monotonic() - began)
            last = comm.broadcast_object(at[-1] > seconds)
    sync.finish()
    return list(sync.averaged_at), at, flat(model).tolist()


@pytest.mark.stress(dose="whole")  # the test above is the same with a fake clock
def test_by_a_real_clock_averages_are_as_far_apart_as_asked_though_one_rank_is_slow() -> None:
    (steps, at, weights), (others_steps, _, others) = on_ranks(2, by_the_clock, 4.0, 100.0, timeout_s=200.0)
    assert (steps, weights) == (others_steps, others)
    apart = [later - sooner for sooner, later in pairwise(at) if sooner > 60]
    assert len(apart) >= 8
    assert all(abs(seconds - 4.0) <= 0.2 * 4.0 for seconds in apart), apart


def with_buffers() -> dict[str, list[float]]:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    sync = LocalSGD(3).attach(model, sgd(model), typical_count=8.0)
    for step in range(3):
        one_step(sync, model, step, False)
    return {name: value.reshape(-1).tolist() for name, value in model.state_dict().items()}


def test_floating_buffers_are_averaged_and_counters_are_rank_0s() -> None:
    first, second = on_ranks(2, with_buffers)
    assert first == second
    assert first["0.num_batches_tracked"] == [3]
    assert any(first["0.running_mean"])


def attached_with_another_setting() -> list[str]:
    found = []
    for mine, others in (
        (lambda: LocalSGD(4), lambda: LocalSGD(5)),
        (lambda: LocalSGD(4), lambda: DiLoCo(4)),
        (lambda: LocalSGD(4), lambda: AllReduce()),
        (lambda: LocalSGD(at_steps=[3, 4]), lambda: LocalSGD(at_steps=[3])),
        (lambda: AllReduce(compress="int8"), lambda: AllReduce(compress="bf16")),
        (lambda: AllReduce(reduce="sum"), lambda: AllReduce()),
    ):
        model = make_model()
        strategy: Any = others() if comm.rank() == 1 else mine()
        try:
            strategy.attach(model, sgd(model))
        except ConfigError as error:
            found.append(str(error).partition(";")[0])
    return found


def test_ranks_with_other_strategies_or_settings_are_an_error_on_all_before_anything_is_trained() -> None:
    start = "the ranks have different settings: "
    for found in on_ranks(3, attached_with_another_setting):
        assert found == [
            f"{start}LocalSGD's every is 4 on rank 0 and 5 on rank 1",
            f"{start}the strategy is 'LocalSGD' on rank 0 and 'DiLoCo' on rank 1",
            f"{start}the strategy is 'LocalSGD' on rank 0 and 'AllReduce' on rank 1",
            f"{start}LocalSGD's at_steps is [3, 4] on rank 0 and [3] on rank 1",
            f"{start}AllReduce's compress is 'int8' on rank 0 and 'bf16' on rank 1",
            f"{start}AllReduce's reduce is 'sum' on rank 0 and 'mean' on rank 1",
        ]


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (AllReduce(), ""),
        (LocalSGD(10), ""),
        (LocalSGD(100), ""),
        (LocalSGD(101), "LocalSGD(every=101): there are 100 local steps; replicas are averaged once, at the end"),
        (LocalSGD(50, start=60), "LocalSGD(every=50): there are 40 local steps; replicas are averaged once, at the end"),
        (LocalSGD(at_steps=[5, 101]), "LocalSGD(at_steps=...): no average after step 101: the training ends after step 100"),
        (LocalSGD(seconds=3600.0), ""),
        (DiLoCo(32), ""),
        (DiLoCo(32, momentum=0.9), "DiLoCo(momentum=0.9): the outer optimizer makes 3 steps in all, too few for this momentum"),
        (DiLoCo(32, momentum=0.5), ""),
        (DiLoCo(3), ""),
    ],
)
def test_a_training_too_short_for_its_strategy_is_warned_of(
    strategy: SyncStrategy, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    strategy.check_length(100)
    told = capfd.readouterr().out
    assert told.startswith(f"warning: {said}") if said else told == ""


@pytest.mark.parametrize("start", [100, 1000])
def test_a_training_that_ends_before_its_first_local_step_is_refused(start: int) -> None:
    with pytest.raises(ConfigError, match=rf"LocalSGD\(start={start}\): the training ends after step 100, so no step is"):
        LocalSGD(start=start).check_length(100)


def measured() -> tuple[float, float, int]:
    model = make_model()
    sync = LocalSGD(4).attach(model, sgd(model))
    for step in range(3):
        one_step(sync, model, step, False)
    x, y = samples(3, comm.rank(), comm.world_size(), False)[0]
    own = copy.deepcopy(model)
    (F.cross_entropy(own(x), y, reduction="sum") / len(y)).backward()
    with torch.no_grad():
        for p in own.parameters():
            assert p.grad is not None
            p -= 0.1 * p.grad
    one_step(sync, model, 3, False)
    mine = torch.tensor(float(np.square(flat(own) - flat(model)).sum()) / comm.world_size(), dtype=torch.float64)
    figures = sync.figures()
    return figures["drift"], math.sqrt(comm.all_reduce(mine).item()), int(figures["sent_bytes"])


def test_drift_and_bytes_are_those_of_a_direct_computation() -> None:
    for drift, direct, sent in on_ranks(3, measured):
        assert drift > 0
        assert abs(drift - direct) < 1e-6 * direct
        assert sent == 8 * (4 * 6 + 6 + 6 * 3 + 3)


def packed() -> tuple[list[list[float]], list[float]]:
    tensors = [torch.full((2, 2), 1.0 + comm.rank()).t(), torch.full((3,), 2.0, dtype=torch.bfloat16), torch.zeros(0)]
    average(tensors, [0.25, 0.75][comm.rank()])
    bad = [torch.full((2,), math.nan if comm.rank() else 5.0)]
    average(bad, [1.0, 0.0][comm.rank()])
    return [t.reshape(-1).tolist() for t in (*tensors, *bad)], [x for row in gather_numbers([comm.rank() + 0.5]) for x in row]


def test_an_average_takes_any_dtype_and_layout_and_nothing_of_a_rank_with_a_share_of_zero() -> None:
    for values, told in on_ranks(2, packed):
        assert values == [[1.75] * 4, [2.0] * 3, [], [5.0, 5.0]]
        assert told == [0.5, 1.5]


@pytest.mark.parametrize(
    ("given", "few", "many"),
    [
        ({}, (1.0, 0.3), (0.7, 0.9)),
        ({"lr": 0.8}, (0.8, 0.5), (0.8, 0.9)),
        ({"momentum": 0.4}, (0.7, 0.4), (0.7, 0.4)),
    ],
)
def test_the_outer_step_has_less_momentum_if_there_are_fewer_than_100(given: dict[str, float], few: Any, many: Any) -> None:
    for steps, expected in ((32 * 99, few), (32 * 100, many)):
        sync = DiLoCo(32, **given)
        with contextlib.redirect_stderr(io.StringIO()) as told:
            sync.check_length(steps)
        assert (sync._outer_lr, sync._outer_momentum, told.getvalue()) == (*expected, "")


def test_a_resumed_run_keeps_its_outer_learning_rate_and_momentum() -> None:
    def attached(**given: float) -> DiLoCo:
        model = torch.nn.Linear(2, 1)
        sync = DiLoCo(32, **given).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        sync.check_length(32 * 50)
        return sync

    began = attached()
    longer = attached()
    longer.check_length(32 * 200)
    assert "outer step lr 0.7, momentum 0.9" in longer.describe()
    longer.load_state_dict(began.state_dict())
    assert "outer step lr 1, momentum 0.3" in longer.describe()
    of_an_earlier_version = {key: value for key, value in began.state_dict().items() if not key.startswith("outer_")}
    resumed = attached()
    resumed.load_state_dict(of_an_earlier_version)
    assert (resumed._outer_lr, resumed._outer_momentum) == (0.7, 0.5)
    resumed = attached(momentum=0.4)  # what the script sets now
    resumed.load_state_dict(began.state_dict())
    assert (resumed._outer_lr, resumed._outer_momentum) == (1.0, 0.4)


NEW: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=0),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "Adadelta": torch.optim.Adadelta,
}


@pytest.mark.parametrize("name", NEW)
def test_the_state_of_an_optimizer_is_reset_to_that_of_a_new_one(name: str) -> None:
    def trained(sync: LocalSGD | None) -> list[float]:
        torch.manual_seed(1)
        model = nn.Linear(3, 2).double()
        optimizer = NEW[name](model.parameters())
        if sync is not None:
            sync.attach(model, optimizer)
        for step in range(6):
            x = torch.arange(3.0, dtype=torch.float64) + step
            loss = model(x).square().sum()
            if sync is not None:
                sync.backward(loss, 1)
                sync.step()
                continue
            if step % 2 == 0:
                optimizer = NEW[name](model.parameters())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    assert trained(LocalSGD(2, optimizer_state="reset")) == trained(None)


def all_skipped(name: str, steps: int, folder: str) -> str:
    """What is printed and raised by a training in which no gradient is finite."""
    model = make_model()
    data = TensorDataset(torch.randn(128, model[0].in_features, dtype=torch.float64))
    loss = lambda model, batch: (model(batch[0]).sum() * math.nan, len(batch[0]))  # noqa: E731
    trainer = rankwise.Trainer(model, sgd(model), loss, data, global_batch_size=8, max_steps=steps, sync=name, run_dir=folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            trainer.fit()
        except StepError as error:
            return f"{out.getvalue()}{error}"
    return out.getvalue()


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (8, "the gradient is not finite, in each of the 8 steps"),
        (10, "the gradient is not finite, in each of the 10 steps"),
        (3, "the gradient is not finite, in each of the 3 steps"),
        (112, "the gradient is not finite, for 100 steps in a row"),
    ],
)
@pytest.mark.parametrize("name", ["local-sgd:4", "diloco:4"])
@pytest.mark.one_in(2)
def test_a_run_whose_steps_are_all_skipped_is_an_error(name: str, steps: int, told: str, tmp_path: Path) -> None:
    for said in on_ranks(2, all_skipped, name, steps, str(tmp_path)):
        assert told in said
        assert (": nothing was trained" in said) == (steps < 100)
