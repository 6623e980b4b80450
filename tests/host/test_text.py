"""How numbers, times, paths and lists are printed."""

from __future__ import annotations

import pytest

from rankwise.host.text import clock, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.4, "0.4 s"),
        (59.9, "59.9 s"),
        (59.96, "0:01:00"),
        (61, "0:01:01"),
        (3599.5, "1:00:00"),
        (90061, "25:01:01"),
    ],
)
def test_a_clock_has_hours_minutes_and_seconds(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_size_has_a_unit_and_three_digits() -> None:
    assert [size(n) for n in (0, 999, 1000, 2_600_000, 25 << 20, 3 * 10**9)] == [
        "0 B", "999 B", "1 kB", "2.6 MB", "26.2 MB", "3 GB",
    ]  # fmt: skip
