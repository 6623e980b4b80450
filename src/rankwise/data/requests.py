"""The requests of one message to a loader worker, as bytes.

    body = packed([(0, np.array([3, 1, 4]))])
    unpacked(body)

A request is usually (epoch, int64 array). That is written as numbers: a pickle takes four times as long, and all of this runs
right after a switch to another process, when nothing is in the processor's caches.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

_INT64 = np.dtype(np.int64)
_PICKLED = struct.pack("q", -1)
_MOST = 2**63


def packed(requests: Sequence[Any]) -> bytes:
    numbers, arrays = [len(requests)], []
    for request in requests:
        if type(request) is not tuple or len(request) != 2 or type(request[0]) is not int or type(request[1]) is not np.ndarray:
            return _PICKLED + pickle.dumps(requests, pickle.HIGHEST_PROTOCOL)
        epoch, indices = request
        if indices.dtype is not _INT64 or indices.ndim != 1 or not 0 <= epoch < _MOST:
            return _PICKLED + pickle.dumps(requests, pickle.HIGHEST_PROTOCOL)
        numbers += epoch, len(indices)
        arrays.append(indices.tobytes())
    return struct.pack(f"{len(numbers)}q", *numbers) + b"".join(arrays)


def unpacked(body: bytes) -> Any:
    (count,) = struct.unpack_from("q", body)
    if count < 0:
        return pickle.loads(body[len(_PICKLED) :])
    numbers = struct.unpack_from(f"{2 * count}q", body, 8)
    requests, begin = [], 8 + 16 * count
    for epoch, size in zip(numbers[::2], numbers[1::2], strict=True):
        requests.append((epoch, np.frombuffer(body, _INT64, size, begin).copy()))
        begin += 8 * size
    return requests
