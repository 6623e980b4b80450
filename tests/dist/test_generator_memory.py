"""Where generators keep their state: found in this Python, numpy and torch, and never confused with other memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from rankwise.dist import generator_memory, private_names


@pytest.mark.parametrize("name", ["of_python", "of_numpy", "of_torch"])
def test_it_is_found_here(name: str) -> None:
    assert getattr(generator_memory, name)() is not None


def test_that_of_torch_is_found_whatever_device_is_the_default() -> None:
    with torch.device("meta"):
        assert generator_memory.of_torch.__wrapped__() is not None


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("of_python", random.random),
        ("of_numpy", np.random.rand),
        ("of_torch", lambda: torch.rand(())),
        ("of_torch", lambda: torch.randn(())),
    ],
)  # fmt: skip
def test_each_of_two_thousand_draws_moves_it_to_a_place_of_its_own(name: str, draw: Any) -> None:
    memory = getattr(generator_memory, name)()
    places = set()
    for _ in range(2000):
        places.add(memory.place())
        assert memory.place() == memory.place()
        draw()
    assert len(places) == 2000


def test_a_torch_without_an_address_and_one_that_keeps_something_else_there_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    find = generator_memory.of_torch.__wrapped__
    assert find() is not None
    nothing = np.zeros(4096, np.uint8)
    for address in (lambda generator: None, lambda generator: nothing.ctypes.data):
        with monkeypatch.context() as patch:
            patch.setattr(private_names, "address", address)
            assert find() is None
    seeded = nothing.copy()
    seeded[80:88] = np.frombuffer(generator_memory._SEED.to_bytes(8, "little"), np.uint8)
    monkeypatch.setattr(private_names, "address", lambda generator: seeded.ctypes.data)
    assert find() is None


def test_a_generator_of_another_kind_in_the_place_of_numpys_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    other = np.zeros(4096, np.uint8)
    monkeypatch.setattr(generator_memory, "_memory", lambda address, size: memoryview(other[:size]))
    assert generator_memory._numpy_memory.__wrapped__(np.random.get_bit_generator()) is None
    assert generator_memory.of_python.__wrapped__() is None


def test_a_generator_that_a_user_sets_is_looked_at_from_then_on() -> None:
    given = np.random.get_bit_generator()
    before = generator_memory.of_numpy()
    try:
        np.random.set_bit_generator(np.random.MT19937(3))
        memory = generator_memory.of_numpy()
        assert memory is not None
        place = memory.place()
        np.random.rand()
        assert memory.place() != place
    finally:
        np.random.set_bit_generator(given)
    assert generator_memory.of_numpy() is before
