"""The data of a Loader: whether it is a map-style dataset or a stream, how long it is, how to read it, and what it promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from rankwise.data.order import Indices, whole_numbers
from rankwise.errors import ConfigError, DataError
from rankwise.host.arguments import shown

Empty = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""Like np.empty."""
_READS = frozenset({"__getitem__", "__getitems__"})
_OF_READING = frozenset({"draws_nothing", "faster_without_workers"})
"""Attributes about the way in which the class that has them reads samples."""
Read = Callable[..., Any]
"""A function of indices, and `empty`."""


def length(dataset: Any) -> int | None:
    """The number of samples of a map-style dataset; None for a stream. Raises DataError if it is neither, and for an empty
    dataset."""
    name = type(dataset).__name__
    if isinstance(dataset, type):
        raise DataError(f"the dataset is the class {dataset.__name__}; give an object of it: {dataset.__name__}(...)")
    if isinstance(dataset, DataLoader):
        raise DataError(
            "a DataLoader does not divide its samples among ranks; give its dataset, and give the batch size to the Trainer or "
            "Loader"
        )
    if isinstance(dataset, IterableDataset):
        return None
    if isinstance(dataset, Iterator):
        raise DataError(f"{name} can be read only once; give an IterableDataset whose iter() starts from the beginning")
    if hasattr(dataset, "__iter__") and not hasattr(dataset, "__len__"):
        return None
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"{name} has no length; give a dataset with __len__ and __getitem__ (or __getitems__), or an iterable one"
        )
    if len(dataset) < 1:
        raise DataError(f"the dataset ({name}) has no samples")
    if promises(dataset, "seed_each_sample") and not hasattr(dataset, "__getitem__"):
        raise DataError(f"{name} has seed_each_sample, so its samples are read one by one; add `__getitem__`")
    return len(dataset)


def hinted_length(dataset: Any) -> int | None:
    """The length of a stream, if it has one. Used only as the total of a progress line."""
    try:
        return len(dataset) or None
    except Exception:  # a class may have one that is not implemented
        return None


def reader_of(dataset: Any) -> Read | None:
    """The dataset's function that makes a batch from int64 indices at once and draws nothing; None if there is none."""
    if type(dataset) is TensorDataset:
        return partial(_rows, dataset.tensors)
    return _batch_reader(dataset) if promises(dataset, "draws_nothing") else None


def _batch_reader(dataset: Any) -> Read | None:
    if type(dataset) is not Subset:
        read = dataset.read_batch if _reads_by(dataset, "read_batch") else None
        return read if read is None or "empty" in signature(read).parameters else partial(_without_empty, read)
    read = _batch_reader(dataset.dataset)
    return partial(_part, read, _table(dataset)) if read is not None else None


def traits_of_split(dataset: Any) -> dict[str, str]:
    """For torch's Subset: which samples it has must be the same on all ranks. A split without a common seed has others."""
    if type(dataset) is not Subset:
        return {}
    digest = xxhash.xxh3_64()
    while type(dataset) is Subset:
        try:
            digest.update(np.asarray(dataset.indices).astype(np.int64).tobytes())
        except (TypeError, ValueError):  # of a dataset with other keys than numbers
            digest.update(repr(list(dataset.indices)).encode())
        dataset = dataset.dataset
    return {"the split of the data (which must be drawn with the same seed on all ranks)": digest.hexdigest()}


def _table(subset: Subset[Any]) -> Indices:
    """Its indices, none of them negative. Raises DataError for one that is not in its dataset."""
    whole: Any = subset.dataset  # torch does not declare a length
    table, samples = whole_numbers(subset.indices), len(whole)
    if table is None:
        raise DataError(
            f"the Subset of {type(whole).__name__} has the indices {shown(subset.indices)}; give whole numbers (of a mask: "
            "np.flatnonzero(mask))"
        )
    wrong = table[(table < -samples) | (table >= samples)]
    if len(wrong):
        raise DataError(f"the Subset has the index {wrong[0]}, and its dataset ({type(whole).__name__}) has {samples} samples")
    return np.where(table < 0, table + samples, table)


def _without_empty(read: Callable[[Indices], Any], indices: Indices, empty: Empty | None) -> Any:
    return read(indices)


def teller_of(dataset: Any, rows: int) -> Callable[[Indices], None] | None:
    """The dataset's function that takes the samples that are needed soon (data.ahead); None if there is none."""
    if type(dataset) is Subset:
        tell = teller_of(dataset.dataset, 1)  # a subset has other blocks than the whole dataset
        return partial(_tell_part, tell, _table(dataset)) if tell is not None else None
    found: Callable[[Indices], None] | None = dataset.read_ahead(rows) if _reads_by(dataset, "read_ahead") else None
    return found


def _tell_part(tell: Callable[[Indices], None], table: Indices, indices: Indices) -> None:
    tell(table[indices])


def _part(read: Read, table: Indices, indices: Indices, empty: Empty | None) -> Any:
    return read(table[indices], empty=empty)


def _rows(tensors: Sequence[torch.Tensor], indices: Indices, empty: Empty | None) -> tuple[torch.Tensor, ...]:
    """What `TensorDataset.__getitem__` returns."""
    index = torch.from_numpy(indices)
    return tuple([t.index_select(0, index if t.is_cpu else index.to(t.device)) for t in tensors])


def draws_nothing(dataset: Any) -> bool:
    """Whether the dataset declares it, or its type is known."""
    return type(inside(dataset)) in (list, tuple, range, TensorDataset) or promises(dataset, "draws_nothing")


def promises(dataset: Any, attribute: str) -> bool:
    """Whether the dataset, or the one behind torch's Subset, declares this attribute, with a true value. Any other wrapper may
    draw random numbers itself, whatever it wraps; and so may a subclass that reads samples in another way."""
    while type(dataset) is Subset and not _declares(dataset, attribute):
        dataset = dataset.dataset
    if attribute in _OF_READING and _reads_anew(dataset, attribute):
        return False
    return _declares(dataset, attribute) and bool(getattr(dataset, attribute))


def _declares(dataset: Any, attribute: str) -> bool:
    """Whether it has the attribute itself: not by a `__getattr__` that asks the dataset inside."""
    return hasattr(type(dataset), attribute) or attribute in getattr(dataset, "__dict__", {})


def _reads_by(dataset: Any, attribute: str) -> bool:
    """Whether it has this method, and reads its samples in the way of the class that has it."""
    return _declares(dataset, attribute) and not _reads_anew(dataset, attribute)


def _reads_anew(dataset: Any, attribute: str) -> bool:
    """Whether a subclass of the class with this attribute has its own way to read samples: then the attribute is not about
    it."""
    if attribute in getattr(dataset, "__dict__", {}):
        return False
    for kind in type(dataset).__mro__:
        if attribute in vars(kind):
            return False
        if not _READS.isdisjoint(vars(kind)):
            return True
    return False


def has_getitems(dataset: Any) -> bool:
    """torch's Subset always has `__getitems__`, even if its dataset has not; and a wrapper may have that of the dataset inside
    by a `__getattr__`, which would pass over its own `__getitem__`."""
    return _declares(inside(dataset), "__getitems__")


def inside(dataset: Any) -> Any:
    """The whole dataset behind torch's Subset."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def check_sizes(of_one: int | None, of_all: int | None, batches: Any, drop_last: bool, stream: Any) -> None:
    """Raises ConfigError unless exactly one argument sets how global batches are cut. `stream`: None if map-style."""
    given = {"batch_size": of_one, "global_batch_size": of_all, "batches": batches}
    names = [name for name, value in given.items() if value is not None]
    if not names:
        raise ConfigError("give batch_size (per rank and micro-batch), global_batch_size (of a whole step), or batches")
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} all set the batch; keep one of them")
    if batches is not None and stream is not None:
        raise ConfigError(f"batches=... cannot be used with a stream ({type(stream).__name__}); give global_batch_size instead")
    if batches is not None and drop_last:
        raise ConfigError("drop_last works only with batch_size or global_batch_size; remove it")
