"""Random streams: the same on every rank while the model is created, different on every rank afterwards.

seed_everything(7)               # model initialisation: equal on all ranks
seed_rank(7, rank=world.rank)    # dropout, augmentation: different on each rank
state = rng_state();  set_rng_state(state)
saved.save();  seed_streams(derive(7, epoch, sample));  ...;  saved.restore()     # other random numbers in between
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
import struct
from collections.abc import Callable, Iterator, Set
from operator import call
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from rankwise.dist import generator_memory
from rankwise.host.arguments import FROM_ZERO, takes


def derive(*words: int | str) -> int:
    """A 63-bit seed from words such as (seed, rank) or (seed, epoch, sample): equal words, equal seed; otherwise unrelated."""
    text = "/".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@takes(seed=FROM_ZERO)
def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, the same on every rank."""
    random.seed(seed := int(seed))
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


CPU_STREAMS = frozenset({"python", "numpy", "torch"})


def seed_streams(seed: int, streams: Set[str] = CPU_STREAMS) -> None:
    """Like `seed_everything`, but only for the CPU generators, or some of them, in 8 us: torch.manual_seed takes 100 us or
    more, because it checks every kind of device. Also works in a forked loader worker, which must not use a GPU."""
    if "python" in streams:
        random.seed(seed)
    if "numpy" in streams:
        np.random.seed(seed % 2**32)
    if "torch" in streams:
        torch.default_generator.manual_seed(seed)


def key_streams(seed: int, streams: Set[str] = CPU_STREAMS) -> None:
    """Like `seed_streams`, but torch.initial_seed() does not change, whether or not `streams` includes torch's."""
    before = torch.default_generator.initial_seed()
    seed_streams(seed, streams)
    if "torch" not in streams:
        return
    named = struct.pack("=Q", before)
    if (memory := generator_memory.of_torch()) is not None:
        memory.whole[:8] = named
    else:
        state = torch.default_generator.get_state()
        state.numpy()[:8] = np.frombuffer(named, np.uint8)
        torch.default_generator.set_state(state)


@takes(seed=FROM_ZERO, rank=FROM_ZERO)
def seed_rank(seed: int, rank: int) -> None:
    """Seed the generators of Python, numpy and torch so that ranks draw different numbers from here on."""
    seed_everything(derive(seed, "rank", rank))


def rng_state() -> dict[str, Any]:
    """The state of the generators as tensors and plain values, which `torch.load(weights_only=True)` can read."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss],
        "numpy": [kind, torch.tensor(keys.astype(np.int64), device="cpu"), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    for name, device in _accelerators():
        if device.is_initialized():
            state[name] = device.get_rng_state()
    return state


def _accelerators() -> list[tuple[str, Any]]:
    """(its type, its module) of the accelerator of this build of torch, if it has a random stream."""
    found = torch.accelerator.current_accelerator()
    module = getattr(torch, found.type, None) if found is not None else None
    return [(found.type, module)] if found is not None and hasattr(module, "is_initialized") else []


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state that `rng_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    for name, device in _accelerators():
        if name in state and device.is_available():
            device.set_rng_state(state[name].cpu())


_NONE: frozenset[str] = frozenset()


class SavedStreams:
    """Saves and restores the streams of this process's CPU generators, around code that may draw from them.

    Takes 2 us if nothing is drawn, 20 us with a `seed_streams` in between, and 100 us with the generators' own functions, which
    handle 624 numbers one by one. Here they are compared and copied in their memory (generator_memory.py).
    """

    def __init__(self) -> None:
        self._numpy = _Numpy()
        self._streams: dict[str, _Python | _Numpy | _Torch] = {"python": _Python(), "numpy": self._numpy, "torch": _Torch()}
        self._looks: tuple[Callable[[], object], ...] = ()
        """Empty if more must be compared to know whether something was drawn since `save`."""
        self._seen: list[object] | None = None  # what `_looks` returned then

    def save(self) -> None:
        """Save the streams."""
        if list(map(call, self._looks)) == self._seen:
            return
        for stream in self._streams.values():
            stream.save()
        self._look()

    def _look(self) -> None:
        self._looks = generator_memory.looks() if not self._numpy.has_gaussian else ()
        self._seen = list(map(call, self._looks)) or None

    def moved(self) -> frozenset[str]:
        """The streams that were used or seeded since `save`."""
        if list(map(call, self._looks)) == self._seen:
            return _NONE
        return frozenset([name for name, stream in self._streams.items() if stream.moved()])

    def restore(self) -> frozenset[str]:
        """Restore the streams that were used since `save`, and return their names."""
        if list(map(call, self._looks)) == self._seen:
            return _NONE
        moved = self.moved()
        for name in moved:
            self._streams[name].restore()
        if moved:
            self._look()
        return moved


_idle: list[SavedStreams] = []
"""Used by `streams_kept` before: they copy only what was drawn from since then."""


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Afterwards all random streams are as before, also that of a GPU."""
    saved = _idle.pop() if _idle else SavedStreams()
    saved.save()
    of_devices = [(device, device.get_rng_state()) for _, device in _accelerators() if device.is_initialized()]
    try:
        yield
    finally:
        saved.restore()
        _idle.append(saved)
        for device, state in of_devices:
            device.set_rng_state(state)


class _HowToSeed(NamedTuple):
    """How the state of a kind of generator is read and restored, and how it is seeded."""

    state: Callable[[Any], Any]
    restore: Callable[[Any, Any], object]
    seed: Callable[[Any, int], object]


def _restore_numpy(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_KINDS = {
    random.Random: _HowToSeed(random.Random.getstate, random.Random.setstate, lambda each, key: each.seed(key % 2**32)),
    np.random.RandomState: _HowToSeed(
        np.random.RandomState.get_state, np.random.RandomState.set_state, lambda each, key: each.seed(key % 2**32)
    ),
    np.random.Generator: _HowToSeed(
        lambda each: each.bit_generator.state,
        _restore_numpy,
        lambda each, key: _restore_numpy(each, type(each.bit_generator)(key).state),
    ),
    torch.Generator: _HowToSeed(
        lambda each: each.get_state().numpy(),
        lambda each, state: each.set_state(torch.from_numpy(state)),
        torch.Generator.manual_seed,
    ),
}


class OwnGenerators:
    """The generators (of Python, numpy and torch) that objects keep in attributes, such as `sampler.generator`."""

    def __init__(self, *owners: object) -> None:
        values = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
        found = {id(value): value for value in values if type(value) in _KINDS}
        self._found = [(each, _KINDS[type(each)]) for each in found.values()]
        began = [pickle.dumps(kind.state(each)) for each, kind in self._found]
        self._began = [hashlib.blake2b(state, digest_size=8).hexdigest() for state in began]

    @contextlib.contextmanager
    def keyed(self, *words: int | str) -> Iterator[None]:
        """Inside, what they draw follows from `words`, and from their state when this object was made. Afterwards each is as
        before."""
        before = [kind.state(each) for each, kind in self._found]
        for number, (each, kind) in enumerate(self._found):
            kind.seed(each, derive(*words, number, self._began[number]))
        try:
            yield
        finally:
            for (each, kind), state in zip(self._found, before, strict=True):
                kind.restore(each, state)


class _Python:
    def __init__(self) -> None:
        self._place: object = b""
        self._words = b""
        self._gaussian: float | None = None
        self._state: Any = None

    def save(self) -> None:
        if (memory := generator_memory.of_python()) is None:
            self._state = random.getstate()
            return
        self._gaussian = generator_memory.PYTHON.gauss_next
        if (place := memory.place()) != self._place:
            self._place, self._words = place, bytes(memory.whole)

    def moved(self) -> bool:
        if (memory := generator_memory.of_python()) is None:
            return bool(random.getstate() != self._state)
        return memory.place() != self._place or generator_memory.PYTHON.gauss_next != self._gaussian

    def restore(self) -> None:
        if (memory := generator_memory.of_python()) is None:
            random.setstate(self._state)
        else:
            memory.whole[:], generator_memory.PYTHON.gauss_next = self._words, self._gaussian


class _Numpy:
    def __init__(self) -> None:
        self._place: object = b""
        self._words = b""
        self._state: Any = None
        self.has_gaussian = True
        """Whether a second gaussian is cached, or this is not known."""

    def save(self) -> None:
        memory = generator_memory.of_numpy()
        if self.has_gaussian or memory is None or memory.place() != self._place:  # else nothing was drawn since the last save
            self._state = np.random.get_state(legacy=True)
            self.has_gaussian = bool(self._state[3])
            if memory is not None:
                self._place, self._words = memory.place(), bytes(memory.whole)

    def moved(self) -> bool:
        memory = generator_memory.of_numpy()
        if memory is not None and memory.place() != self._place:
            return True
        if memory is not None and not self.has_gaussian:
            return False
        _, words, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
        return rest != list(self._state[2:]) or not np.array_equal(words, self._state[1])

    def restore(self) -> None:
        if self.has_gaussian or (memory := generator_memory.of_numpy()) is None:
            np.random.set_state(self._state)
        else:
            np.random.seed(0)  # discards a gaussian that was cached since
            memory.whole[:] = self._words


class _Torch:
    def __init__(self) -> None:
        self._place: object = b""
        self._state = torch.empty(0, device="cpu")

    def save(self) -> None:
        memory = generator_memory.of_torch()
        if memory is None or memory.place() != self._place:
            self._state = torch.default_generator.get_state()
            self._place = memory.place() if memory is not None else b""

    def moved(self) -> bool:
        if (memory := generator_memory.of_torch()) is not None:
            return memory.place() != self._place
        return not torch.equal(torch.default_generator.get_state(), self._state)

    def restore(self) -> None:
        torch.default_generator.set_state(self._state)
        if (memory := generator_memory.of_torch()) is not None:
            self._place = memory.place()  # after a cached gaussian was used, some of its bytes may remain
