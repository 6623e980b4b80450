"""Means over samples and ranks. Sums stay on their device until the end of a log interval.

meters = Meters("loss");  meters.add(loss=(loss_sum.detach(), count))
meters.reduce()["loss"].mean                  # one small all-reduce
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rankwise.dist import comm
from rankwise.errors import ConfigError
from rankwise.host.arguments import TEXT, takes
from rankwise.host.text import listed

Number = float | torch.Tensor

_KEPT = 4096  # values that are kept one by one: `forget` may drop them


@dataclass(frozen=True)
class Total:
    """A sum and a count over the samples of all ranks."""

    sum: float
    count: float

    def __add__(self, other: Total) -> Total:
        return Total(self.sum + other.sum, self.count + other.count)

    @property
    def mean(self) -> float:
        """nan if the count is 0."""
        return self.sum / self.count if self.count else float("nan")


class Meters:
    """Sums and counts by `names`. Every rank must use the same names, even if it has no samples."""

    @takes(names=TEXT)
    def __init__(self, *names: str) -> None:
        self._sums: dict[str, list[Number]] = {name: [] for name in names}
        self._counts: dict[str, list[Number]] = {name: [] for name in names}

    def add(self, **pairs: tuple[Number, Number]) -> None:
        """Store a (sum, count) for each name: numbers, or tensors without a graph. Computes nothing and does not wait for a
        device. Raises ConfigError for a name that was not given to Meters, and for a value without its count."""
        for name, pair in pairs.items():
            if name not in self._sums:
                names = listed(self._sums, last=" and ") or "no name"
                raise ConfigError(f"meters.add({name}=...): Meters was created with {names}; give {name!r} there too")
            try:
                total, count = pair
            except (TypeError, ValueError):
                raise ConfigError(
                    f"meters.add({name}=...) got {type(pair).__name__}, which is not a pair; give the sum and its count: "
                    f"meters.add({name}=(total, count))"
                ) from None
            self._sums[name].append(total)
            self._counts[name].append(count)
            if len(self._sums[name]) == 2 * _KEPT:
                _fold(self._sums[name])
                _fold(self._counts[name])

    def forget(self, times: int, after: int = 0) -> None:
        """Drop the values of `times` calls of `add`: those before the last `after` ones. At most 4096 in all."""
        for values in (*self._sums.values(), *self._counts.values()):
            del values[_of_calls(values, times, after)]

    def are_finite(self, name: str, times: int, after: int = 0) -> bool:
        """Whether the sums of these calls of `add` are. Waits for the device."""
        values = self._sums[name]
        return math.isfinite(_total(values[_of_calls(values, times, after)]))

    def clear(self) -> None:
        """Drop the values of all calls of `add` since the last reduction."""
        for values in (*self._sums.values(), *self._counts.values()):
            values.clear()

    def reduce(self) -> dict[str, Total]:
        """Collective: one all-reduce in float64. Return for each name the Total over all ranks since the last call."""
        return self.reduce_with_clock(0.0)[0]

    def reduce_with_clock(self, clock_s: float, row: Sequence[float] = ()) -> tuple[dict[str, Total], float, list[list[float]]]:
        """Collective. Like `reduce`, and also sends `clock_s` of rank 0 to every rank, so that all decide by the same clock,
        and the `row` of each rank, as long on all. Returns (totals, clock, rows of all ranks)."""
        flat = [value for name in self._sums for value in (_total(self._sums[name]), _total(self._counts[name]))]
        flat.append(clock_s if comm.rank() == 0 else 0.0)
        rows = [list(row) if rank == comm.rank() else [0.0] * len(row) for rank in range(comm.world_size())]
        packed = [*flat, *itertools.chain(*rows)]
        if not comm.is_alone():
            packed = comm.all_reduce(torch.tensor(packed, dtype=torch.float64, device="cpu")).tolist()
        self.clear()
        totals = {name: Total(packed[2 * i], packed[2 * i + 1]) for i, name in enumerate(self._sums)}
        begin = len(flat)
        return totals, packed[begin - 1], [packed[begin + r * len(row) :][: len(row)] for r in range(len(rows))]


def _of_calls(values: list[Number], times: int, after: int) -> slice:
    end = max(len(values) - after, 0)
    return slice(max(end - times, 0), end)


def _total(values: list[Number]) -> float:
    """The one host sync of a log interval."""
    return float(sum(map(float, _sums(values))))


def _fold(values: list[Number]) -> None:
    """Replace all values but the last ones by their sum: a long log interval must not keep them all. Waits for no device."""
    values[:-_KEPT] = _sums(values[:-_KEPT])


def _sums(values: list[Number]) -> list[Number]:
    """The sum of what is here, and that of tensors on another device, which stays there."""
    here, there = 0.0, []
    for value in values:
        if isinstance(value, torch.Tensor) and not value.is_cpu:
            there.append(value)
        else:
            here += float(value)
    return [here, torch.stack(there).double().sum()] if there else [here]
