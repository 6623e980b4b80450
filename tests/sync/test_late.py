"""A step whose result arrives late, as on a GPU, does what a step does that waits for it: bit for bit, with skipped steps.

The arithmetic runs on the CPU here; only the arrival of the numbers is replaced. tests/test_on_a_gpu.py has the rest.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import rankwise
from rankwise.actions import Log, every
from rankwise.errors import StepError
from rankwise.sync import AllReduce, StepResult, late
from rankwise.sync.reduction import LocalTail, RidingTail
from rankwise.sync.strategy import LateResult

STEPS = 12
NOT_FINITE, EMPTY = (4, 5), 8
"""The steps with nan or inf in the gradient, and one without a sample."""


class Arriving:
    """Numbers that are here when `wait` is called, and not before."""

    events: ClassVar[list[str]] = []

    def __init__(self, _device: torch.device, numbers: int) -> None:
        self._numbers = [math.nan] * numbers

    def send(self, numbers: torch.Tensor) -> None:
        self.events.append("sent")
        self._numbers[: len(numbers)] = numbers.tolist()

    def wait(self) -> list[float]:
        self.events.append("waited")
        return self._numbers


def on_a_gpu(arrival: type = Arriving) -> Any:
    """A patch: strategies of this process take the CPU for a GPU. `Arriving.events` has what happens to the numbers."""
    Arriving.events = []
    return mock.patch.multiple(late, is_possible=lambda given: len({p.dtype for p in given}) == 1, Arrival=arrival)


@pytest.fixture
def events() -> Iterator[list[str]]:
    with on_a_gpu():
        yield Arriving.events


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, 0.01, fused=True),
    "amsgrad": lambda p: Adam(p, 0.01, amsgrad=True, fused=True),
    "momentum": lambda p: SGD(p, 0.1, momentum=0.9, fused=True),
    "sgd": lambda p: SGD(p, 0.1, fused=True),
}


def trained(
    name: str, clip: float | None, count_there: bool, arrives_late: bool, dtype: torch.dtype = torch.float64
) -> tuple[list[Any], list[Any], list[float], list[str]]:
    """(the parameters, the results, the optimizer's counts of steps, what happened to the numbers)"""
    if arrives_late:
        on_a_gpu().start()
    rank, model = rankwise.init().rank, network(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    if name == "momentum":
        for p in model.parameters():
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    sync = AllReduce().attach(model, optimizer, clip_norm=clip, typical_count=6)
    generator = torch.Generator().manual_seed(rank)
    results = []
    for step in range(STEPS):
        n = 0 if step == EMPTY else 3 + (step + rank) % 4
        x, y = torch.randn(n, 5, dtype=dtype, generator=generator), torch.randint(3, (n,), generator=generator)
        loss = F.cross_entropy(model(x), y, reduction="sum")
        if step in NOT_FINITE and rank == 0:
            loss = loss * (math.nan if step == NOT_FINITE[0] else math.inf)
        sync.backward(loss, torch.tensor([n]) if count_there else n, last=True)
        result = sync.step()
        assert isinstance(result, LateResult) == arrives_late
        results.append(result)
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    return [p.tolist() for p in model.parameters()], [(r.mine, r.shared) for r in results], counts, Arriving.events


@pytest.mark.one_in(3)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_late_step_is_the_step_bit_for_bit(n: int, clip: float | None, name: str) -> None:
    for rank, usual in enumerate(on_ranks(n, trained, name, clip, n == 1, False)):
        parameters, results, counts, happened = on_ranks(n, trained, name, clip, n == 1, True)[rank]
        assert parameters == usual[0]
        assert str(results) == str(usual[1])
        assert counts == usual[2]
        assert [shared.finite for _, shared in results] == [step not in NOT_FINITE for step in range(STEPS)]
        assert happened.count("sent") == happened.count("waited") >= STEPS - 2  # the first step waits, and so may the empty one


def test_in_float32_without_clipping_it_is_too(events: list[str]) -> None:
    (usual, _, _, _), (arrived, _, _, _) = (on_ranks(1, trained, "adamw", None, False, way, torch.float32)[0] for way in (0, 1))
    assert usual == arrived


def test_the_numbers_are_waited_for_in_the_next_step(events: list[str]) -> None:
    rankwise.init()
    model = network()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    sync = AllReduce().attach(model, optimizer)

    def step() -> Any:
        sync.backward(model(torch.ones(2, 5, dtype=torch.float64)).sum(), 2, last=True)
        return sync.step()

    step()
    assert events == []  # torch's Python runs the first step
    first, second = step(), step()
    assert events == ["sent", "waited", "sent"]
    assert (first.shared.finite, second.shared.finite) == (True, True)
    assert events == ["sent", "waited", "sent", "waited"]
    assert pickle.loads(pickle.dumps(second)) == StepResult(second.mine, second.shared)


@pytest.mark.parametrize("count", [5.0, 2.0**40 + 3])
def test_what_a_tail_knows_of_a_count_on_the_device_is_what_it_reads(count: float) -> None:
    there = torch.tensor([count], dtype=torch.float64)
    alone, riding = LocalTail(), RidingTail(torch.zeros(2 + RidingTail.LENGTH))
    for tail, changed in itertools.product((alone, riding), (False, True)):
        tail.write(there, None, changed)
        if changed:
            assert tail.there() is None
            continue
        told = tail.there()
        assert told is not None
        total, of_others = told
        assert isinstance(total, torch.Tensor)
        assert (total.shape, total.item(), of_others.item()) == ((), count, 0)
        assert tail.read().total == count
    alone.write(there, [True, False], False)
    riding.write(there, [True, False], False)
    assert alone.there() is riding.there() is None


def changed_on_rank_1() -> list[str]:
    on_a_gpu().start()
    rank, model = rankwise.init().rank, network()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    sync = AllReduce().attach(model, optimizer)
    told = []
    for step in range(5):
        if step == 3 and rank == 1:
            next(model.parameters()).requires_grad_(False)
        try:
            sync.backward(model(torch.ones(2, 5, dtype=torch.float64)).sum(), 2, last=True)
            sync.step()
        except StepError as error:
            return [*told, str(error)]
        told.append(f"{step}")
    return told


def test_a_layer_that_one_rank_alone_has_frozen_is_an_error_of_all_in_the_next_step_at_the_latest() -> None:
    (*before, of_rank_0), (*_, of_rank_1) = on_ranks(2, changed_on_rank_1)
    assert before == ["0", "1", "2", "3"]
    assert of_rank_0 == of_rank_1
    assert "0.weight is trained on rank 0 and frozen on rank 1" in of_rank_0


def test_numbers_are_copied_into_pinned_memory_and_waited_for_by_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CUDA, only what it calls."""
    calls: list[Any] = []

    class Event:
        def record(self, stream: str) -> None:
            calls.append(stream)

        def synchronize(self) -> None:
            calls.append("synchronize")

    def zeros(*size: int, pin_memory: bool, **given: Any) -> torch.Tensor:
        calls.append(("pinned", pin_memory))
        return torch.empty(*size, **given).zero_()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch, "zeros", zeros)
    arrival = late.Arrival(torch.device("cuda:1"), 3)
    arrival.send(torch.tensor([2.5], dtype=torch.float64))
    assert arrival.wait() == [2.5, 0.0, 0.0]
    arrival.send(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert arrival.wait() == [1.0, 2.0, 3.0]
    assert calls == [("pinned", True), *2 * ["stream of cuda:1", "synchronize"]]


def step_fn(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def run(folder: str, actions: list[Any], max_steps: int = 20, **settings: Any) -> tuple[rankwise.Trainer, list[float]]:
    """Two of its samples give gradients that are not finite."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(90, 5, dtype=torch.float64, generator=generator), torch.randint(3, (90,), generator=generator)
    x[7], x[50] = math.nan, math.inf
    model = network()
    optimizer = AdamW(model.parameters(), 0.01)
    rates: list[float] = []
    trainer = rankwise.Trainer(
        model, optimizer, step_fn, TensorDataset(x, y), global_batch_size=9, accumulate=2, max_steps=max_steps, run_dir=folder,
        scheduler=StepLR(optimizer, 2, 0.9), clip_norm=0.5, actions=actions, **settings,
    )  # fmt: skip
    at_step = trainer.sync.step

    def noted() -> Any:
        rates.append(optimizer.param_groups[0]["lr"])
        return at_step()

    with mock.patch.object(trainer.sync, "step", noted):
        trainer.fit()
    return trainer, rates


def lines(folder: str) -> list[dict[str, Any]]:
    of_time = ("clock_s", "samples_per_s", "time")
    found = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in of_time and not k.startswith("share/")} for line in found]


def test_a_training_is_the_same_with_its_skipped_steps_rates_losses_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, list[Any]] = {"usual": [], "late": []}

    def ran(folder: str) -> tuple[Any, ...]:
        trainer, rates = run(folder, [every(lambda state: seen[folder].append((state.step, state.skipped)), steps=3), Log(7)])
        text = capsys.readouterr()
        said = [line for line in (text.out + text.err).splitlines() if "skipped on all ranks" in line]
        weights = [p.tolist() for p in trainer.state.model.parameters()]
        return weights, rates, trainer.state.steps_left_out, said, lines(folder), seen[folder]

    usual = ran("usual")
    with on_a_gpu():
        arrived = ran("late")
    assert (usual[2], len(usual[3])) == (4, 4)
    assert len(Arriving.events) >= 30
    assert str(usual) == str(arrived)


def test_a_resume_continues_as_if_there_had_been_no_stop(events: list[str]) -> None:
    whole, _ = run("whole", [])
    run("part", [], max_steps=11)
    rest, _ = run("part", [], max_steps=20)
    for a, b in zip(whole.state.model.parameters(), rest.state.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert whole.state.steps_left_out == rest.state.steps_left_out == 4


@pytest.mark.parametrize(("action", "between"), [(None, 0), ("every 5 steps", 1), ("each step", 5)])
def test_only_an_action_that_is_due_makes_a_step_wait(action: str | None, between: int) -> None:
    """Between steps 6 and 10, without the wait in the next step: this one comes after the forward pass."""
    order: list[str] = []

    class Noted(Log):
        def __call__(self, state: Any) -> None:
            order.append(f"{state.step}")
            super().__call__(state)

    def noted(model: nn.Module, batch: Any) -> Any:
        order.append("forward")
        return step_fn(model, batch)

    class Waiting(Arriving):
        def wait(self) -> list[float]:
            order.append("waited")
            return super().wait()

    model = network()
    optimizer = AdamW(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(90, 5, dtype=torch.float64), torch.randint(3, (90,)))
    given = {None: [], "every 5 steps": [every(lambda _: None, steps=5)], "each step": [lambda _: None]}[action]
    with on_a_gpu(Waiting):
        rankwise.Trainer(
            model, optimizer, noted, data, global_batch_size=3, max_steps=19, run_dir="run", actions=[*given, Noted(100)]
        ).fit()
    part = order[order.index("6") : order.index("11")]
    waits = [after for before, after in itertools.pairwise(part) if before.isdigit() and after == "waited"]
    assert len(waits) == between, part
    assert part.count("waited") == 5


def test_a_rate_that_is_not_finite_is_an_error_before_the_next_step_uses_it(events: list[str]) -> None:
    model = network()
    optimizer = AdamW(model.parameters(), 0.01)
    before: list[Any] = []

    class Broken(StepLR):
        def step(self, epoch: Any = None) -> None:
            super().step()
            if self.last_epoch == 3:
                before.append(copy.deepcopy(model.state_dict()))
                optimizer.param_groups[0]["lr"] = math.nan

    data = TensorDataset(torch.randn(90, 5, dtype=torch.float64), torch.randint(3, (90,)))
    with pytest.raises(StepError, match="the learning rate is nan after step 3"):
        rankwise.Trainer(
            model, optimizer, step_fn, data, global_batch_size=3, max_steps=9, run_dir="run", scheduler=Broken(optimizer, 2)
        ).fit()
    assert all(torch.equal(value, before[0][key]) for key, value in model.state_dict().items())
