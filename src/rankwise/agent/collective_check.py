"""`--check-collectives`: each rank notes the collectives that it enters; this module compares the notes of all ranks.

    rings = Rings(ranks=4);  spec["notes"] = rings.place(row)      # collective_notes.py writes there
    ledger = Ledger(ranks=8);  ledger.add(rings.read());  mismatch = ledger.look()      # every tick

gloo adds float32 to int32, combines a sum with a maximum, and pairs any two reductions that come at the same time, all without
an error: the numbers are wrong and nothing reports it. For this check, ranks send nothing and wait for nobody: they write their
notes into memory that they share with their agent.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rankwise.host.text import numbered

SLOTS = 2048
SLOT_BYTES = 256
_HEADER_BYTES = 64
_RANK_BYTES = _HEADER_BYTES + SLOTS * SLOT_BYTES

_DEFAULT_GROUP = "0"  # torch's name for it

_EVIDENCE_S = 0.3
"""How long to wait after the first difference: the notes of the other ranks show which rank differs."""

_ANY_SITE = re.compile(r"(barrier|monitored_barrier|(broadcast|gather|scatter)(_object.*)?|reduce|broadcast by DDP|backward)\(")
"""Collectives that ranks may call from different lines. `if rank == 0: barrier()` matched by a barrier further down, and a root
that calls from another line, are common and harmless; so are their object variants. A backward pass may be the last micro-batch
of one rank only."""


@dataclass(frozen=True)
class Note:
    """One collective that a rank is about to enter."""

    group: str
    number: int
    """The position of this collective among those of the group on this rank, from 1."""

    size: int
    """Ranks in the group."""

    what: str
    """`all_reduce(sum, float32[4])`"""

    site: str
    """`/home/me/train.py:31`, the innermost line outside torch and outside rankwise's own collectives, such as `all_reduce`."""

    caller: str = ""
    """`train.py:40`, the user's line, if the site is inside rankwise (in the Trainer, for example)."""

    @classmethod
    def of(cls, line: str) -> Note:
        group, number, size, what, caller, site = line.split("\t")
        return cls(group, int(number), int(size), what, site, caller)

    def agrees(self, other: Note) -> bool:
        if self.what != other.what:
            return False
        return self.site == other.site or _ANY_SITE.match(self.what) is not None

    @property
    def place(self) -> str:
        return f"{self.caller} (in {self.site})" if self.caller else Path(self.site).name


@dataclass(frozen=True)
class Mismatch:
    """Ranks that met in one collective but called different ones."""

    rank: int
    """A rank of the smallest group of ranks that agree; if groups are equally small, the one without rank 0."""

    summary: str


class Comparison:
    """Pure: takes notes, in any order of ranks, and returns the first collective in which they differ."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: OrderedDict[tuple[str, int], dict[int, Note]] = OrderedDict()
        self._differs: tuple[str, int] | None = None

    def add(self, rank: int, note: Note) -> None:
        key = (note.group, note.number)
        notes = self._open.setdefault(key, {})
        notes[rank] = note
        if self._differs is None and not note.agrees(next(iter(notes.values()))):
            self._differs = key
        if len(notes) == min(note.size, self._ranks) and key != self._differs:
            del self._open[key]
        elif len(self._open) > 2 * SLOTS and self._differs is None:  # the oldest, which other ranks have not noted
            self._open.popitem(last=False)

    @property
    def differs(self) -> bool:
        return self._differs is not None

    def mismatch(self) -> Mismatch:
        """The first difference. Call it only if `differs`."""
        assert self._differs is not None
        return _tell(self._open[self._differs])


def _tell(notes: Mapping[int, Note]) -> Mismatch:
    groups: list[list[int]] = []
    for rank in sorted(notes):
        group = next((g for g in groups if notes[g[0]].agrees(notes[rank])), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    groups.sort(key=lambda g: (len(g), -g[0]))  # the smallest first; of two of the same size, the one without rank 0
    odd, others = groups[0], groups[-1]
    one, other = notes[odd[0]], notes[others[0]]
    told = f"{_call(odd)} {one.what} at {one.place}, but {_call(others)} "
    if one.what == other.what:
        told += f"it at {other.place}: these are two different calls"
    else:
        told += f"{other.what} at {other.place}"
    more = "" if len(groups) == 2 else f"; {_call([r for g in groups[1:-1] for r in g])} something else"
    which = f"collective {one.number}" + ("" if one.group == _DEFAULT_GROUP else f" of group {one.group}")
    return Mismatch(odd[0], f"the ranks do not match in {which}: {told}{more}")


def _call(ranks: list[int]) -> str:
    return f"{numbered('rank', ranks, 4)} {'calls' if len(ranks) == 1 else 'call'}"


class Ledger:
    """Compares the notes of all ranks of one attempt."""

    def __init__(self, ranks: int) -> None:
        self._comparison = Comparison(ranks)
        self._found = 0.0

    def add(self, notes: Iterable[tuple[int, str]]) -> None:
        for rank, line in notes:
            with contextlib.suppress(ValueError):  # a file name may contain a tab
                self._comparison.add(rank, Note.of(line))

    def look(self, at_end: bool = False) -> Mismatch | None:
        """The mismatch, if any. Without `at_end`, only once the other ranks have had time to note what they enter instead."""
        if not self._comparison.differs:
            return None
        self._found = self._found or time.monotonic()
        return self._comparison.mismatch() if at_end or time.monotonic() >= self._found + _EVIDENCE_S else None


class Rings:
    """The shared memory of one attempt on one node: a ring of notes for each rank, written by that rank alone."""

    def __init__(self, ranks: int) -> None:
        self._fd = os.memfd_create("rankwise-collectives")  # it has no name in any file system
        os.ftruncate(self._fd, ranks * _RANK_BYTES)
        self._map = mmap.mmap(self._fd, ranks * _RANK_BYTES)
        self._counts = memoryview(self._map).cast("q")
        self._ranks = ranks
        self._read = [0] * ranks

    def place(self, row: int) -> dict[str, str | int]:
        """Where the rank of this row writes: arguments for collective_notes.py, which imports nothing from rankwise."""
        return {
            "path": f"/proc/{os.getpid()}/fd/{self._fd}",
            "start": row * _RANK_BYTES,
            "header_bytes": _HEADER_BYTES,
            "slots": SLOTS,
            "slot_bytes": SLOT_BYTES,
        }

    def read(self) -> list[tuple[int, str]]:
        """All new notes, as (row, note)."""
        return [(row, line) for row in range(self._ranks) for line in self._read_row(row)]

    def _read_row(self, row: int) -> list[str]:
        written = self._counts[row * _RANK_BYTES // 8]
        lines = []
        # Notes that were overwritten before we read them are lost; comparing continues with the next.
        for number in range(max(self._read[row], written - SLOTS + 64), written):
            start = row * _RANK_BYTES + _HEADER_BYTES + number % SLOTS * SLOT_BYTES
            line = self._map[start : start + SLOT_BYTES].rstrip(b"\0").decode(errors="replace")
            if self._counts[row * _RANK_BYTES // 8] < number + SLOTS:  # otherwise the slot may have changed while it was read
                lines.append(line)
        self._read[row] = written
        return lines

    def close(self) -> None:
        self._counts.release()
        self._map.close()
        os.close(self._fd)
