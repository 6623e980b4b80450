"""Cuts an iterable dataset into global batches, in the order in which the dataset yields its samples.

    stream = Stream(dataset, None, seed=0, rank=1, world_size=4, drop_last=False)
    step = stream(Request(epoch, start, size, accumulate=1))    # this rank's share of [start, start + size) in the stream

Each rank and worker reads the whole stream and keeps its share. So the batches do not depend on the number of ranks and
workers, the last batch is split like any other, and all know without a message where an epoch ends. Slow work belongs in
`collate_fn`, which gets only this rank's share: let the stream yield file names, offsets or bytes, and decode them there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import xxhash

from rankwise.data.fetch import add_place, collate
from rankwise.data.kinds import Empty
from rankwise.data.order import Indices, share, split
from rankwise.dist import private_names
from rankwise.dist import seed as seeds
from rankwise.errors import DataError

_SKIPPED_AT_ONCE = 16  # samples held at once while skipping: at a resume, or the step of another worker
_SHOWN = 60  # characters of the first sample


class Step(NamedTuple):
    """The data of one optimizer step."""

    stop: int
    """The position after this step."""

    last: bool
    """Whether the epoch ends with this step."""

    micro_batches: list[Any]

    indices: Sequence[Sequence[int] | Indices]
    """The samples of each micro-batch."""

    fresh: bool = True
    """Whether the step has samples that did not occur in this epoch before."""

    begins_with: str = ""
    """The first sample of the whole stream, as text with a digest, if it is in this step and looks the same in each process."""


Ready = tuple[int, bool, list[Any], Sequence[Sequence[int] | Indices]]
"""The first four fields of a Step: all that a Loader needs of it."""


class Request(NamedTuple):
    """The request for one optimizer step of a stream."""

    epoch: int
    start: int
    """The position of its first sample."""
    size: int
    """The number of samples of the global batch."""
    accumulate: int
    """The number of micro-batches of a rank."""


class Stream:
    """Takes a Request and returns this rank's part of the step; None if the epoch ends before it.

    `dataset.set_epoch(epoch)` is called before each pass, if the dataset has it. A pass draws from random streams that are
    keyed by (seed, epoch) and equal on all ranks and workers: a shuffle buffer may use them. torch's get_worker_info() is None
    inside the dataset, so that a dataset that divides itself by workers also yields the whole stream.

    `own`: only this rank has this stream, and it may end before those of other ranks. With `repeat` it starts again when it has
    ended; `Step.last` is then true from the step that completes the first pass on.
    """

    draws_nothing = False

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        seed: int,
        rank: int,
        world_size: int,
        drop_last: bool,
        own: bool = False,
        repeat: bool = False,
    ) -> None:
        self._dataset = dataset
        self._is_own = own
        self._repeat = repeat
        self._length: int | None = None  # the number of samples of a pass, known when it has ended
        self._own_collate = collate_fn
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._drop_last = drop_last
        self._epoch = -1
        self._iterator: Iterator[Any] = iter(())
        self._pulled = 0  # samples of this pass that were read, including those in `_ahead`
        self._ahead: list[Any] = []
        self._training = seeds.SavedStreams()
        self._own = seeds.SavedStreams()  # saved between two requests in this process
        self._beside_collate = seeds.SavedStreams()

    def anew(self, rank: int, world_size: int) -> Stream:
        """The same from the start, for another rank."""
        if self._is_own:
            rank, world_size = self._rank, self._world_size
        return Stream(
            self._dataset, self._own_collate, self._seed, rank, world_size, self._drop_last, self._is_own, self._repeat
        )

    @property
    def name(self) -> str:
        return type(self._dataset).__name__

    def here(self, request: Request) -> Step | None:
        self._training.save()
        try:
            if self._continues(request):
                self._own.restore()
            return self(request)
        finally:
            self._own.save()
            self._training.restore()

    def __call__(self, request: Request, empty: Empty | None = None) -> Step | None:
        epoch, start, size, accumulate = request
        if not self._continues(request):
            self._begin(epoch)
        while self._position < start and self._take(min(start - self._position, _SKIPPED_AT_ONCE)):
            pass
        samples = self._take(size) if self._position == start else []
        needed = size if self._drop_last else 1
        if len(samples) < needed:
            self._ahead += self._pull(needed - len(self._ahead))
            if not self._is_own:
                self._check_not_empty(start, size)
            return None
        begins_with = _in_words(samples[0]) if start == 0 and self._world_size > 1 else ""
        low, high = share(0, len(samples), self._rank, self._world_size)
        runs = split(range(low, high), accumulate)
        batches = [self._collated(epoch, start + run[0], samples[run[0] : run[-1] + 1]) for run in runs]
        self._ahead += self._pull(needed - len(self._ahead))  # after the batch: a stream may use its memory again
        positions: list[Sequence[int]] = [range(start + run[0], start + run[-1] + 1) for run in runs]
        stop, length = start + len(samples), self._length
        if self._repeat:
            return Step(stop, length is not None and stop >= length, batches, positions, length is None or start < length)
        return Step(stop, len(self._ahead) < needed, batches, positions, begins_with=begins_with)

    def _check_not_empty(self, start: int, size: int) -> None:
        name = self.name
        if self._pulled == 0:
            raise DataError(f"the dataset ({name}) is empty: its stream yields no samples")
        if start == 0:
            raise DataError(f"drop_last drops all samples: the stream of {name} ends before a global batch of {size} is full")
        if not self._drop_last:
            raise DataError(
                f"the stream of {name} ends after {self._pulled} samples, before position {start} of the checkpoint"
            )

    @property
    def _position(self) -> int:
        return self._pulled - len(self._ahead)

    def _continues(self, request: Request) -> bool:
        """Whether this pass can reach the request; otherwise a new pass starts."""
        return request.epoch == self._epoch and request.start >= self._position

    def _begin(self, epoch: int) -> None:
        self._iterate(epoch)
        self._epoch, self._pulled, self._ahead, self._length = epoch, 0, [], None

    def _iterate(self, epoch: int) -> None:
        seeds.seed_streams(seeds.derive(self._seed, epoch, "stream"))
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        with private_names.hidden_worker():
            # Not iter(): a dataset that is its own iterator would start again at each call of islice.
            self._iterator = (sample for sample in self._dataset)

    def _take(self, n: int) -> list[Any]:
        """The next n samples; fewer at the end."""
        taken, self._ahead = self._ahead[:n], self._ahead[n:]
        return taken + self._pull(n - len(taken))

    def _pull(self, n: int) -> list[Any]:
        pulled = self._pull_of_pass(n)
        while self._repeat and len(pulled) < n and self._pulled > 0:
            if self._length is None:
                self._length = self._pulled
            self._iterate(self._epoch)
            pulled += self._pull_of_pass(n - len(pulled))
        return pulled

    def _pull_of_pass(self, n: int) -> list[Any]:
        pulled: list[Any] = []
        with private_names.hidden_worker():
            try:
                pulled.extend(islice(self._iterator, max(n, 0)))
            except BaseException as error:
                self._epoch = -1  # a generator that raised cannot continue: another try needs a new one
                add_place(error, "in", [self._pulled + len(pulled)], self._dataset)
                raise
        self._pulled += len(pulled)
        return pulled

    def _collated(self, epoch: int, start: int, samples: list[Any]) -> Any:
        try:
            if self._own_collate is None:
                return collate(samples)
            self._beside_collate.save()  # its draws must not change the streams of the pass: other ranks collate other samples
            try:
                seeds.seed_streams(seeds.derive(self._seed, epoch, start))
                return self._own_collate(samples)
            finally:
                self._beside_collate.restore()
        except BaseException as error:
            add_place(error, "in the collate function, of", range(start, start + len(samples)), self._dataset)
            raise


def _in_words(sample: Any) -> str:
    """Its beginning, and a digest of all of it. Empty if the text has an address, which differs between processes."""
    text = ""
    with contextlib.suppress(Exception):  # of a class in the script
        text = repr(sample)
    if not text or " at 0x" in text:
        return ""
    return f"{' '.join(text[:_SHOWN].split())}{'...' if len(text) > _SHOWN else ''} ({xxhash.xxh32_hexdigest(text.encode())})"
