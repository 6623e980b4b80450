"""Asks the kernel to read samples that are needed soon, unless they are already in its cache.

    tell = ReadAhead(lambda indices: [Ranges(rows, offsets, sizes)], in_blocks=False)
    tell(np.array([3, 1, 4]))

When random rows of a memory map are read, each missing page blocks the reader until the disk has read it. If the kernel is
asked before, the disk reads many pages at once. The data itself does not depend on this.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

_PROBES = 4  # ranges to look at in a call; each takes 3 us
_BELIEVED = 16  # calls that still ask after a look found something missing: half of a file may be in the cache
_WARM, _SELDOM = 8, 16
"""After 8 looks that found nothing missing, only one in 16 calls looks."""


class Mapped(Protocol):
    """Rows in a memory map of a file."""

    @property
    def path(self) -> str: ...

    def will_need(self, ranges: Sequence[tuple[int, int]], in_blocks: bool) -> None:
        """Ask the kernel to read these (offset, size) in the file. `in_blocks`: all bytes in them are used, not only single
        rows."""


class Ranges(NamedTuple):
    rows: Mapped
    offsets: Numbers
    sizes: Numbers
    """Bytes, in the order of the file. There is at least one range."""


class ReadAhead:
    """Takes the indices of samples that are needed soon. `find`: where these samples are in which files, or the blocks that
    contain them."""

    def __init__(self, find: Callable[[Numbers], list[Ranges]], in_blocks: bool) -> None:
        self._find = find
        self._in_blocks = in_blocks
        self._is_of_use = hasattr(os, "preadv") and hasattr(os, "RWF_NOWAIT") and hasattr(os, "posix_fadvise")
        self._turn, self._believed, self._warm = 0, 0, 0

    def __call__(self, indices: Numbers) -> None:
        self._turn += 1
        if not self._is_of_use or (self._warm >= _WARM and self._turn % _SELDOM):
            return
        found = self._find(indices)
        if not found:
            return
        self._look(found[self._turn % len(found)])
        if self._believed > 0:
            for rows, offsets, sizes in found:
                rows.will_need(_joined(offsets, sizes), self._in_blocks)

    def _look(self, ranges: Ranges) -> None:
        try:
            step = -(-len(ranges.offsets) // _PROBES)
            missing = is_missing(ranges.rows.path, ranges.offsets[self._turn % step :: step])
        except OSError:  # the file system does not report what is cached; if the file is missing, the gather raises
            self._is_of_use, self._believed = False, 0
            return
        self._believed = _BELIEVED if missing else max(self._believed - 1, 0)
        self._warm = 0 if self._believed else self._warm + 1


def is_missing(path: str, offsets: Numbers) -> bool:
    """Whether one of these bytes of a file is not in the kernel's cache. Raises OSError if this is unknown."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # not kept open: a dataset may have a thousand files
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # so that a look does not read the neighbours of what is missing
        one = [bytearray(1)]
        for offset in offsets.tolist():
            os.preadv(fd, one, offset, os.RWF_NOWAIT)
        return False
    except OSError as error:
        if error.errno != errno.EAGAIN:
            raise
        return True
    finally:
        os.close(fd)


def _joined(offsets: Numbers, sizes: Numbers) -> list[tuple[int, int]]:
    """Joins ranges that follow each other without a gap."""
    first = np.flatnonzero(np.concatenate([[True], offsets[1:] != (offsets + sizes)[:-1]]))
    lengths = np.add.reduceat(sizes, first)
    return list(zip(offsets[first].tolist(), lengths.tolist(), strict=True))
