"""Random streams: the same on every rank while a model is made, different on every rank after.

seed_everything(7)               # model initialisation: equal on all ranks
seed_rank(7, rank=world.rank)    # dropout, augmentation: a stream of its own
state = rng_state();  set_rng_state(state)
aside.put();  seed_streams(derive(7, epoch, sample));  ...;  aside.back()     # draw beside them, and go on
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from typing import Any, cast

import numpy as np
import torch

from rankwise.host.arguments import FROM_ZERO, takes


def derive(*words: int | str) -> int:
    """A 63-bit seed from (seed, rank), (seed, epoch, sample) or the like: equal words, equal seed; otherwise unrelated."""
    text = "/".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@takes(seed=FROM_ZERO)
def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators alike on every rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_streams(seed: int) -> None:
    """As `seed_everything`, for the generators of the CPU alone, in 7 us: torch.manual_seed takes 100 and more, as it asks
    after every kind of device. Right in a forked loader worker too, where a GPU must not be touched.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@takes(seed=FROM_ZERO, rank=FROM_ZERO)
def seed_rank(seed: int, rank: int) -> None:
    """Seed them so that ranks draw different numbers from here on."""
    seed_everything(derive(seed, "rank", rank))


def rng_state() -> dict[str, Any]:
    """The generators' state as tensors and plain values, which `torch.load(weights_only=True)` reads."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [kind, torch.tensor(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    for name, device in _accelerators():
        if device.is_initialized():
            state[name] = device.get_rng_state()
    return state


def _accelerators() -> list[tuple[str, Any]]:
    """That of this build of torch, by its type, if it has a random stream: the module that holds it."""
    found = torch.accelerator.current_accelerator()
    module = getattr(torch, found.type, None) if found is not None else None
    return [(found.type, module)] if found is not None and hasattr(module, "is_initialized") else []


def set_rng_state(state: dict[str, Any]) -> None:
    """Go on drawing where `rng_state` was taken."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    for name, device in _accelerators():
        if name in state and device.is_available():
            device.set_rng_state(state[name].cpu())


_MT19937_BYTES = 625 * 4  # numpy's mt19937_state: 624 words and the position in them


class Aside:
    """The streams of this process's CPU generators, put aside while something else draws from them.

    25 us with a `seed_streams` between, as against 100: numpy's own get_state and set_state take 75, as they handle 624 numbers
    one by one. Here the numbers are copied as they lie in memory; a cached second gaussian alone needs numpy's way.
    """

    def __init__(self) -> None:
        self._python: Any = None
        self._words = b""
        self._numpy: Any = None
        self._gaussian = True
        self._torch = torch.empty(0)

    def put(self) -> None:
        self._python = random.getstate()
        words = ctypes.string_at(_numpy_words(), _MT19937_BYTES)
        if self._gaussian or words != self._words:  # else nothing was drawn since the last time
            self._words = words
            self._numpy = np.random.get_state(legacy=True)
            self._gaussian = bool(self._numpy[3])
        self._torch = torch.default_generator.get_state()

    def back(self) -> None:
        random.setstate(self._python)
        if self._gaussian:
            np.random.set_state(self._numpy)
        else:
            np.random.seed(0)  # forgets a gaussian that was cached meanwhile
            ctypes.memmove(_numpy_words(), self._words, _MT19937_BYTES)
        torch.default_generator.set_state(self._torch)


def _numpy_words() -> int:
    """Where the global generator keeps its state."""
    address: int = np.random.get_bit_generator().ctypes.state_address  # type: ignore[attr-defined]
    return address
