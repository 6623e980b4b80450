"""What scripts do with a Loader because it is so with torch's DataLoader: an error or a warning says what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.dist import comm, log

_SHUFFLES = "a Loader shuffles by itself, differently in each epoch; remove this"
_INSTEAD = {
    "dataset": "loader.samples is its number of samples; for a mean, use rankwise.Meters or rankwise.Evaluate, which add the "
    "sums and counts of all ranks: each rank has only a part",
    "batch_size": "loader.global_batch_size is the number of samples of a step, over all ranks",
    "sampler": _SHUFFLES,
    "batch_sampler": _SHUFFLES,
    "set_epoch": _SHUFFLES,
}


class NoDataLoader:
    """A base of Loader: attributes of torch's DataLoader that it does not have."""

    def __len__(self) -> int:
        raise TypeError(
            "a Loader has no len(): loader.steps_per_epoch is the number of steps of an epoch, and one loop does all max_epochs"
        )

    def __bool__(self) -> bool:
        return True

    if not TYPE_CHECKING:  # with this method, a type checker accepts any name

        def __getattr__(self, name: str) -> Any:
            """Called if there is no such attribute, or if a property has raised AttributeError."""
            if name in _INSTEAD:
                raise AttributeError(f"a Loader has no {name}: {_INSTEAD[name]}")
            return object.__getattribute__(self, name)  # raises the error that was raised before


def warn_of_end(epochs: int | None) -> None:
    """For another loop over a Loader that has done all its epochs."""
    log.warning_once(
        f"a loop over a Loader got no batch, because its max_epochs={epochs} were over: one loop does all epochs, so remove "
        "the loop around it, and give the number of all epochs as max_epochs"
    )


def warn_of_look(samples: int) -> None:
    """For the loop after one that ended with the first step of all, as `next(iter(loader))` does."""
    log.warning_once(
        f"an earlier loop over this Loader has ended after its first step, so this one begins after these {samples} samples; "
        "to look at a batch without taking it, write next(iter(loader.once()))"
    )


def warn_of_split(begins_with: str) -> None:
    """Collective. For a stream that divides itself by rank: the Loader takes a part of each part. `begins_with`: the first
    sample of this rank's stream in words (stream.py); empty if it is not known."""
    told = comm.all_gather_object(begins_with)
    other = next((rank for rank, text in enumerate(told) if text != told[0]), None)
    if all(told) and other is not None:
        first, second = (text.rpartition(" (")[0] for text in (told[0], told[other]))
        log.warning_once(
            f"the stream begins with {first} on rank 0 and with {second} on rank {other}: a Loader takes each for the whole "
            f"stream, and reads 1 of {len(told)} of its samples; yield the same samples on all ranks, or, if the dataset "
            "divides itself by rank, set split_by_rank = True in its class"
        )
