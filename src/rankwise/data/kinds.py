"""What a Loader is given to read: a map-style dataset, which tells its length, or a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from rankwise.data.fetch import promises
from rankwise.errors import DataError


def length(dataset: Any) -> int | None:
    """Samples in a map-style dataset; None for a stream. Raises DataError for what is neither, and for an empty one."""
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DataError("a DataLoader shards nothing by itself; give its dataset, and the batch size to the Trainer or Loader")
    if isinstance(dataset, IterableDataset):
        return None
    if isinstance(dataset, Iterator):
        raise DataError(f"{name} can be read once; give an IterableDataset, of which each `iter()` reads from the beginning")
    if hasattr(dataset, "__iter__") and not hasattr(dataset, "__len__"):
        return None
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"{name} cannot tell its length; give a dataset with __len__ and __getitem__ (or __getitems__), or an iterable one"
        )
    if len(dataset) < 1:
        raise DataError(f"the dataset ({name}) is empty: it has no sample")
    if promises(dataset, "seed_each_sample") and not hasattr(dataset, "__getitem__"):
        raise DataError(f"{name} has seed_each_sample, so its samples are taken one by one: give it __getitem__ too")
    return len(dataset)


def hinted_length(dataset: Any) -> int | None:
    """What a stream says of its length; it is the total of a progress line and nothing else."""
    try:
        return len(dataset) or None
    except TypeError:
        return None
