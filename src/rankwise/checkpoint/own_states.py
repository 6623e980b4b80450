"""States that differ between ranks, such as those of a strategy between two averages: collected, written and loaded per rank.

with averaged(parts):                                # inside, the parts are the same on all ranks
    own = collect(parts)
    files = gather(own, [0])                         # {"ranks-0": ..., "ranks-1": ...} on the rank that writes
load(manifest, parts, read)                          # each rank loads its own file, after the parts
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from rankwise.checkpoint.manifest import Manifest, tensors
from rankwise.checkpoint.writer import check_loadable, make_plain
from rankwise.dist import comm, log
from rankwise.dist.left_out import left_out
from rankwise.host.text import count, size
from rankwise.training.state import Stateful

PART = "ranks"
"""The part of a checkpoint: one file per rank, with a state for each part; no file if no rank has a state. Checkpoints of
version 2 have the states of all ranks in one file of this name."""

_LARGE = 1_000_000  # bytes on all ranks: more than this is reported


def is_taken(name: str) -> bool:
    """Whether the script must not use this name for a part."""
    return re.fullmatch(rf"{PART}(-[0-9]+)?", name) is not None


def names(manifest: Manifest) -> list[str]:
    """The names of the parts of this kind in a checkpoint."""
    found = [file.removesuffix(".pt") for file in manifest.files]
    return [name for name in found if is_taken(name)]


# --- saving


@contextlib.contextmanager
def averaged(parts: Mapping[str, Stateful]) -> Iterator[None]:
    """Collective. Inside, the parts are the same on all ranks if a part (a strategy) can average them."""
    with contextlib.ExitStack() as stack:
        for strategy in strategies(parts).values():
            stack.enter_context(strategy.averaged())
        yield


def strategies(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """The parts with a state per rank. A module of the user may have an attribute with one of these names, but not all."""
    methods = ("averaged", "rank_state_dict", "load_rank_state_dict")
    return {name: part for name, part in parts.items() if all(callable(getattr(type(part), each, None)) for each in methods)}


def collect(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """The own state of this rank, by part. Call this inside `averaged`."""
    found = {name: strategy.rank_state_dict() for name, strategy in strategies(parts).items()}
    for name, state in found.items():
        check_loadable(state, f"{PART}/{name}")
    return {name: make_plain(state) for name, state in found.items() if state is not None}


def warn_of_left_out(parts: Mapping[str, Stateful]) -> None:
    for part, lost in left_out(parts.values()):
        name = type(part).__name__
        log.warning_once(
            f"the checkpoint does not contain the {name}: {lost}; give it to save() and resume() as one of the parts, "
            f'{{..., "{name.lower()}": ...}}'
        )


def of_rank(rank: int, own: dict[str, Any]) -> dict[str, Any]:
    """The own state of a rank as a part of a checkpoint."""
    return {f"{PART}-{rank}": own}


def gather(own: dict[str, Any], writers: Collection[int]) -> dict[str, Any]:
    """Collective. The own states of all ranks as parts of a checkpoint, in host memory, on the ranks that write it; empty on
    the others."""
    buffer = io.BytesIO()
    torch.save(own, buffer)  # the rank that writes must not unpickle it to its device
    told = comm.gather_object(buffer.getvalue(), *writers) if len(writers) == 1 else comm.all_gather_object(buffer.getvalue())
    if comm.rank() not in writers:
        return {}
    found: dict[str, Any] = {}
    for rank, state in enumerate(told):
        found |= of_rank(rank, torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))
    return found


def bytes_of(own: dict[str, Any]) -> int | None:
    """The bytes of the tensors; None if there is no state."""
    return sum(t.numel() * t.element_size() for _, t in tensors(own)) if own else None


def say_size(total: int, waited_s: float) -> None:
    """After the first save, report how much the own states of all ranks (`total` bytes) add to it, if it is much."""
    if total >= _LARGE:
        log.say(
            f"each checkpoint also has the state of each of {count(comm.world_size(), 'rank')}, {size(total)} in all; "
            f"training waited {waited_s:.2f} s for this one"
        )


# --- loading


def load(manifest: Manifest, parts: Mapping[str, Stateful], read: Callable[[str], Any]) -> None:
    """Load on this rank, after the parts. `read` returns a part of the checkpoint. If the number of ranks is not that of the
    checkpoint, no rank gets its own state: all start with the common state."""
    own: dict[str, Any] = {}
    written = names(manifest)
    if written and manifest.world_size != comm.world_size():
        averages = any(getattr(strategy, "promise", "") == "averaged" for strategy in strategies(parts).values())
        what, begin = ("a replica", "the average") if averages else ("a state, such as running statistics,", "that of rank 0")
        log.say(
            f"the checkpoint has {what} of each of {count(manifest.world_size, 'rank')}, and this run has "
            f"{count(comm.world_size(), 'rank')}: all start with {begin}"
        )
    elif PART in written:
        own = read(PART).get(str(comm.rank()), {})
    elif f"{PART}-{comm.rank()}" in written:
        own = read(f"{PART}-{comm.rank()}")
    for name, strategy in strategies(parts).items():
        strategy.load_rank_state_dict(own.get(name))
