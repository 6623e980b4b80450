"""Random streams: the same on every rank while a model is made, different on every rank after.

seed_everything(7)               # model initialisation: equal on all ranks
seed_rank(7, rank=world.rank)    # dropout, augmentation: a stream of its own
state = rng_state();  set_rng_state(state)
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, cast

import numpy as np
import torch


def derive(*words: int | str) -> int:
    """A 63-bit seed from (seed, rank), (seed, epoch, sample) or the like: equal words, equal seed; otherwise unrelated."""
    text = "/".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators alike on every rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


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
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Go on drawing where `rng_state` was taken."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
