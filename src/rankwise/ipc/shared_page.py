"""The page of memory that an agent shares with its ranks: the gate of the agreed stop, the alarms, and the heartbeat.

    page = Page.create(4)                  # the agent
    page = Page.open(path)                 # a rank; the path is in world.json

Every field has one writer: the header is the agent's, a rank's row is that rank's. Fields are aligned 8-byte words, so that a
load or a store is one instruction. Nothing executable is ever in it.

The gate. Each rank, at the top of step k, stores CLAIM = k and then loads HOLD. The agent, once, stores HOLD, waits until
every processor has seen it (membarrier), and then loads the claims: their maximum S is stored as STOP. A rank that saw
HOLD waits for STOP and goes on while k <= S. By the flag principle either the rank saw HOLD or the agent saw its claim, so
every rank leaves with exactly S steps done, whatever collectives the steps hold.

An alarm is a trigger by time (the main rank writes when it is due, the agent reads the clock), or the script's own wish that
all ranks stop (a rank writes it). It passes through the same gate: HOLD also counts the alarms (its lowest bit is the stop, the
count is above it). A rank at a gate that has a new count waits for the agreement, the maximum M of the claims, and hears the
alarm at the gate of step M + 1: after the same step on all ranks. A new alarm waits until all ranks have heard the one before.
Once a stop is held no alarm begins, and claims only grow, so no rank has left by the step of an alarm.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Callable

_HEADER_WORDS = 16
_ROW_WORDS = 72
_TEXT_OFFSET = 128  # bytes into a row
_TEXT_BYTES = _ROW_WORDS * 8 - _TEXT_OFFSET
_LAST_WORDS_BYTES = 8192

_RANKS, _HOLD, _STOP, _REASON, _GO, _ENDING, _RUNG, _ALARM_STEP, _ALARMS = range(9)
_CLAIM, _FLAG, _JOINED, _GROUPS, _TEXT_LENGTH, _TEXT_COUNT, _HEARD, _DUE_AT, _DUE, _ANSWERS, _COLLECTIVES = range(11)

JOIN_S = 5.0
"""How long who keeps the gate waits for ranks that reach it a little later than the first."""

FINISHED = 2**62
"""The claim of a rank that has left its loop: whatever is agreed, it has done it."""

MOST_ALARMS = 62
_STOP_ALL = 1 << MOST_ALARMS
"""Among the alarms, a bit each: the script has asked all ranks to stop."""

_BY_SCRIPT = -1  # instead of the signal in a flag

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
        """How other processes of this machine open it while this one runs."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def ranks(self) -> int:
        return self._words[_RANKS]

    def row(self, local_rank: int) -> Row:
        return Row(self._words, self._map, local_rank)

    def reset(self) -> None:
        """Before the ranks start again: nobody has claimed, nobody is asked to stop."""
        ranks = self.ranks
        self._map[:] = bytes(len(self._map))
        self._words[_RANKS] = ranks

    go_offset = _GO * 8
    """Where in the page a rank waits for `go` (fork_server.py, which imports nothing of ours, reads it)."""

    def go(self) -> None:
        """The agent knows all ranks: they may begin the script."""
        self._words[_GO] = 1

    def last_words_place(self, local_rank: int) -> tuple[int, int]:
        """(offset, bytes) for what a dying rank cannot write on its disk (exception_record.py writes it)."""
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
        return max((self.row(r).flag for r in range(self.ranks)), default=0)

    @property
    def begun(self) -> bool:
        """Whether a rank has passed its first gate."""
        return any(self.row(r).claim for r in range(self.ranks))

    @property
    def answers(self) -> bool:
        """Whether a rank remembers a request that comes before its first gate."""
        return any(self.row(r).answers for r in range(self.ranks))

    def end(self, signum: int) -> None:
        """This attempt has failed. `signum` is what the ranks that are left are sent now: to them it is no request to stop."""
        self._words[_ENDING] = signum

    @property
    def stopping(self) -> bool:
        return bool(self._words[_HOLD] & 1)

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
        self._words[_HOLD] |= 1
        _membarrier()
        return self._furthest()

    def _furthest(self) -> int:
        return max(self.row(r).claim for r in range(self.ranks))

    def release(self, last: int) -> None:
        """All stop after step `last`; ranks that wait at a gate before it continue."""
        self._words[_STOP] = last + 1

    def abandon(self) -> None:
        """Nobody keeps this gate any more: no rank waits at it."""
        if not self.released:
            self.hold(self._words[_REASON])
            self.release(FINISHED)
        if self._words[_RUNG] != self.alarms:
            self.rung(FINISHED, 0)

    # --- the agent's side of an alarm

    @property
    def alarms(self) -> int:
        """How many were begun."""
        return self._words[_HOLD] >> 1

    def due(self, now_ns: int) -> int:
        """Which alarms of this node's ranks are due by the monotonic clock, a bit each; 0 for none."""
        which = 0
        for row in map(self.row, range(self.ranks)):
            if row.heard_alarms == self.alarms:
                which |= row.due(now_ns)
        return which

    def ring(self) -> int | None:
        """Begin an alarm. Returns the highest claim of this node's ranks; None, and nothing is begun, while one of them has not
        heard the alarm before."""
        rows = [self.row(r) for r in range(self.ranks)]
        if any(row.heard_alarms != self.alarms and row.claim != FINISHED for row in rows):
            return None
        self._words[_HOLD] += 2
        _membarrier()
        return self._furthest()

    def rung(self, last: int, which: int) -> None:
        """It is agreed: all ranks hear of `which` after step `last`; FINISHED: no rank does."""
        self._words[_ALARMS] = which
        self._words[_ALARM_STEP] = last
        self._words[_RUNG] = self.alarms


class Row:
    """One rank's words: it alone writes them, except that all read the gate."""

    def __init__(self, words: memoryview[int], raw: mmap.mmap, local_rank: int) -> None:
        self._words = words
        self._raw = raw
        self._base = _HEADER_WORDS + local_rank * _ROW_WORDS
        self._quiet = self.heard_alarms << 1
        self.on_alarm: Callable[[int], None] | None = None
        """Called at the gate with the times that are over, after the same step on all ranks."""

        self.by_script = False
        """Whether the last gate was not passed because a script has asked all ranks to stop."""

    @property
    def claim(self) -> int:
        """The step this rank is in, 0 before the first, FINISHED after the last."""
        return self._words[self._base + _CLAIM]

    @property
    def flag(self) -> int:
        """The signal that it was sent directly, 0 if none."""
        return max(self._words[self._base + _FLAG], 0)

    @flag.setter
    def flag(self, signum: int) -> None:
        """A signal by which the agent ends this rank after a failure is not a request to stop: nothing is noted."""
        if not signum or signum != self._words[_ENDING]:
            self._words[self._base + _FLAG] = signum

    @property
    def joined(self) -> bool:
        return bool(self._words[self._base + _JOINED])

    def join(self) -> None:
        """From now on this rank stops at the gate, and must not get a signal."""
        self._words[self._base + _JOINED] = 1

    @property
    def groups(self) -> bool:
        """Whether the rank ever made a process group; known at its end."""
        return bool(self._words[self._base + _GROUPS])

    @property
    def groups_offset(self) -> int:
        """Where in the page the rank's end notes that (fork_server.py, which imports nothing of ours, writes it)."""
        return (self._base + _GROUPS) * 8

    @property
    def collectives(self) -> int:
        """How many collectives, sends and receives of torch the rank had begun when it last counted, twice a second."""
        return self._words[self._base + _COLLECTIVES]

    @property
    def collectives_offset(self) -> int:
        """Where in the page the rank counts them (agent/collective_notes.py, which imports nothing of ours, writes it)."""
        return (self._base + _COLLECTIVES) * 8

    @property
    def reason(self) -> int:
        """The signal for which all stop."""
        return self._words[_REASON]

    @property
    def answers(self) -> bool:
        """Whether the rank remembers a request that comes before its first gate (early.py)."""
        return bool(self._words[self._base + _ANSWERS])

    @property
    def answers_offset(self) -> int:
        """Where in the page the rank notes that (fork_server.py writes it)."""
        return (self._base + _ANSWERS) * 8

    def pass_gate(self, step: int) -> bool:
        """Claim `step`, then look: True if this rank may enter it, False if all stop before it."""
        words = self._words
        words[self._base + _CLAIM] = step  # claim, then look: correctness depends on this order
        if words[_HOLD] == self._quiet:
            return True
        return self._heed(step)

    def _heed(self, step: int) -> bool:
        """The gate is held, for an alarm, for a stop, or both."""
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
        """At the gate of `step`, while alarm `number` is not heard yet."""
        words = self._words
        while words[_RUNG] != number:
            time.sleep(0.001)
        last = words[_ALARM_STEP]
        if step <= last < FINISHED:
            return False
        which = words[_ALARMS] if last < FINISHED else 0
        # What asked for it goes before it counts as heard: else the agent would take that for the next one.
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
        """The main rank's: at `at_ns` of the monotonic clock (0: never) these times are over, a bit each."""
        self._words[self._base + _DUE] = which
        self._words[self._base + _DUE_AT] = at_ns

    def due(self, now_ns: int) -> int:
        """What it asks for now, a bit each."""
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
        """Before `step` is claimed, so that no rank enters it where all have asked. True if the answer is to stop here."""
        while self.asks and not self._words[_HOLD] & 1:
            number = self._words[_HOLD] >> 1
            if number == self.heard_alarms:
                time.sleep(0.001)
            elif self._hears_a_stop(step, number):
                return True
            elif number != self.heard_alarms:  # others are in this step already
                return False
        return False

    def finish(self) -> None:
        """This rank's loop is over: it needs the others for what it saves, but has no step left."""
        self.set_alarm(0, 0)
        self._words[self._base + _CLAIM] = FINISHED
        self._hear_up_to(self._words[_HOLD] >> 1)

    def leave(self) -> None:
        """Nothing here is agreed any more: from now on signals are for the rank itself."""
        self._words[self._base + _JOINED] = 0

    def say(self, text: str) -> None:
        """Leave one short line for the agent (the numbers of the progress bar); the newest replaces the one before."""
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
        """(count, line) if a complete line newer than count `seen` is there, else (seen, None)."""
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
