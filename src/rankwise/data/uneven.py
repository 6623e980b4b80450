"""Streams that differ between ranks and have no known length: all ranks take the same number of steps.

    for step in in_step(own_steps, "join", position=0, name="Speech", world_size=4): ...

Each rank holds its next 8 steps and one more. Every 8 steps one small message compares these steps on all ranks. So the ranks
know the end of the epoch in advance, and the other steps need no message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rankwise.data.stream import Step
from rankwise.dist import comm
from rankwise.errors import ConfigError, DataError

POLICIES = ("join", "stop", "pad")
"""What happens when the stream of a rank has ended. join: the rank takes part without samples until all streams have ended;
each sample is used once. stop: the epoch ends on all ranks, and the remaining samples of the other ranks are skipped. pad: the
rank starts its stream again until all have ended; each step is full on each rank, and repeated samples count like the others.
"""

_AHEAD = 8  # steps between two messages


def check(policy: str | None, split_by_rank: bool, name: str, drop_last: bool) -> str | None:
    """The policy for a stream that is split by rank; None for any other dataset. Raises ConfigError for a contradiction."""
    if not split_by_rank:
        if policy is not None:
            raise ConfigError(
                f"uneven={policy!r} is only for streams that differ between ranks, and {name} is treated as the same on all; "
                f"if {name} divides itself by rank, set split_by_rank = True, otherwise remove uneven"
            )
        return None
    if policy == "pad" and drop_last:
        raise ConfigError("uneven='pad' fills every step, so drop_last has no effect; remove one of them")
    return policy or "join"


def check_no_stream(policy: str | None, name: str) -> None:
    """Raises ConfigError for a policy if the dataset is not a stream."""
    if policy is not None:
        raise ConfigError(f"uneven={policy!r} is only for streams, and {name} has a length; remove uneven")


def check_position(saved: Mapping[str, Any], world_size: int) -> None:
    """Raises ConfigError if the state of a Loader is from the middle of an epoch on another number of ranks."""
    if saved["ranks"] != world_size and saved["position"]:
        raise ConfigError(
            f"the checkpoint was made in the middle of an epoch in which each of {saved['ranks']} ranks read its own "
            f"stream, and this run has {world_size} ranks; resume on {saved['ranks']} ranks"
        )


def in_step(own: Iterator[Step], policy: str, position: int, name: str, world_size: int) -> Iterator[Step]:
    """Collective, once in 8 steps. `own`: this rank's steps. Yields the same number of steps on all ranks, by `policy`.

    `position`: the samples of this epoch that all ranks have taken. Raises DataError on all ranks if they cannot start.
    """
    held: deque[Step | None] = deque(next(own, None) for _ in range(_AHEAD + 1))
    needed = world_size if policy == "stop" else 1
    if position == 0:
        _check_not_empty(held[0], policy, name)
    while True:
        samples, fresh = _told(held)
        for k in range(_AHEAD):
            if fresh[k] < needed:
                return
            mine = held.popleft()
            position += samples[k]
            last = fresh[k + 1] < needed
            yield Step(position, last, mine.micro_batches if mine else [], mine.indices if mine else [])
            held.append(next(own, None))


def _told(held: deque[Step | None]) -> tuple[list[int], list[int]]:
    """Collective. For each step that is held: the number of samples of all ranks, and how many ranks have new samples in it."""
    mine = [sum(map(len, step.indices)) if step is not None else 0 for step in held]
    mine += [step is not None and step.fresh for step in held]
    told = [int(n) for n in comm.all_reduce(torch.tensor(mine, dtype=torch.int64, device="cpu")).tolist()]
    return told[: len(held)], told[len(held) :]


def _check_not_empty(first: Step | None, policy: str, name: str) -> None:
    """Collective. Raises DataError on all ranks if the stream of a rank is empty."""
    told = comm.all_gather_object(first is None)
    empty = [rank for rank, none in enumerate(told) if none]
    if empty and (policy != "join" or len(empty) == len(told)):
        ranks = f"rank{'s' * (len(empty) > 1)} {', '.join(map(str, empty))}"
        why = {
            "join": "",
            "stop": ", so uneven='stop' ends the epoch at once",
            "pad": ", so uneven='pad' has nothing to repeat",
        }[policy]
        raise DataError(f"the stream of {name} yields nothing on {ranks}{why}")
