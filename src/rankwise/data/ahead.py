"""Tells a dataset which samples come soon, so that it can have them read meanwhile.

    for request in announced(requests, tell=dataset.read_ahead(rows=1), ahead=Ahead(samples=512)): ...

`read_ahead(rows)` of a dataset returns a function of int64 indices: the samples with these indices come soon, and if `rows` is
more than 1, those of the blocks of so many samples that they are in; or None, if this does not help. What is read
stays the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from rankwise.data.order import BlockOrder, Indices, Order

_BATCHES = 4  # ahead; 16 were no faster, as the disk had enough to do
_OF_A_BLOCK = 16  # samples of a block that the dataset gets to know, on average: then hardly one block is forgotten
_MOST = 1 << 21  # samples ahead: 16 MB of indices

Request = tuple[int, Indices]


class Ahead(NamedTuple):
    """How far ahead a dataset knows its samples."""

    samples: int
    together: int = 1
    """Samples per call, or more."""

    skipped: int = 0
    """Samples that are skipped after these: they are in the same blocks."""

    rows: int = 1
    """Samples of a block."""


def how_far(order: Order, batch: int, ranks: int) -> Ahead:
    """For one of `ranks`, whose batches have about `batch` samples: four batches ahead, or the next window of blocks."""
    batches = max(_BATCHES * batch, 1)
    if not isinstance(order, BlockOrder):
        return Ahead(batches)
    window = min(max(order.rows * order.window // ranks, batches), _MOST)
    together = min(_OF_A_BLOCK * order.window, window)
    return Ahead(window, together, max(window // 4 - together, 0), order.rows)


def announced(requests: Iterable[Request], tell: Callable[[Indices], None], ahead: Ahead) -> Iterator[Request]:
    """The same requests, each after the dataset knows those that come so far behind it. For blocks, which are far ahead, the
    distance grows while requests are taken: to look up a whole window first would take longer than the first batch."""
    held: deque[Request] = deque()
    news: list[Indices] = []
    waiting, untold, taken = 0, 0, 0
    for request in requests:
        held.append(request)
        waiting, untold = waiting + len(request[1]), untold + len(request[1])
        if untold > 0:
            news.append(request[1])
        if untold >= ahead.together:
            tell(np.concatenate(news))
            news, untold = [], -ahead.skipped
        wanted = ahead.samples if ahead.together == 1 else min(ahead.samples, ahead.together + taken)
        while waiting - len(held[0][1]) >= wanted:
            waiting, taken = waiting - len(held[0][1]), taken + len(held[0][1])
            yield held.popleft()
    if news:
        tell(np.concatenate(news))
    yield from held
