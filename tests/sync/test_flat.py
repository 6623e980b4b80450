"""Gradients in one buffer. Large ones on a CPU are copied there during the backward pass."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn

from rankwise.dist import comm
from rankwise.errors import StepError
from rankwise.sync import AllReduce
from rankwise.sync.flat import FlatReduction

SIDE = 128  # a layer of 128 kB in float64


class Layers(nn.Module):
    """The layer `spare` is used only in some passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.spare = (nn.Linear(SIDE, SIDE, dtype=torch.float64, bias=False) for _ in range(3))
        self.uses_spare = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return self.spare(found) if self.uses_spare else found


def samples(number: int, n: int = 8) -> torch.Tensor:
    return torch.randn(n, SIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.fixture
def model() -> Layers:
    return Layers()


@pytest.fixture
def reduction(model: Layers) -> FlatReduction:
    return FlatReduction(list(model.parameters()), together=False)


def test_a_gradient_is_in_the_buffer_when_the_pass_ends_and_a_second_pass_is_added(
    model: Layers, reduction: FlatReduction
) -> None:
    other = Layers()
    [buffer] = reduction._buffers
    for number in range(3):
        for part in samples(number).chunk(number + 1):
            reduction.expect(1.0, last=False)
            model(part).square().sum().backward()
            assert all(gradient is view for gradient, view in zip(gradients(model), buffer.views, strict=True))
            other(part).square().sum().backward()
        reduction.reduce()
        [whole] = reduction.gradients()
        assert torch.equal(whole, torch.cat([gradient.flatten() for gradient in gradients(other)]))
        assert reduction._tail.read().complete
        reduction.release()
        other.zero_grad()


def test_a_layer_that_a_step_does_not_use_has_no_gradient_of_the_step_before(model: Layers, reduction: FlatReduction) -> None:
    for number in range(4):
        model.uses_spare = number % 2 == 0
        reduction.expect(1.0, last=True)
        model(samples(number)).sum().backward()
        tail = reduction.reduce()
        assert tail.without_gradient() == ([] if model.uses_spare else [2])
        assert model.spare.weight.grad is not None
        assert bool(model.spare.weight.grad.any()) == model.uses_spare
        reduction.release()
        assert gradients(model) == []


def test_a_gradient_outside_of_a_step_belongs_to_the_script(model: Layers, reduction: FlatReduction) -> None:
    kept = []
    for number in range(2):
        model(samples(number)).sum().backward()
        kept.append(gradients(model))
        model.zero_grad()
    assert not any(torch.equal(one, other) for one, other in zip(*kept, strict=True))
    assert not reduction._buffers[0].flat.any()


def test_the_buffer_is_freed_with_its_reduction(model: Layers) -> None:
    reduction = FlatReduction(list(model.parameters()), together=False)
    flat = weakref.ref(reduction._buffers[0].flat)
    del reduction
    gc.collect()
    assert flat() is None
    model(samples(0)).sum().backward()
    assert len(gradients(model)) == 3


def test_a_model_that_has_become_double_is_refused() -> None:
    model = nn.Linear(SIDE, SIDE)
    reduction = FlatReduction(list(model.parameters()), together=False)
    model.double()
    reduction.expect(1.0, last=True)
    model(samples(0)).sum().backward()
    with pytest.raises(StepError, match=r"were torch.float32 on cpu at the start of the training, and are torch.float64"):
        reduction.reduce()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_graph_of_the_gradient_does_not_reach_the_buffer(model: Layers, reduction: FlatReduction) -> None:
    reduction.expect(1.0, last=True)
    model(samples(0)).square().sum().backward(create_graph=True)
    reduction.reduce()
    assert not any(gradient.requires_grad for gradient in reduction.gradients())


def trained(steps: int, overlap: bool | None) -> list[Any]:
    """Each step is of 8 samples over all ranks, in two micro-batches; every second one does not use a layer, the fourth has
    another one."""
    world = comm.init()
    model = Layers()
    sync = AllReduce(overlap=overlap).attach(model, optimizer := torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))
    for number in range(steps):
        model.uses_spare = number % 2 == 0
        if number == 4:
            model.second = nn.Linear(SIDE, SIDE, dtype=torch.float64, bias=False)
            torch.nn.init.constant_(model.second.weight, 0.01)
            optimizer.add_param_group({"params": model.second.parameters()})
            sync.follow()
        mine = samples(number)[world.rank :: world.world_size]
        for k, part in enumerate(mine.chunk(2)):
            sync.backward(model(part).square().sum(), len(part), last=k == 1)
        sync.step()
    return [p.detach().numpy() for p in model.parameters()]


def test_large_layers_train_the_same_on_any_number_of_ranks() -> None:
    [expected] = on_ranks(1, trained, 7, False)
    for ranks in (2, 4):
        for found in on_ranks(ranks, trained, 7, False):
            for one, other in zip(found, expected, strict=True):
                assert abs(one - other).max() < 1e-12
