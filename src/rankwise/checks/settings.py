"""What the verb tells the ranks of one start, in a file of the test's folder. Without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankSettings:
    """What the ranks of one start are told; a file in the test's folder."""

    folder: str
    ranks: int
    cut: int = 4
    """Batches of an epoch. By it, and not by what was seen so far: all ranks must end after the same forward pass."""

    batches: tuple[int, ...] = ()
    """Samples of a global batch, by the number of a DataLoader; where it is unknown the loader's own."""
