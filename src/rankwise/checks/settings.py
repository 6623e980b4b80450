"""The settings for the ranks of one start of a self-test. Without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankSettings:
    """Settings for the ranks of one start, in a file of the test's folder."""

    folder: str
    ranks: int
    cut: int = 4
    """Batches per epoch. This number also decides when the script ends, because all ranks must end after the same forward
    pass."""

    batches: tuple[int, ...] = ()
    """Samples in a global batch, for each DataLoader by its number. For a DataLoader that is not listed, its own size."""
