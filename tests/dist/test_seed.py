"""Random streams: derived, saved, continued."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rankwise.dist import generator_memory, seed


def draw(n: int = 3) -> list[float]:
    """Draws from every generator. An odd number of gaussians leaves one cached."""
    python = [random.random() for _ in range(n)] + [random.gauss(0, 1)]
    numpy = [float(x) for x in np.random.rand(n)] + [float(np.random.standard_normal())]
    return [*python, *numpy, *torch.rand(n).tolist(), *torch.randn(n).tolist()]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_drawing_goes_on_where_the_state_was_taken_even_through_a_file() -> None:
    seed.seed_everything(5)
    draw()
    state = through_a_file(seed.rng_state())
    expected = [draw(), draw(5)]
    draw(100)
    seed.set_rng_state(state)
    assert [draw(), draw(5)] == expected
    seed.set_rng_state(state)
    assert [draw(), draw(5)] == expected


def test_taking_the_state_draws_nothing() -> None:
    seed.seed_everything(5)
    expected = draw()
    seed.seed_everything(5)
    seed.rng_state()
    assert draw() == expected


def test_the_same_seed_draws_the_same_and_another_seed_does_not() -> None:
    def drawn(number: Any) -> list[float]:
        seed.seed_everything(number)
        return draw()

    assert drawn(1) == drawn(1) == drawn(np.int64(1))
    assert not set(drawn(1)) & set(drawn(2))
    assert drawn(2**62 + 1)  # numpy uses 32 bits of a seed, Python and torch use all
    assert drawn(2**40)[0] != drawn(2**41)[0]


def test_ranks_draw_different_numbers_from_every_generator() -> None:
    streams = []
    for rank in range(8):
        seed.seed_rank(0, rank)
        streams.append(draw())
    seed.seed_rank(1, 0)
    streams.append(draw())
    for column in zip(*streams, strict=True):
        assert len(set(column)) == len(streams)


def test_a_derived_seed_is_equal_for_equal_words_and_unrelated_otherwise() -> None:
    seeds = [seed.derive(s, word, k) for s in range(50) for word in ("rank", "epoch") for k in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds)
    assert seed.derive(1, "rank", 2) == seed.derive(1, "rank", 2)
    assert seed.derive(1, 12) != seed.derive(11, 2)
    # If a seed changed between versions, every resumed run would change: this one must not.
    assert seed.derive(7, "rank", 0) == 9104323133979256287
    bits = np.array([[s >> b & 1 for b in range(63)] for s in seeds])
    assert abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / len(seeds) ** 0.5


def test_cheap_seeding_is_that_of_everything_on_the_cpu() -> None:
    seed.seed_everything(2**40 + 5)
    expected = draw()
    np.random.randn()  # leaves a cached gaussian, which seeding must discard
    seed.seed_streams(2**40 + 5)
    assert draw() == expected


def test_cheap_seeding_does_not_ask_after_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("manual_seed", "manual_seed_all", "_lazy_call", "is_available"):
        monkeypatch.setattr(torch.cuda, name, None)
    seed.seed_streams(5)


@pytest.mark.parametrize("gaussians", [0, 1, 2])
@pytest.mark.parametrize("drawn_between", [0, 1, 2, 700])
def test_what_is_drawn_beside_streams_put_aside_does_not_move_them(gaussians: int, drawn_between: int) -> None:
    def numbers(beside: bool) -> list[list[float]]:
        saved = seed.SavedStreams()
        seed.seed_everything(3)
        told = []
        for turn in range(4):
            for _ in range(gaussians if turn != 1 else 0):  # in one turn the training draws nothing
                told.append([np.random.randn(), random.gauss(0, 1), *torch.randn(3).tolist()])
            if beside:
                saved.save()
                seed.seed_streams(turn)
                for _ in range(drawn_between):
                    np.random.randn(), random.gauss(0, 1), torch.randn(3)
                saved.restore()
        return [*told, draw()]

    assert numbers(True) == numbers(False)


@pytest.mark.parametrize("name", ["of_python", "of_numpy", "of_torch"])
def test_a_generator_whose_memory_is_not_known_is_put_aside_by_its_own_functions(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator_memory, name, lambda: None)
    for gaussians, drawn_between in ((0, 1), (1, 2), (2, 0)):
        test_what_is_drawn_beside_streams_put_aside_does_not_move_them(gaussians, drawn_between)
    for draw_one in (random.random, np.random.randn, lambda: torch.randn(())):
        for gaussians in (0, 1):
            test_whatever_draws_moves_the_streams(draw_one, gaussians)


@pytest.mark.parametrize("gaussians", [0, 1])
@pytest.mark.parametrize(
    "draw_one",
    [
        random.random, lambda: random.gauss(0, 1), lambda: random.seed(4), np.random.rand, np.random.randn,
        lambda: np.random.seed(4), lambda: np.random.randint(3), lambda: torch.rand(1), lambda: torch.randn(()),
        lambda: torch.manual_seed(5), lambda: torch.randperm(3), lambda: [random.random() for _ in range(312)],
        lambda: np.random.randint(0, 2**32, 624, dtype=np.uint32),
    ],
)  # fmt: skip
def test_whatever_draws_moves_the_streams(draw_one: Callable[[], object], gaussians: int) -> None:
    seed.seed_everything(3)
    for _ in range(gaussians):  # a second one is cached: to use it does not change the words of the generator
        np.random.randn(), random.gauss(0, 1), torch.randn(())
    saved = seed.SavedStreams()
    saved.save()
    assert not saved.moved()
    expected = seed.rng_state()
    draw_one()
    assert saved.moved()
    saved.restore()
    assert not saved.moved()
    assert str(seed.rng_state()) == str(expected)
    assert torch.equal(seed.rng_state()["torch"], expected["torch"])


@pytest.mark.parametrize("gaussians", [0, 1])
def test_what_is_drawn_inside_a_context_moves_no_stream_even_if_it_fails(gaussians: int) -> None:
    seed.seed_everything(3)
    for _ in range(gaussians):
        random.gauss(0, 1), np.random.standard_normal(), torch.randn(())
    state = seed.rng_state()
    expected = draw()
    seed.set_rng_state(state)
    for number in range(2):
        with contextlib.suppress(ValueError), seed.streams_kept():
            draw(700)
            seed.seed_everything(9)
            if number:
                raise ValueError
    assert draw() == expected


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_stream_of_an_accelerator_is_taken_and_put_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, put = getattr(torch, kind), []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
    for name, fake in (("is_initialized", lambda: True), ("is_available", lambda: True), ("set_rng_state", put.append)):
        monkeypatch.setattr(device, name, fake)
    monkeypatch.setattr(device, "get_rng_state", lambda: torch.arange(3, dtype=torch.uint8))
    state = seed.rng_state()
    assert state[kind].tolist() == [0, 1, 2]
    seed.set_rng_state(state)
    with seed.streams_kept():
        monkeypatch.setattr(device, "get_rng_state", lambda: torch.zeros(3, dtype=torch.uint8))
    assert [given.tolist() for given in put] == [[0, 1, 2], [0, 1, 2]]
