"""Warnings of loops over a Loader that do not get the batches that their author expects."""

from __future__ import annotations

from rankwise.dist import log


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
