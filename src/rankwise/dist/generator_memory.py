"""The memory in which the default CPU generators of Python, numpy and torch keep their state: shows in 1 us if one was used.

    state = of_numpy()
    before = state.place();  ...;  state.place() != before       # something was drawn, or it was seeded

Each address is searched once and checked against the state that the generator itself returns; None if the memory has another
layout. All three are Mersenne twisters of 624 words: a draw moves the position, and after the last word all words are replaced.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from functools import cache, lru_cache, partial
from operator import call
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from rankwise.dist import private_names

_WORDS = 624 * 4  # bytes
_SEED = 0x5EED_0F_7E57_5EED  # of a torch.Generator that is used only for the search
_SEARCHED = 256  # the number of bytes of the object in which the seed is searched
_HEAD, _NORMALS = 20, 28  # bytes before and after the words

PYTHON: Any = getattr(random.getstate, "__self__")  # noqa: B009 - typeshed knows no such attribute of a function
"""The generator behind the functions of `random`. Its `gauss_next` is the second gaussian, or None."""

_GAUSSIAN = partial(getattr, PYTHON, "gauss_next")


class GeneratorMemory(NamedTuple):
    whole: memoryview
    """The words and the position."""

    looks: tuple[Callable[[], bytes], ...]
    """They return a few bytes; each draw changes at least one of them. Implemented in C (see `looks`)."""

    def place(self) -> tuple[bytes, ...]:
        return tuple(map(call, self.looks))


def looks() -> tuple[Callable[[], object], ...]:
    """Functions: after a draw from any of the three, or with another generator of numpy, one of them returns something else;
    but not after a draw of a gaussian that numpy has cached. Empty if the memory of one generator is unknown. They are
    implemented in C, because they are called before and after each batch: there each Python function takes 1 us."""
    python, numpy, torch = of_python(), of_numpy(), of_torch()
    if python is None or numpy is None or torch is None:
        return ()
    generator = np.random.get_bit_generator  # type: ignore[attr-defined]  # numpy's stubs do not export it
    return (generator, _GAUSSIAN, *python.looks, *numpy.looks, *torch.looks)


@cache
def of_python() -> GeneratorMemory | None:
    head = object.__basicsize__
    if sys.implementation.name != "cpython" or type(PYTHON).__basicsize__ < head + 4 + _WORDS:
        return None
    whole = _memory(id(PYTHON) + head, 4 + _WORDS)  # the position first
    _, (*words, position), _ = PYTHON.getstate()
    return GeneratorMemory(whole, (whole[:16].tobytes,)) if bytes(whole) == struct.pack("=i624I", position, *words) else None


def of_numpy() -> GeneratorMemory | None:
    """The cached gaussian is not included: it is elsewhere. The memory of the current generator: a user may set another one."""
    return _numpy_memory(np.random.get_bit_generator())  # type: ignore[attr-defined]  # numpy's stubs do not export it


@lru_cache(maxsize=2)  # the cache keeps the generator alive, and with it the memory
def _numpy_memory(generator: Any) -> GeneratorMemory | None:
    _, words, position, *_ = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    whole = _memory(generator.ctypes.state_address, _WORDS + 4)
    is_here = bytes(whole) == words.tobytes() + struct.pack("=i", position)
    return GeneratorMemory(whole, (whole[-16:].tobytes,)) if is_here else None


@cache
def of_torch() -> GeneratorMemory | None:
    """The seed (8 bytes) and the position are before the words; the cached gaussians are after them."""
    trial = torch.Generator("cpu").manual_seed(_SEED)
    if (address := private_names.address(trial)) is None:
        return None
    start = ctypes.string_at(address, _SEARCHED).find(struct.pack("=Q", _SEED))
    if start < 0:
        return None
    found, places = _torch_memory(address + start), []
    for _ in range(4):  # the second draw uses the gaussian that the first has cached
        places.append(found.place())
        torch.randn((), generator=trial, device="cpu")
    if any(place in places[:turn] for turn, place in enumerate(places)) or not _has_words(found, trial):
        return None
    found = _torch_memory((private_names.address(torch.default_generator) or 0) + start)
    return found if _has_words(found, torch.default_generator) else None


def _torch_memory(address: int) -> GeneratorMemory:
    whole = _memory(address, _HEAD + _WORDS + _NORMALS)
    return GeneratorMemory(whole, (whole[: _HEAD + 16].tobytes, whole[-_NORMALS:].tobytes))  # all words change together


def _has_words(memory: GeneratorMemory, generator: torch.Generator) -> bool:
    """Whether the memory has the words of the generator's state, in which each takes 8 bytes, after a head of 24 bytes."""
    words = np.frombuffer(generator.get_state().numpy().tobytes(), np.uint64, 624, 24)
    return bytes(memory.whole[_HEAD:-_NORMALS]) == words.astype(np.uint32).tobytes()


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
