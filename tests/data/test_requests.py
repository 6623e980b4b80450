"""Requests survive their way to a worker as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rankwise.data.requests import packed, unpacked
from rankwise.data.stream import Request


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one[0] == other[0] and one[1].dtype == other[1].dtype and (one[1] == other[1]).all()


@pytest.mark.parametrize(
    "requests",
    [
        [(0, np.arange(3))],
        [(7, np.array([2**62, -1, 0])), (2**63 - 1, np.arange(0)), (0, np.arange(5))],
        [(3, np.arange(10)[::3])],
        [(2**64, np.arange(3))],
        [(-1, np.arange(3))],
        [(True, np.arange(3))],
        [(0, np.arange(3, dtype=np.int32)), (1, np.arange(3))],
        [(0, np.arange(3, dtype=">i8"))],
        [(0, np.arange(6).reshape(2, 3))],
    ],
    ids=["one", "several", "with gaps", "a long epoch", "a negative epoch", "a bool", "int32", "big-endian", "a table"],
)
def test_epochs_and_indices_arrive_as_they_were(requests: list[Any]) -> None:
    got = unpacked(packed(requests))
    assert all(same(one, other) for one, other in zip(got, requests, strict=True))
    assert all(indices.flags.writeable for _, indices in got)


@pytest.mark.parametrize("requests", [[], [Request(0, 5, 2, 1)], [(0, [1, 2])], [(0, None), 5, "x"]])
def test_other_requests_are_pickled(requests: list[Any]) -> None:
    got = unpacked(packed(requests))
    assert got == requests
    assert [type(one) for one in got] == [type(one) for one in requests]
