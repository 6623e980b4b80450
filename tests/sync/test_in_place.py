"""What is true for one buffer of gradients is also true for gradients that remain where autograd creates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_all_reduce as flat
import torch
from ranks import on_ranks
from test_every_strategy import wrong
from torch import nn

from rankwise.sync import AllReduce, in_place
from rankwise.sync.in_place import InPlaceReduction


def always(function: Callable[..., Any], *args: Any) -> Any:
    """Call it in a separate process in which small models use this too."""
    in_place._SMALL_BYTES = 0
    return function(*args)


def test_only_tensors_that_are_large_on_average_stay_where_they_are() -> None:
    def way(model: nn.Module) -> bool:
        sync = AllReduce().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return isinstance(sync._reduction, InPlaceReduction)

    assert way(nn.Linear(256, 256))
    assert way(nn.Linear(64, 128, bias=False))  # 32 KiB
    assert not way(nn.Linear(16, 16))


def test_parameters_are_those_of_a_plain_loop() -> None:
    [answer] = on_ranks(1, always, flat.all_configurations, None)
    for (_, clip, _), (parameters, results) in answer.items():
        expected, figures = flat.plain_loop(clip)
        assert flat.distance(parameters, expected) < 1e-10
        for (mine, shared), (count, norm) in zip(results, figures, strict=True):
            assert (shared.total, shared.finite, mine.stepped) == (count, True, True)
            assert abs(shared.grad_norm - norm) < 1e-10


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_leaves_the_step_out(bad: float) -> None:
    [answer] = on_ranks(1, always, flat.spoilt_steps, bad, False, None)
    assert [finite for finite, *_ in answer] == [True, False, True]
    assert [kept for _, kept, *_ in answer] == [False, True, False]


def test_a_step_over_nothing_changes_nothing() -> None:
    [(result, same)] = on_ranks(1, always, flat.step_over_nothing, None)
    assert same
    assert not result.mine.stepped


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_steps_and_after_a_backward_is_what_it_is_in_a_plain_loop(set_to_none: bool) -> None:
    [without], [between] = (on_ranks(1, always, flat.zero_grad_between_steps, *args) for args in ((True, None), (False, None)))
    assert flat.same(without, between)
    [(ours, plain)] = on_ranks(1, always, flat.discarded_gradient, set_to_none, None)
    assert np.allclose(ours, plain, atol=1e-12)


def test_a_parameter_without_a_gradient_is_left_alone_and_tied_and_frozen_ones_are_exact() -> None:
    [ours] = on_ranks(1, always, flat.choosing_on_ranks, None)
    [theirs] = on_ranks(1, flat.choosing_on_ranks, None)
    assert flat.distance(ours, theirs) < 1e-10
    [ours], [theirs] = on_ranks(1, always, flat.single_dtype), on_ranks(1, flat.single_dtype)
    assert flat.distance(ours, theirs) < 1e-10


@pytest.mark.parametrize("name", ["all-reduce", "local-sgd:3", "diloco:3:int8"])
@pytest.mark.one_in(3)
def test_strategies_whose_ranks_step_alone_train_under_every_condition(name: str) -> None:
    for found in on_ranks(2, always, wrong, name):
        assert found == []


def embedded(sparse: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Embedding(100, 128, sparse=sparse)
    sync = AllReduce().attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))
    for step in range(3):
        sync.backward(model(torch.tensor([step, 7])).square().sum(), 2)
        sync.step()
    weights: list[float] = model.weight.detach().flatten().tolist()
    return weights


def test_a_sparse_gradient_is_made_dense_as_where_ranks_sum_it() -> None:
    assert embedded(True) == embedded(False)


def test_sparse_gradients_of_a_loop_that_calls_zero_grad_are_what_they_are_in_a_plain_loop() -> None:
    def trained(ours: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = AllReduce().attach(model, optimizer) if ours else None
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.tensor([[step, 7], [step, 1]])).square().sum()
            if sync is not None:
                sync.backward(loss, 2)
                sync.step()
            else:
                (loss / 2).backward()
                optimizer.step()
        return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]

    assert trained(True) == pytest.approx(trained(False), abs=1e-6)


def test_no_gradient_is_held_between_two_steps() -> None:
    model = nn.Linear(256, 256)
    sync = AllReduce().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        sync.backward(model(torch.ones(1, 256)).sum(), 1)
        sync.step()
        assert [p.grad for p in model.parameters()] == [None, None]
