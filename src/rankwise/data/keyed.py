"""Random numbers that depend only on a key, whoever draws them.

keyed = Keyed(seed=0)
sample = keyed.made(lambda key: dataset[3] if key is None else (key(epoch, 3), dataset[3])[1])
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from typing import TypeVar

from rankwise.dist import seed as seeds

Made = TypeVar("Made")
Key = Callable[..., None]


class Keyed:
    """Calls functions that may draw random numbers. They draw from keyed streams, and the streams of the training do not
    change.

    To key all streams takes 10 us. So the first call finds out which streams are used, and later calls key only these. If a
    later call draws from another stream, the streams are restored, and the function is called again with this one keyed too:
    the numbers that it draws are the same either way.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn: frozenset[str] | None = None
        self._training = seeds.SavedStreams()
        self._keyed = seeds.SavedStreams()  # the state right after a key was set, in the first call

    def made(self, make: Callable[[Key | None], Made]) -> Made:
        """What `make` returns. Its argument is None, or a function: `make` calls it with the words of a key before each draw
        that uses this key."""
        self._training.save()
        if self._drawn is None:
            return self._first(make)
        while True:
            failure = None
            try:
                made = make(partial(self._key, self._drawn) if self._drawn else None)
            except Exception as error:
                failure = error
            finally:
                moved = self._training.restore()
            if moved <= self._drawn:
                if failure is not None:
                    raise failure
                return made
            self._drawn |= moved

    def _first(self, make: Callable[[Key | None], Made]) -> Made:
        drawn: set[str] = set()

        def key(*words: int | str) -> None:
            drawn.update(self._keyed.moved())
            self._key(seeds.CPU_STREAMS, *words)
            self._keyed.save()

        self._keyed.save()
        try:
            made = make(key)
            self._drawn = self._keyed.moved() | drawn
            return made
        finally:
            self._training.restore()

    def _key(self, streams: Set[str], *words: int | str) -> None:
        seeds.key_streams(seeds.derive(self._seed, *words), streams)
