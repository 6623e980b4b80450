"""The page of memory that an agent shares with its ranks: the gate of the agreed stop, the alarms, and each rank's progress.

    page = Page.create(4)                  # the agent
    page = Page.open(path)                 # a rank; the path is in world.json

Every field has one writer: the agent writes the header, each rank its own row. Fields are aligned 8-byte words, so that a load
or a store is one instruction. The page never holds code.

The gate. Each rank, at the top of step k, stores CLAIM = k and then loads HOLD. The agent, once, stores HOLD, waits until every
processor has seen it (membarrier), and then loads the claims: their maximum S is stored as STOP. A rank that saw HOLD waits for
STOP and continues while k <= S. By the flag principle either the rank saw HOLD or the agent saw its claim, so every rank stops
with exactly S steps done, whatever collectives the steps contain.

An alarm is a trigger by time (the main rank writes when it is due, the agent reads the clock), or a request of the script that
all ranks stop (a rank writes it). It uses the same gate: HOLD also counts the alarms (its lowest bit is the stop, the count is
above it). A rank that sees a new count at a gate waits for the agreement, the maximum M of the claims, and hears the alarm at
the gate of step M + 1: after the same step on all ranks. A new alarm waits until all ranks have heard the one before, and is
for all that is due on any node when that node begins it: where ranks drift apart, the next alarm is always due before the last
rank has heard this one, and a request would otherwise come too late for each of them. Once a stop is held no alarm begins, and
claims only grow, so no rank has stopped before the step of an alarm.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

_HEADER_WORDS = 16
_ROW_WORDS = 72
_TEXT_OFFSET = 128  # bytes into a row
_TEXT_BYTES = _ROW_WORDS * 8 - _TEXT_OFFSET
_LAST_WORDS_BYTES = 8192

_RANKS, _HOLD, _STOP, _REASON, _GO, _ENDING, _RUNG, _ALARM_STEP, _ALARMS = range(9)
_CLAIM, _FLAG, _JOINED, _GROUPS, _TEXT_LENGTH, _TEXT_COUNT, _HEARD, _DUE_AT, _DUE, _ANSWERS, _COLLECTIVES = range(11)
_DATA_WAIT_NS, _BATCHES, _LOADER_WORKERS, _EPOCH_NS, _EXPLAINS = range(11, 16)

JOIN_S = 5.0
"""How long the agent, when asked to stop, waits for ranks that reach their first gate later than others."""

FINISHED = 2**62
"""The claim of a rank that has left its loop: it has passed any step that may be agreed."""

MOST_ALARMS = 62
_STOP_ALL = 1 << MOST_ALARMS
"""One of the bits of an alarm: the script has asked all ranks to stop."""

_BY_SCRIPT = -1  # the value of a flag that is not a signal

_SYS_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
_MEMBARRIER_CMD_GLOBAL = 1


class Alarm(NamedTuple):
    """What a node answers when it has begun an alarm."""

    number: int = 0
    claim: int = 0
    """The highest step that its ranks have begun."""

    which: int = 0
    """What was due for its ranks then, one bit each: the alarm is for this too, whatever it was begun for."""


def agreed(alarms: Iterable[Alarm]) -> tuple[int, int]:
    """What `rung` takes: after which step all ranks hear the alarm, and of what. With FINISHED, no rank does."""
    last, which = -1, 0
    for alarm in alarms:
        last, which = max(last, alarm.claim), which | alarm.which
    return FINISHED if last < 0 else last, which


class Page:
    """One node's page. Rows are local ranks."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = None  # of the process that created it
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, ranks: int) -> Page:
        """A page without a name in any file system: it disappears with its last user, however that process ends."""
        fd = os.memfd_create("rankwise-page")
        os.ftruncate(fd, (_HEADER_WORDS + ranks * _ROW_WORDS) * 8 + ranks * _LAST_WORDS_BYTES)
        page = cls(fd)
        page._fd = fd
        page._words[_RANKS] = ranks
        return page

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)

    @classmethod
    def open(cls, path: str) -> Page:
        """Open the page of another process of the same user. Raises OSError if that process is gone."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(fd)
        finally:
            os.close(fd)  # the mapping stays valid

    @property
    def path(self) -> str:
        """How other processes of this machine open it while this one runs."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def ranks(self) -> int:
        return self._words[_RANKS]

    def row(self, local_rank: int) -> Row:
        return Row(self._words, self._map, local_rank)

    def reset(self) -> None:
        """Clear the page before the ranks start: no claims, no request to stop."""
        ranks = self.ranks
        self._map[:] = bytes(len(self._map))
        self._words[_RANKS] = ranks

    go_offset = _GO * 8
    """The offset of the byte that a rank waits for (fork_server.py reads it, which cannot import this module)."""

    def go(self) -> None:
        """Let all ranks begin the script: the agent knows them now."""
        self._words[_GO] = 1

    def last_words_place(self, local_rank: int) -> tuple[int, int]:
        """(offset, bytes) for the exception of a rank whose disk is full (exception_record.py writes it)."""
        return (_HEADER_WORDS + self.ranks * _ROW_WORDS) * 8 + local_rank * _LAST_WORDS_BYTES, _LAST_WORDS_BYTES

    def last_words(self, local_rank: int) -> bytes:
        """Empty unless its disk was full."""
        offset, size = self.last_words_place(local_rank)
        return bytes(self._map[offset : offset + size]).rstrip(b"\0")

    # --- the agent's side of the gate

    def joined(self) -> list[int]:
        """Local ranks that stop at the gate (the others do not use it, and get the signal itself)."""
        return [r for r in range(self.ranks) if self.row(r).joined]

    def flagged(self) -> int:
        """A signal that one of the ranks got directly; 0 if none."""
        return max((self.row(r).flag for r in range(self.ranks)), default=0)

    @property
    def begun(self) -> bool:
        """Whether a rank has passed its first gate."""
        return any(self.row(r).claim for r in range(self.ranks))

    @property
    def answers(self) -> bool:
        """Whether a rank would remember a request that comes before its first gate."""
        return any(self.row(r).answers for r in range(self.ranks))

    def end(self, signum: int) -> None:
        """This attempt has failed. The remaining ranks get `signum` now: they must not take it as a request to stop."""
        self._words[_ENDING] = signum

    @property
    def stopping(self) -> bool:
        return bool(self._words[_HOLD] & 1)

    @property
    def released(self) -> bool:
        return bool(self._words[_STOP])

    def stop(self, signum: int) -> int:
        """Hold the gate, agree, release it. Returns S, the last step of all ranks; FINISHED if a rank has left its loop."""
        last = self.hold(signum)
        self.release(last)
        return last

    def hold(self, signum: int) -> int:
        """Hold the gate; returns the highest claim of this node's ranks. S is the maximum over all nodes."""
        self._words[_REASON] = signum
        self._words[_HOLD] |= 1
        _membarrier()
        return self._furthest()

    def _furthest(self) -> int:
        return max(self.row(r).claim for r in range(self.ranks))

    def release(self, last: int) -> None:
        """All stop after step `last`; ranks that wait at a gate before it continue."""
        self._words[_STOP] = last + 1

    def abandon(self) -> None:
        """Nobody manages this gate any more: let ranks pass it without waiting."""
        if not self.released:
            self.hold(self._words[_REASON])
            self.release(FINISHED)
        if self._words[_RUNG] != self.alarms:
            self.rung(FINISHED, 0)

    # --- the agent's side of an alarm

    @property
    def alarms(self) -> int:
        """How many alarms have begun."""
        return self._words[_HOLD] >> 1

    def due(self, now_ns: int) -> int:
        """Which alarms of this node's ranks are due by the monotonic clock, one bit each; 0 for none."""
        which = 0
        for row in map(self.row, range(self.ranks)):
            if row.heard_alarms == self.alarms:
                which |= row.due(now_ns)
        return which

    def ring(self, now_ns: int) -> Alarm | None:
        """Begin an alarm. Does nothing and returns None while a rank has not heard the previous alarm."""
        rows = [self.row(r) for r in range(self.ranks)]
        if any(row.heard_alarms != self.alarms and row.claim != FINISHED for row in rows):
            return None
        which = self.due(now_ns)
        self._words[_HOLD] += 2
        _membarrier()
        return Alarm(self.alarms, self._furthest(), which)

    def rung(self, last: int, which: int) -> None:
        """The agreement: all ranks hear of `which` after step `last`; with FINISHED, no rank does."""
        self._words[_ALARMS] = which
        self._words[_ALARM_STEP] = last
        self._words[_RUNG] = self.alarms


class Row:
    """One rank's words, which only this rank writes; and its view of the gate."""

    def __init__(self, words: memoryview[int], raw: mmap.mmap, local_rank: int) -> None:
        self._words = words
        self._raw = raw
        self._base = _HEADER_WORDS + local_rank * _ROW_WORDS
        self._quiet = self.heard_alarms << 1
        self.on_alarm: Callable[[int], None] | None = None
        """Called at the gate with the alarms that are due, after the same step on all ranks."""

        self.by_script = False
        """Whether the rank stopped at the last gate because a script asked all ranks to stop."""

    @property
    def claim(self) -> int:
        """The step this rank is in, 0 before the first, FINISHED after the last."""
        return self._words[self._base + _CLAIM]

    @property
    def flag(self) -> int:
        """The signal that this rank got directly; 0 if none."""
        return max(self._words[self._base + _FLAG], 0)

    @flag.setter
    def flag(self, signum: int) -> None:
        """Ignores the signal with which the agent ends this rank after a failure: it is not a request to stop."""
        if not signum or signum != self._words[_ENDING]:
            self._words[self._base + _FLAG] = signum

    @property
    def joined(self) -> bool:
        return bool(self._words[self._base + _JOINED])

    def join(self) -> None:
        """From now on this rank stops at the gate; the agent must not send it a signal."""
        self._words[self._base + _JOINED] = 1

    @property
    def groups(self) -> bool:
        """Whether the rank called a collective; known when it has ended."""
        return bool(self._words[self._base + _GROUPS])

    @property
    def groups_offset(self) -> int:
        """The offset of `groups` in the page (fork_server.py writes it, which cannot import this module)."""
        return (self._base + _GROUPS) * 8

    @property
    def collectives(self) -> int:
        """How many collectives, sends and receives of torch the rank has begun; it counts them twice a second."""
        return self._words[self._base + _COLLECTIVES]

    @property
    def collectives_offset(self) -> int:
        """The offset of `collectives` in the page (agent/collective_notes.py writes it, which cannot import this module)."""
        return (self._base + _COLLECTIVES) * 8

    @property
    def data_wait_s(self) -> float:
        """How long the rank has waited for batches of torch's DataLoader, or of ours."""
        return self.data_wait_ns / 1e9

    @property
    def data_wait_ns(self) -> int:
        return self._words[self._base + _DATA_WAIT_NS]

    @property
    def batches(self) -> int:
        """How many of these batches the rank has got."""
        return self._words[self._base + _BATCHES]

    @property
    def loader_workers(self) -> int:
        """The num_workers of the DataLoader that the rank has used last."""
        return self._words[self._base + _LOADER_WORKERS]

    @property
    def epoch_wait_s(self) -> float:
        """How much of the wait was at the start and the end of loops over torch's DataLoader, where workers start and end."""
        return self._words[self._base + _EPOCH_NS] / 1e9

    @property
    def data_wait_offset(self) -> int:
        """The offset of these four in the page (agent/data_wait.py writes them, which cannot import this module)."""
        return (self._base + _DATA_WAIT_NS) * 8

    def add_data_wait(self, wait_ns: int, batches: int) -> None:
        """For a loop that reads without torch's DataLoader."""
        self._words[self._base + _DATA_WAIT_NS] += wait_ns
        self._words[self._base + _BATCHES] += batches

    @property
    def explains(self) -> bool:
        """Whether the rank reports itself why it is slow."""
        return bool(self._words[self._base + _EXPLAINS])

    def explain(self) -> None:
        """From now on this rank reports itself why it is slow, as a Trainer does."""
        self._words[self._base + _EXPLAINS] = 1

    @property
    def reason(self) -> int:
        """The signal because of which all ranks stop."""
        return self._words[_REASON]

    @property
    def answers(self) -> bool:
        """Whether the rank would remember a request that comes before its first gate (early.py)."""
        return bool(self._words[self._base + _ANSWERS])

    @property
    def answers_offset(self) -> int:
        """The offset of `answers` in the page (fork_server.py writes it)."""
        return (self._base + _ANSWERS) * 8

    def pass_gate(self, step: int) -> bool:
        """Claim `step`, then look: True if this rank may enter the step, False if all ranks stop before it."""
        words = self._words
        words[self._base + _CLAIM] = step  # claim, then look: correctness depends on this order
        if words[_HOLD] == self._quiet:
            return True
        return self._heed(step)

    def _heed(self, step: int) -> bool:
        """`pass_gate` when the gate is held, for an alarm, a stop, or both."""
        words = self._words
        held = words[_HOLD]
        if held >> 1 != self._quiet >> 1 and self._hears_a_stop(step, held >> 1):
            return False
        if not held & 1:
            return True
        while not words[_STOP]:
            time.sleep(0.001)
        return step < words[_STOP]

    def _hears_a_stop(self, step: int, number: int) -> bool:
        """Wait at the gate of `step` for the agreement on alarm `number`. True if it asks all ranks to stop here."""
        words = self._words
        while words[_RUNG] != number:
            time.sleep(0.001)
        last = words[_ALARM_STEP]
        if step <= last < FINISHED:
            return False
        which = words[_ALARMS] if last < FINISHED else 0
        # Clear the request before the alarm counts as heard: otherwise the agent would take it as a new one.
        words[self._base + _DUE_AT] = 0
        if self.asks and (which & _STOP_ALL or last == FINISHED):
            words[self._base + _FLAG] = 0
        self._hear_up_to(number)
        if self.on_alarm is not None:
            self.on_alarm(which & ~_STOP_ALL)
        self.by_script = bool(which & _STOP_ALL)
        return self.by_script

    def _hear_up_to(self, number: int) -> None:
        self._quiet = number << 1
        self._words[self._base + _HEARD] = number

    @property
    def heard_alarms(self) -> int:
        return self._words[self._base + _HEARD]

    def set_alarm(self, at_ns: int, which: int) -> None:
        """For the main rank: at `at_ns` of the monotonic clock (0: never) the alarms `which` are due, one bit each."""
        self._words[self._base + _DUE] = which
        self._words[self._base + _DUE_AT] = min(at_ns, (1 << 63) - 1)  # the largest of a word, in 292 years

    def due(self, now_ns: int) -> int:
        """The alarms that this rank asks for now, one bit each."""
        at = self._words[self._base + _DUE_AT]
        timed = self._words[self._base + _DUE] if at and now_ns >= at and self.claim else 0
        return timed | (_STOP_ALL if self.asks else 0)

    def ask(self) -> None:
        """The script asks all ranks to stop. `wait_for_answer` comes next."""
        if not self._words[self._base + _FLAG]:
            self._words[self._base + _FLAG] = _BY_SCRIPT

    @property
    def asks(self) -> bool:
        return self._words[self._base + _FLAG] == _BY_SCRIPT

    def wait_for_answer(self, step: int) -> bool:
        """Call it before `step` is claimed, so that no rank enters the step if all have asked. True if the answer is to stop
        here."""
        while self.asks and not self._words[_HOLD] & 1:
            number = self._words[_HOLD] >> 1
            if number == self.heard_alarms:
                time.sleep(0.001)
            elif self._hears_a_stop(step, number):
                return True
            elif number != self.heard_alarms:  # other ranks are in this step already
                return False
        return False

    def finish(self) -> None:
        """This rank's loop is over: it has no step left, though it may still save together with the others."""
        self.set_alarm(0, 0)
        self._words[self._base + _CLAIM] = FINISHED
        self._hear_up_to(self._words[_HOLD] >> 1)

    def leave(self) -> None:
        """This rank no longer stops at the gate: from now on signals go to the rank itself."""
        self._words[self._base + _JOINED] = 0

    def say(self, text: str) -> None:
        """Leave one short line for the agent (the numbers of the progress bar); it replaces the one before."""
        data = text.encode()[:_TEXT_BYTES]
        start = self._base * 8 + _TEXT_OFFSET
        self._words[self._base + _TEXT_COUNT] += 1  # odd while the text is being replaced
        self._raw[start : start + len(data)] = data
        self._words[self._base + _TEXT_LENGTH] = len(data)
        self._words[self._base + _TEXT_COUNT] += 1

    @property
    def said(self) -> int:
        """A number that changes with every line that `say` leaves."""
        return self._words[self._base + _TEXT_COUNT]

    def heard(self, seen: int) -> tuple[int, str | None]:
        """(count, line) if there is a complete line that is newer than count `seen`, else (seen, None)."""
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
        time.sleep(0.010)  # no membarrier here: wait longer than a store can stay in a processor's buffer
