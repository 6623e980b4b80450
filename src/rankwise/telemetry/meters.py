"""Means over samples and ranks: sums stay where they are computed until a log interval ends.

meters = Meters("loss");  meters.add(loss=(loss_sum.detach(), count))
sums, clock_s = meters.reduce(clock_s)        # one small all-reduce; sums["loss"] == (sum, count)
"""

from __future__ import annotations

import torch

from rankwise.dist import comm

Number = float | torch.Tensor


class Meters:
    """Named (sum, count) pairs; every rank has the same names, whether it saw a sample or not."""

    def __init__(self, *names: str) -> None:
        self._sums: dict[str, list[Number]] = {name: [] for name in names}
        self._counts: dict[str, list[Number]] = {name: [] for name in names}

    def add(self, **pairs: tuple[Number, Number]) -> None:
        """Remember sums and counts; nothing is computed, no device is waited for."""
        for name, (total, count) in pairs.items():
            self._sums[name].append(total)
            self._counts[name].append(count)

    def forget(self, times: int) -> None:
        """As if the last so many calls of `add` had not been."""
        for values in (*self._sums.values(), *self._counts.values()):
            del values[len(values) - times :]

    def reduce(self, clock_s: float = 0.0) -> tuple[dict[str, tuple[float, float]], float]:
        """Collective: one all-reduce in float64. (sum, count) over all ranks since the last call, for each name.

        Rank 0's `clock_s` rides along and comes back on every rank, so that a decision by time is one decision.
        """
        flat = [value for name in self._sums for value in (_total(self._sums[name]), _total(self._counts[name]))]
        flat.append(clock_s if comm.rank() == 0 else 0.0)
        packed = comm.all_reduce(torch.tensor(flat, dtype=torch.float64)).tolist()
        for values in (*self._sums.values(), *self._counts.values()):
            values.clear()
        return {name: (packed[2 * i], packed[2 * i + 1]) for i, name in enumerate(self._sums)}, packed[-1]


def mean(total: float, count: float) -> float:
    """nan over nothing."""
    return total / count if count else float("nan")


def _total(values: list[Number]) -> float:
    """The one host sync of a log interval."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    plain = sum(v for v in values if not isinstance(v, torch.Tensor))
    if tensors:
        plain += float(torch.stack(tensors).double().sum())
    return float(plain)
