"""The page of memory that an agent shares with its ranks: the gate of the agreed stop, and the beat.

    page = Page.create(4)                  # the agent
    page = Page.open(path)                 # a rank; the path is in world.json

Every field has one writer: GO, HOLD, STOP and REASON are the agent's, a rank's row is that rank's. Fields are aligned
8-byte words, so that a load or a store is one instruction. Nothing executable is ever in it.

The gate. Each rank, at the top of step k, stores CLAIM = k and then loads HOLD. The agent, once, stores HOLD, waits until
every processor has seen it (membarrier), and then loads the claims: their maximum S is stored as STOP. A rank that saw
HOLD waits for STOP and goes on while k <= S. By the flag principle either the rank saw HOLD or the agent saw its claim, so
every rank leaves with exactly S steps done, whatever collectives the steps hold.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time

_HEADER_WORDS = 8
_ROW_WORDS = 64
_TEXT_OFFSET = 64  # bytes into a row
_TEXT_BYTES = _ROW_WORDS * 8 - _TEXT_OFFSET
_LAST_WORDS_BYTES = 8192

_RANKS, _HOLD, _STOP, _REASON, _GO = range(5)
_CLAIM, _FLAG, _JOINED, _GROUPS, _TEXT_LENGTH, _TEXT_COUNT, _COLLECTIVES = range(7)

JOIN_S = 5.0
"""How long who keeps the gate waits for ranks that reach it a little later than the first."""

FINISHED = 2**62
"""The claim of a rank that has left its loop: whatever is agreed, it has done it."""

_SYS_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
_MEMBARRIER_CMD_GLOBAL = 1


class Page:
    """One node's page. Rows are local ranks."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, ranks: int) -> Page:
        """A page without a name in any file system: it is gone with its last user, however that one ends."""
        fd = os.memfd_create("rankwise-page")
        os.ftruncate(fd, (_HEADER_WORDS + ranks * _ROW_WORDS) * 8 + ranks * _LAST_WORDS_BYTES)
        page = cls(fd)
        page._words[_RANKS] = ranks
        return page

    @classmethod
    def open(cls, path: str) -> Page:
        """Open the page that another process of the same user holds; OSError when that process is gone."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(fd)
        finally:
            os.close(fd)  # the map stays

    @property
    def path(self) -> str:
        """How other processes of this machine open it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def ranks(self) -> int:
        return self._words[_RANKS]

    def row(self, local_rank: int) -> Row:
        return Row(self._words, self._map, local_rank)

    def reset(self) -> None:
        """Before the ranks start anew: nobody has claimed, nobody is asked to stop."""
        ranks = self.ranks
        self._map[:] = bytes(len(self._map))
        self._words[_RANKS] = ranks

    go_offset = _GO * 8
    """Where in the page a rank waits for `go` (warm.py, which imports nothing of ours, reads it)."""

    def go(self) -> None:
        """The agent knows all ranks: they may begin the script."""
        self._words[_GO] = 1

    def last_words_place(self, local_rank: int) -> tuple[int, int]:
        """(offset, bytes) for what a dying rank cannot write on its disk (warm.py writes it)."""
        return (_HEADER_WORDS + self.ranks * _ROW_WORDS) * 8 + local_rank * _LAST_WORDS_BYTES, _LAST_WORDS_BYTES

    def last_words(self, local_rank: int) -> bytes:
        """Empty unless its disk was full."""
        offset, size = self.last_words_place(local_rank)
        return bytes(self._map[offset : offset + size]).rstrip(b"\0")

    # --- the agent's side of the gate

    def joined(self) -> list[int]:
        """Local ranks that stop at the gate (the others know nothing of it and are sent the signal itself)."""
        return [r for r in range(self.ranks) if self.row(r).joined]

    def flagged(self) -> int:
        """The signal that a rank was sent directly, 0 if none."""
        return next((flag for r in range(self.ranks) if (flag := self.row(r).flag)), 0)

    @property
    def stopping(self) -> bool:
        return bool(self._words[_HOLD])

    @property
    def released(self) -> bool:
        return bool(self._words[_STOP])

    def stop(self, signum: int) -> int:
        """Hold the gate, agree, release it. Returns S, after which step all stop; FINISHED if a rank is through."""
        last = self.hold(signum)
        self.release(last)
        return last

    def hold(self, signum: int) -> int:
        """Hold the gate; returns the highest claim of this node's ranks. Of all nodes' claims the maximum is S."""
        self._words[_REASON] = signum
        self._words[_HOLD] = 1
        _membarrier()
        return max(self.row(r).claim for r in range(self.ranks))

    def release(self, last: int) -> None:
        """All stop after step `last`; those at a gate up to there go on."""
        self._words[_STOP] = last + 1


class Row:
    """One rank's words: it alone writes them, except that all read the gate."""

    def __init__(self, words: memoryview[int], raw: mmap.mmap, local_rank: int) -> None:
        self._words = words
        self._raw = raw
        self._base = _HEADER_WORDS + local_rank * _ROW_WORDS

    @property
    def claim(self) -> int:
        """The step this rank is in, 0 before the first, FINISHED after the last."""
        return self._words[self._base + _CLAIM]

    @property
    def flag(self) -> int:
        return self._words[self._base + _FLAG]

    @flag.setter
    def flag(self, signum: int) -> None:
        self._words[self._base + _FLAG] = signum

    @property
    def joined(self) -> bool:
        return bool(self._words[self._base + _JOINED])

    def join(self) -> None:
        """From now on this rank stops at the gate and wants no signal."""
        self._words[self._base + _JOINED] = 1

    @property
    def groups(self) -> bool:
        """Whether the rank ever made a process group; known at its end."""
        return bool(self._words[self._base + _GROUPS])

    @property
    def groups_offset(self) -> int:
        """Where in the page the rank's end notes that (warm.py, which imports nothing of ours, writes it)."""
        return (self._base + _GROUPS) * 8

    @property
    def collectives(self) -> int:
        """How many collectives, sends and receives of torch the rank had begun when it last counted, twice a second."""
        return self._words[self._base + _COLLECTIVES]

    @property
    def collectives_offset(self) -> int:
        """Where in the page the rank counts them (agent/noting.py, which imports nothing of ours, writes it)."""
        return (self._base + _COLLECTIVES) * 8

    @property
    def reason(self) -> int:
        """The signal for which all stop."""
        return self._words[_REASON]

    def pass_gate(self, step: int) -> bool:
        """Claim `step`, then look: True if this rank may enter it, False if all stop before it."""
        words = self._words
        words[self._base + _CLAIM] = step  # claim, then look: this order is the whole trick
        if not words[_HOLD]:
            return True
        while not words[_STOP]:
            time.sleep(0.001)
        return step < words[_STOP]

    def finish(self) -> None:
        """This rank's loop is over: it needs the others for what it saves, but has no step left."""
        self._words[self._base + _CLAIM] = FINISHED

    def leave(self) -> None:
        """Nothing here is agreed any more: from now on signals are for the rank itself."""
        self._words[self._base + _JOINED] = 0

    def say(self, text: str) -> None:
        """Leave one short line for the agent (the progress bar's figures); the newest replaces the one before."""
        data = text.encode()[:_TEXT_BYTES]
        start = self._base * 8 + _TEXT_OFFSET
        self._words[self._base + _TEXT_COUNT] += 1  # odd while the text is being replaced
        self._raw[start : start + len(data)] = data
        self._words[self._base + _TEXT_LENGTH] = len(data)
        self._words[self._base + _TEXT_COUNT] += 1

    @property
    def said(self) -> int:
        """Changes with every line that `say` leaves."""
        return self._words[self._base + _TEXT_COUNT]

    def heard(self, seen: int) -> tuple[int, str | None]:
        """(count, line) if a line newer than count `seen` is there whole, else (seen, None)."""
        count = self._words[self._base + _TEXT_COUNT]
        if count == seen or count % 2:
            return seen, None
        start = self._base * 8 + _TEXT_OFFSET
        data = self._raw[start : start + self._words[self._base + _TEXT_LENGTH]]
        if self._words[self._base + _TEXT_COUNT] != count:
            return seen, None
        return count, data.decode(errors="replace")


def _membarrier() -> None:
    number = _SYS_MEMBARRIER.get(platform.machine())
    if number is None or ctypes.CDLL(None).syscall(number, _MEMBARRIER_CMD_GLOBAL, 0, 0) != 0:
        time.sleep(0.010)  # no such call here: longer than any store stays in a processor's buffer
