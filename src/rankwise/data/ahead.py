"""Tells a dataset which samples it will be asked for soon, so that it can already read them.

    for request in announced(requests, tell=dataset.read_ahead(rows=1), ahead=Ahead(samples=512)): ...

`read_ahead(rows)` of a dataset returns a function that takes int64 indices: the samples with these indices are needed soon. If
`rows` is more than 1, all samples of their blocks (of `rows` samples each) are needed. It returns None if this does not help.
What is read does not change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from rankwise.data.order import BlockOrder, Indices, Order

_BATCHES = 4  # batches ahead; 16 were not faster, because the disk was already busy
_OF_A_BLOCK = 16  # samples of a block that the dataset gets to know, on average: then hardly any block is missed
_MOST = 1 << 21  # samples ahead, at most: 16 MB of indices

Request = tuple[int, Indices]


class Ahead(NamedTuple):
    """How long before the request a dataset knows its samples."""

    samples: int
    together: int = 1
    """The number of samples per call, at least."""

    skipped: int = 0
    """The number of samples that are not told after each call, because they are in the same blocks."""

    rows: int = 1
    """The number of samples in a block."""


def how_far(order: Order, batch: int, ranks: int) -> Ahead:
    """For one of `ranks` ranks, whose batches have about `batch` samples: four batches ahead, or the next window of blocks."""
    batches = max(_BATCHES * batch, 1)
    if not isinstance(order, BlockOrder):
        return Ahead(batches)
    window = min(max(order.rows * order.window // ranks, batches), _MOST)
    together = min(_OF_A_BLOCK * order.window, window)
    return Ahead(window, together, max(window // 4 - together, 0), order.rows)


def announced(requests: Iterable[Request], tell: Callable[[Indices], None], ahead: Ahead) -> Iterator[Request]:
    """The same requests. The dataset learns of a request's samples before the request is taken, as long before as `ahead` says.
    For blocks, this distance is large, and grows while requests are taken: to look up a whole window first would take longer
    than the first batch."""
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
