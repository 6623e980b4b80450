"""What a script does to the gradients of a step before `sync.step` is noticed, on any number of ranks."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankError, on_ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_

from rankwise.sync import AllReduce, DiLoCo, LocalSGD, in_place
from rankwise.sync.strategy import SyncStrategy

CHANGED = "the gradients were changed between sync.backward and sync.step. There they are sums over this rank's samples"
REMOVED = "the gradients of this step were removed after sync.backward, so these samples would not count"
WAYS: dict[str, Callable[[], SyncStrategy]] = {
    "one buffer": lambda: AllReduce(overlap=False),
    "buckets": lambda: AllReduce(overlap=True),
    "compressed": lambda: AllReduce(compress="bf16"),
    "local steps": lambda: LocalSGD(every=2),
    "local steps, outer optimizer": lambda: DiLoCo(every=2),
}

Change = Callable[[nn.Module, torch.optim.Optimizer], Any]


def clip(model: nn.Module, _: torch.optim.Optimizer) -> None:
    clip_grad_norm_(model.parameters(), 0.1)


def replace(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 2


def zero(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def remove(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def cancel(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """As DINO does with its last layer in the first epoch."""
    assert isinstance(model.bias, nn.Parameter)
    model.bias.grad = None


def nothing(*_: Any) -> None:
    """As the documentation says."""


def steps(way: str, change: str, micro_batches: int = 1, begin: int = 0, number: int = 3) -> str:
    """What steps print with `change` between the passes and the step, from step `begin` on; with several micro-batches, after
    the first of them."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        _steps(way, change, micro_batches, begin, number)
    return out.getvalue()


def _steps(way: str, change: str, micro_batches: int, begin: int, number: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = WAYS[way]().attach(model, optimizer)
    changes: dict[str, Change] = {f.__name__: f for f in (clip, replace, zero, remove, cancel, nothing)}
    for step in range(number):
        for micro_batch in range(micro_batches):
            sync.backward(model(torch.ones(4, 3)).square().sum(), 4, last=micro_batch == micro_batches - 1)
            if step >= begin and micro_batch == 0:
                changes[change](model, optimizer)
        sync.step()
        optimizer.zero_grad()
    sync.finish()


@pytest.mark.parametrize("change", ["clip", "replace", "zero"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(4)
def test_a_change_before_the_step_is_one_warning(way: str, ranks: int, change: str) -> None:
    told, *others = on_ranks(ranks, steps, way, change)
    assert told.count(f"warning: {CHANGED}") == 1
    assert "give clip_norm to attach" in told
    assert not any(CHANGED in other for other in others)


@pytest.mark.parametrize("way", ["one buffer", "buckets"])
def test_a_change_between_two_micro_batches_is_one_warning(way: str) -> None:
    assert on_ranks(2, steps, way, "clip", 2)[0].count(CHANGED) == 1


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(2)
def test_gradients_that_are_removed_before_the_step_are_an_error(way: str, micro_batches: int) -> None:
    ranks = 1 if way == "one buffer" else 2
    with pytest.raises(RankError, match=REMOVED):
        on_ranks(ranks, steps, way, "remove", micro_batches)


def test_the_error_of_a_gradient_that_is_removed_to_leave_a_layer_unchanged_says_what_does_this() -> None:
    with pytest.raises(RankError, match=rf"{REMOVED}; .*to leave a layer unchanged in a step, call requires_grad_\(False\)"):
        on_ranks(2, steps, "one buffer", "cancel")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(2)
def test_a_loop_that_leaves_gradients_alone_hears_nothing(way: str) -> None:
    for ranks in (1, 2):
        assert not any("gradients were" in told for told in on_ranks(ranks, steps, way, "nothing", 2))


def with_ignored_labels(way: str) -> str:
    """What steps print in which the second micro-batch counts nothing: all its labels are ignored."""
    model = nn.Linear(3, 2)
    sync = WAYS[way]().attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for _ in range(2):
            for labels in (torch.ones(4).long(), torch.full((4,), -100), torch.ones(4).long()):
                loss = nn.functional.cross_entropy(model(torch.ones(4, 3)), labels, reduction="sum")
                sync.backward(loss, (labels != -100).sum())
            sync.step()
        sync.finish()
    return out.getvalue()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(2)
def test_a_micro_batch_that_counts_nothing_is_no_change_by_the_script(way: str) -> None:
    assert not any("gradients were" in told for told in on_ranks(2, with_ignored_labels, way))


def test_only_the_first_steps_are_watched() -> None:
    assert on_ranks(1, steps, "one buffer", "clip", 1, 15, 17)[0].count(CHANGED) == 1
    assert CHANGED not in on_ranks(1, steps, "one buffer", "clip", 1, 16, 17)[0]


def late_pass_through(way: str) -> None:
    """After many steps of its own, a discriminator gets gradients of its generator's first step."""
    generator, discriminator = nn.Linear(3, 3), nn.Linear(3, 2)
    of_both = [WAYS[way]().attach(model, torch.optim.SGD(model.parameters(), lr=0.01)) for model in (generator, discriminator)]
    noise = torch.ones(4, 3)
    for _ in range(20):
        of_both[1].backward(discriminator(noise).square().sum(), 4, last=True)
        of_both[1].step()
    of_both[0].backward(discriminator(generator(noise)).sum(), 4, last=True)
    of_both[0].step()
    of_both[1].backward(discriminator(noise).square().sum(), 4, last=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(2)
def test_gradients_of_another_model_are_an_error_also_if_they_come_late(way: str) -> None:
    with pytest.raises(RankError, match="gradients of another backward pass"):
        on_ranks(2, late_pass_through, way)


def in_place_steps(change: str) -> str:
    in_place._SMALL_BYTES = 0
    return steps("one buffer", change, 2)


def test_gradients_that_stay_where_autograd_creates_them_are_watched_too() -> None:
    assert "gradients were" not in on_ranks(1, in_place_steps, "nothing")[0]
    assert on_ranks(1, in_place_steps, "clip")[0].count(CHANGED) == 1


def clipped_in_a_hook() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        _clipped_in_a_hook()
    return out.getvalue()


def _clipped_in_a_hook() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = AllReduce().attach(model, optimizer)
    optimizer.register_step_pre_hook(lambda *_: clip(model, optimizer))
    for _ in range(2):
        sync.backward(model(torch.ones(4, 3)).square().sum(), 4)
        sync.step()


def test_what_the_warning_recommends_is_no_reason_for_a_warning() -> None:
    assert not any("gradients were" in told for told in on_ranks(2, clipped_in_a_hook))


def failed_pass() -> None:
    """A step that the script gives up after its second micro-batch has failed, and the next one."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = AllReduce().attach(model, optimizer)
    loss = model(torch.ones(4, 3)).square().sum()
    sync.backward(loss, 4)
    with pytest.raises(RuntimeError):
        sync.backward(loss, 4)  # its graph is gone
    optimizer.zero_grad()
    sync.backward(model(torch.ones(4, 3)).square().sum(), 4)
    sync.step()


def test_a_script_that_goes_on_after_a_failed_pass_may_clear_the_gradients() -> None:
    on_ranks(1, failed_pass)
