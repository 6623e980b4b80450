"""Smaller messages: what is sent and what is kept add up to the gradient, and nothing that is not finite remains."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F

from rankwise.dist import comm
from rankwise.errors import ConfigError
from rankwise.sync import AllReduce
from rankwise.sync.codecs import codec_of
from rankwise.training.precision import LossScale

CODECS = ("bf16", "fp16", "int8", "powersgd:2")
SHAPES = [torch.Size((40, 30)), torch.Size((30,)), torch.Size((8, 5, 5)), torch.Size((3, 2)), torch.Size(())]

Flat = npt.NDArray[np.float64]


def messages(rank: int, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    length = sum(shape.numel() for shape in SHAPES)
    return [torch.randn(length, generator=generator, dtype=torch.float64) for _ in range(steps)]


def balance(name: str) -> tuple[float, float]:
    """(by how much what was sent and what is kept differ from what should be sent, what one message lost)."""
    given = messages(comm.rank(), 6)
    codec = codec_of(name, given[0], SHAPES)
    told = []
    for one in given:
        told.append(codec.sum_(one.clone()))
        codec.remember()
    wanted = comm.all_reduce(torch.stack(given).sum(0))
    kept = comm.all_reduce(codec.error.clone())
    first = comm.all_reduce(given[0].clone())
    return float((sum(t.double() for t in told) + kept - wanted).abs().max()), float((told[0] - first).abs().max())


@pytest.mark.parametrize("name", CODECS)
def test_what_is_told_and_what_is_kept_add_up_to_what_there_was(name: str) -> None:
    for apart, lost in on_ranks(2, balance, name):
        # Two numbers of 16 bits are added in 16 bits: nothing corrects this rounding.
        assert apart < (0.2 if name == "bf16" else 0.02 if name == "fp16" else 1e-5)
        assert lost > 1e-4, "the codec loses nothing: the test shows nothing"


def of_low_rank() -> float:
    generator = torch.Generator().manual_seed(5)
    a, b = torch.randn(40, 2, generator=generator).double(), torch.randn(2, 30, generator=generator).double()
    flat = torch.cat([(a @ b).reshape(-1), *(torch.randn(s.numel(), generator=generator).double() for s in SHAPES[1:])])
    codec = codec_of("powersgd:2", flat, [SHAPES[0], *(torch.Size((s.numel(),)) for s in SHAPES[1:])])
    for _ in range(3):
        total = codec.sum_(flat.clone())
        codec.remember()
    return float((total - 2 * flat).abs().max())


def test_powersgd_sends_a_matrix_of_as_few_columns_as_it_has_exactly() -> None:
    for apart in on_ranks(2, of_low_rank):
        assert apart < 1e-9


def not_finite(name: str) -> list[bool]:
    flat = messages(comm.rank(), 1)[0]
    codec = codec_of(name, flat, SHAPES)
    codec.sum_(flat.clone())
    codec.remember()
    before = codec.error.clone(), {i: right.clone() for i, right in codec.rights.items()}
    seen = []
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = flat.clone()
        if comm.rank() == 1:
            spoilt[7] = bad
        seen.append(bool(torch.isfinite(codec.sum_(spoilt)).all()))
        codec.remember()
        if comm.rank() == 1 or name.startswith("powersgd"):
            seen.append(torch.equal(codec.error, before[0]))
        seen += [torch.equal(right, before[1][i]) for i, right in codec.rights.items()]
    return seen


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_is_seen_by_all_and_stays_in_no_memory(name: str) -> None:
    first, second = on_ranks(2, not_finite, name)
    assert second[0] is False
    assert first[0] is False
    assert all(kept for i, kept in enumerate(second) if i % (len(second) // 3))
    assert all(kept for i, kept in enumerate(first) if i % (len(first) // 3))


@pytest.mark.parametrize(
    ("name", "sent"),
    [("bf16", 2 * 1437), ("fp16", 2 * 1437), ("int8", 2052), ("powersgd:2", 8 * (2 * 70 + 30 + 2 * (8 + 25) + 6 + 1))],
)
def test_the_bytes_of_a_message_are_known(name: str, sent: int) -> None:
    flat = torch.zeros(1437, dtype=torch.float64)
    assert codec_of(name, flat, SHAPES).sent_bytes(flat) == sent


# --- in training


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3)).double()


def flat_parameters(model: nn.Module) -> Flat:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]).numpy().copy()


def trained(sync: AllReduce, steps: int = 60, loss_scale: LossScale | None = None, spoil: bool = False) -> Any:
    generator = torch.Generator().manual_seed(comm.rank())
    model = make_model()
    sync.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), typical_count=8.0, loss_scale=loss_scale)
    losses, stepped = [], []
    for step in range(steps):
        x = torch.randn(4, 8, dtype=torch.float64, generator=generator)
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1), reduction="sum")
        if spoil and step == 5 and comm.rank() == 1:
            loss = loss * math.nan
        sync.backward(loss, 4, last=True)
        stepped.append(sync.step().mine.stepped)
        losses.append(loss.item() / 4)
    sync.finish()
    return flat_parameters(model), float(np.mean(losses[-10:])), stepped


def curves() -> dict[str, tuple[Flat, float]]:
    exact = trained(AllReduce())
    return {"exact": exact, **{name: trained(AllReduce(compress=name)) for name in CODECS}}


def test_a_compressed_training_comes_to_the_loss_of_the_exact_one_and_ranks_stay_alike() -> None:
    first, second = on_ranks(2, curves)
    for name, (parameters, loss, _) in first.items():
        assert np.array_equal(parameters, second[name][0])
        assert abs(loss - first["exact"][1]) < 0.05, name
        assert (name == "exact") == np.array_equal(parameters, first["exact"][0])


def alone() -> bool:
    return np.array_equal(trained(AllReduce(compress="int8"), 5)[0], trained(AllReduce(), 5)[0])


def test_one_rank_compresses_nothing() -> None:
    assert on_ranks(1, alone) == [True]


def spoilt(name: str) -> list[bool]:
    return trained(AllReduce(compress=name), 10, spoil=True)[2]


@pytest.mark.parametrize("name", CODECS)
def test_a_gradient_that_is_not_finite_skips_one_step_on_all_ranks_and_no_more(name: str) -> None:
    for stepped in on_ranks(2, spoilt, name):
        assert stepped == [step != 5 for step in range(10)]


def scaled() -> tuple[Flat, Flat]:
    """(the result with a loss scale that grows at every third step, the result with a constant one)."""
    grown = trained(AllReduce(compress="int8"), 12, LossScale(2.0, growth_interval=3))[0]
    return grown, trained(AllReduce(compress="int8"), 12)[0]


def test_what_a_message_lost_follows_the_loss_scale() -> None:
    for grown, constant in on_ranks(2, scaled):
        assert np.abs(grown - constant).max() < 1e-12  # powers of two change no bit, except for the last ones of the sums


def unfrozen(name: str) -> tuple[bool, bool]:
    """When the first layer joins the second: (whether what the second has lost is still there, whether all parameters are)."""
    model = make_model()
    model[0].requires_grad_(False)  # type: ignore[operator]
    sync = AllReduce(compress=name).attach(model, torch.optim.SGD(model.parameters(), lr=0.1), typical_count=8.0)
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank()))
    sync.backward(model(x).sum(), 4, last=True)
    sync.step()
    with sync.averaged():
        before = (sync.rank_state_dict() or {})["errors"]["2.weight"].clone()
    model[0].requires_grad_(True)  # type: ignore[operator]
    sync.follow()
    with sync.averaged():
        after = (sync.rank_state_dict() or {})["errors"]
    return torch.equal(before, after["2.weight"]) and bool(before.any()), set(after) == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_what_was_lost_of_a_parameter_is_kept_when_others_join_it(name: str) -> None:
    for kept, all_there in on_ranks(2, unfrozen, name):
        assert kept
        assert all_there


def near_the_end_of_fp16() -> str:
    model = nn.Linear(1, 1, bias=False)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        sync = AllReduce(compress="fp16").attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for _ in range(2):
            sync.backward((model.weight * 60_000).sum(), 1, last=True)
            sync.step()
    return said.getvalue()


def test_a_gradient_near_the_end_of_fp16_is_told_once() -> None:
    assert on_ranks(2, near_the_end_of_fp16)[0].count("gradients are close to 65504") == 1


def small_model() -> str:
    model = nn.Linear(2, 2)
    try:
        AllReduce(compress="powersgd:2").attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except ConfigError as error:
        return str(error)
    return ""


def test_powersgd_on_a_model_without_a_matrix_that_is_worth_it_is_refused() -> None:
    for told in on_ranks(2, small_model):
        assert told.startswith("compress='powersgd:2': no matrix parameter becomes smaller with 2 columns")


def test_wrong_names_are_refused_before_anything_is_sent() -> None:
    for name in ("int4", "powersgd", "powersgd:0", "powersgd:x", ""):
        with pytest.raises(ConfigError, match="give one of 'bf16', 'fp16', 'int8', or 'powersgd:RANK' "):
            AllReduce(compress=name)
    with pytest.raises(ConfigError, match="a compressed message is sent after the backward pass; remove one"):
        AllReduce(overlap=True, compress="bf16")


def with_skipped_steps(name: str, skipped: str) -> tuple[list[bool], list[float]]:
    """(whether each step was made, the weights at the end). `skipped`: what skips every second step."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    sync = AllReduce(compress=name).attach(model, torch.optim.SGD(model.parameters(), lr=1.0))
    generator, stepped = torch.Generator().manual_seed(comm.rank()), []
    for _ in range(3):
        gradient = torch.randn(16, 16, generator=generator)
        sync.backward((model.weight * gradient).sum(), 4, last=True)
        stepped.append(sync.step().mine.stepped)
        if skipped == "no samples":
            sync.backward((model.weight * 0).sum(), 0, last=True)
        elif skipped == "not finite":
            sync.backward((model.weight * (math.nan if comm.rank() else 1.0)).sum(), 4, last=True)
        if skipped:
            stepped.append(sync.step().mine.stepped)
    return stepped, model.weight.flatten().tolist()


@pytest.mark.parametrize("skipped", ["no samples", "not finite"])
@pytest.mark.parametrize("name", ["int8", "bf16", "powersgd:1"])
@pytest.mark.one_in(2)
def test_a_skipped_step_loses_nothing_of_what_is_kept(name: str, skipped: str) -> None:
    for (_, expected), (stepped, weights) in zip(
        on_ranks(2, with_skipped_steps, name, ""), on_ranks(2, with_skipped_steps, name, skipped), strict=True
    ):
        assert stepped == [True, False] * 3
        assert weights == expected


def alternating(compress: str, alternate: bool) -> float:
    """How far the steps of a head are from the sum of its gradients, which are always the same. `alternate`: it gets one in
    every second step only."""
    torch.manual_seed(0)
    heads = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
    before = heads[0].weight.detach().clone()
    sync = AllReduce(compress=compress).attach(heads, torch.optim.SGD(heads.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(1)
    x, t = (torch.randn(8, 64, generator=generator) for _ in range(2))
    mine = slice(0, 5) if comm.rank() == 0 else slice(5, 8)
    steps = 128
    for step in range(2 * steps if alternate else steps):
        losses = [(head(x[mine]) * t[mine]).sum() for head in heads]
        sync.backward(losses[step % 2] if alternate else sum(losses, torch.zeros(())), 5 if comm.rank() == 0 else 3)
        sync.step()
    exact = (t.t() @ x) / 8 * 1e-3 * steps
    return float((before - heads[0].weight.detach() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", ["int8", "powersgd:2"])
@pytest.mark.one_in(2)
def test_nothing_is_lost_of_a_parameter_that_is_used_in_every_second_step(name: str) -> None:
    [usual, _] = on_ranks(2, alternating, name, False)
    [ours, _] = on_ranks(2, alternating, name, True)
    assert ours < 2 * usual + 1e-3
