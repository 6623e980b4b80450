"""A run that does not fail and makes no progress: which rank blocks the others, and where it is.

    watch = StallWatch(run, processes, 120.0, 120.0, say=print, stalled=...);  watch.look()      # on each node, every tick
    line = judge(observed_on_all_nodes, sure)                                              # at the head

A stopped rank is visible in /proc at once, and a rank that raised and does not exit in its record. Otherwise, if nothing has
happened for `warn_s` (no step, no collective, no metrics, no output), the ranks' Python stacks are sampled three times: ranks
inside a collective wait for the other ranks, and loader workers are asked where they are if a rank waits for them. This module
only reports; it ends nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankwise.agent.rank_processes import Rank, RankProcesses
from rankwise.host import processes
from rankwise.host.stack_text import is_in_collectives, is_of_a_collective, unescaped
from rankwise.host.text import listed
from rankwise.run.directory import RunDir

STACK_SIGNAL = signal.SIGRTMIN + 3  # not USR1 or USR2: those belong to schedulers and to scripts
"""On this signal a rank's faulthandler writes its stack (fork_server.py), also inside a C call or while the GIL is held."""

_SAMPLES = 3
_SAMPLE_EVERY_S = 0.3
_LOOK_EVERY_S = 1.0
_BLOCKED_S = 4.0
_RAISED_S = 5.0  # most ranks that raise exit sooner
_MOST_TOLD = 8
_MOST_WORKERS = 8  # loader workers of a rank that are asked, one after another
_ASKED_S = 5.0  # without any progress, once a stop was requested
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_WAITS_FOR_WORKERS = ("/torch/utils/data/dataloader.py", "/rankwise/data/worker_link.py")
_READS_AHEAD = "/rankwise/data/prefetch.py"
_LOOP_OF_WORKER = "/torch/utils/data/_utils/worker.py"
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_OTHER = re.compile(r"^Thread .*\n((?:  File .*\n)+)", re.MULTILINE)
_CURRENT = re.compile(r"^Current thread .*\n((?:  File .*\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        if self.file.startswith(_OURS):
            return f"rankwise/{self.file.removeprefix(_OURS)}:{self.line}"
        return f"{Path(self.file).name}:{self.line}" + (f" in {self.function}" if self.function != "<module>" else "")


def _is_of_a_library(frame: Frame) -> bool:
    return any(part in frame.file for part in ("/site-packages/", "/lib/python", "<frozen"))


@dataclass(frozen=True)
class Observation:
    """One rank over the samples of a stall."""

    rank: int
    stacks: tuple[tuple[Frame, ...], ...]
    """The main thread's stack in each sample, innermost frame first; empty if the rank did not answer."""

    cpu_share: float
    """The share of one processor that it used between the first and the last sample."""

    children: tuple[str, ...] = ()
    """Commands of the processes that it has started."""

    sure: bool = False
    """Whether it reports its steps: then it is certain that it makes no progress."""

    worker: str = ""
    """Where one of its loader workers, or the thread that reads ahead, is if it waits for them: `data.py:13 in read`."""

    @property
    def waits_in(self) -> str | None:
        """The collective that it is in, or None."""
        if not self.stacks or not self.stacks[-1]:
            return None
        inner = self.stacks[-1]
        if any(frame.file.endswith("/host/listener.py") for frame in inner[:2]):  # for rank 0, with or without torch
            return next((frame.function for frame in inner if frame.function in ("init", "init_process_group")), "a connection")
        if is_in_collectives(inner[0].file):
            depth = next((i for i, frame in enumerate(inner) if not is_in_collectives(frame.file)), len(inner))
            names = [frame.function for frame in inner[:depth] if is_of_a_collective(frame.file, frame.function)]
            return names[-1] if names else "a collective"
        if inner[0].file.endswith("/torch/autograd/graph.py") and self.cpu_share < 0.1:
            return "backward"
        return None

    @property
    def place(self) -> Frame | None:
        """The innermost frame outside other libraries: the user's or rankwise's."""
        if not self.stacks:
            return None
        stack = self.stacks[-1]
        own = [f for f in stack if f.file.startswith(_OURS) or not _is_of_a_library(f)]
        return own[0] if own else (stack[0] if stack else None)

    @property
    def where(self) -> str:
        """The line of the user's script, and the file of rankwise that it has called."""
        place = self.place
        if place is None or not place.file.startswith(_OURS):
            return str(place) if place is not None else ""
        own = [f for f in self.stacks[-1] if not f.file.startswith(_OURS) and not _is_of_a_library(f)]
        return f"{own[0]} (in {place})" if own else str(place)

    @property
    def moves(self) -> bool:
        """Whether two samples differ: then it is working."""
        return len(set(self.stacks)) > 1

    def told(self) -> str:
        place = f" at {self.where}" if self.place is not None else ""
        if self.waits_in is not None:
            return f"rank {self.rank} waits in {self.waits_in}{place}"
        if not any(self.stacks):
            return f"rank {self.rank} does not answer"
        loader = waits_for_workers(self.stacks[-1])
        doing = f"{self._waiting(loader)}, " if loader or waits_for_thread(self.stacks[-1]) else ""
        running = f", running {', '.join(self.children[:3])}" if self.children and not loader else ""
        cpu = "idle" if self.cpu_share < 0.05 else f"{100 * self.cpu_share:.0f}% CPU"
        return f"rank {self.rank} is{place} ({doing}{cpu}, the same in {len(self.stacks)} stack traces{running})"

    def _waiting(self, loader: bool) -> str:
        if not loader:
            return "waiting for its thread that reads ahead" + (f", which is at {self.worker}" if self.worker else "")
        worker = f"worker, which is at {self.worker}" if self.worker else "workers"
        return f"waiting for its loader {worker}"


def judge(ranks: Sequence[Observation], sure: bool, checked: bool = False) -> str | None:
    """What blocks the run, in one line; None if it is not known.

    `sure`: the ranks report their steps, so it is certain that none makes progress. Otherwise it is a stall only if several
    ranks are in collectives, or some are and another is not: a script may print nothing for a long time. `checked`: whether
    --check-collectives is on.
    """
    if any(rank.moves for rank in ranks):
        return None
    waiting = [rank for rank in ranks if rank.waits_in is not None]
    late = [rank for rank in ranks if rank.waits_in is None]
    if waiting and late:
        others = listed((rank.told() for rank in waiting), 3, joint="; ", rest="; and {} more")
        return f"{_told(late)}; {others}"
    if waiting and len(ranks) > 1:
        if len({(rank.waits_in, rank.place) for rank in waiting}) > 1:
            return "the ranks are in different collectives: " + _told(waiting)
        why = (
            "--check-collectives finds no difference between their calls, so the network does not answer"
            if checked
            else "the network does not answer, or their calls do not match (rankwise run --check-collectives shows it)"
        )
        return f"all ranks wait in {waiting[0].waits_in} at {waiting[0].where}: {why}"
    return _told(late) if sure else None


def _told(ranks: Sequence[Observation]) -> str:
    """Of hundreds of ranks only some, one of each place first."""
    of_each = {(rank.waits_in, rank.place): rank.rank for rank in reversed(ranks)}.values()
    chosen = sorted(ranks, key=lambda rank: rank.rank not in of_each) if len(ranks) > _MOST_TOLD else ranks
    return listed((rank.told() for rank in chosen), _MOST_TOLD, joint="; ", rest="; and {} more")


def parse(dump: str) -> tuple[Frame, ...]:
    """The main thread's stack in the output of faulthandler, innermost frame first; empty if there is none."""
    blocks = _CURRENT.findall(dump)
    return tuple(Frame(file, int(line), function) for file, line, function in _FRAME.findall(blocks[-1])) if blocks else ()


def waits_for_workers(stack: Sequence[Frame]) -> bool:
    return any(frame.file.endswith(_WAITS_FOR_WORKERS) for frame in stack)


def waits_for_thread(stack: Sequence[Frame]) -> bool:
    return any(frame.file.endswith(_READS_AHEAD) and frame.function == "get" for frame in stack)


def thread_of(dump: str) -> tuple[Frame, ...]:
    """The stack of the thread that reads ahead, as in `parse`."""
    stacks = [
        tuple(Frame(file, int(line), name) for file, line, name in _FRAME.findall(block)) for block in _OTHER.findall(dump)
    ]
    return next((stack for stack in stacks if any(f.file.endswith(_READS_AHEAD) and f.function == "fetch" for f in stack)), ())


def busy_at(stack: Sequence[Frame]) -> Frame | None:
    """The line of the user, or else of rankwise, at which a loader worker is; None if it waits for a request, or is no loader
    worker. Below torch's loop are the frames of the training process from which it was forked."""
    loop = next((depth for depth, frame in enumerate(stack) if frame.file.endswith(_LOOP_OF_WORKER)), 0)
    place = _innermost(stack[:loop])
    is_idle = place is not None and place.file.endswith(_WAITS_FOR_WORKERS) and place.function == "get"
    return None if is_idle else place


def _innermost(stack: Sequence[Frame]) -> Frame | None:
    """Of the user, or else of rankwise."""
    own = [frame for frame in stack if not _is_of_a_library(frame)]
    return next((frame for frame in own if not frame.file.startswith(_OURS)), own[0] if own else None)


@dataclass
class _HeldStacks:
    """Since when the kernel has not let a rank run, for one of two reasons, and whether that was reported."""

    since: float | None = None
    told: bool = False


@dataclass
class _Watched:
    """What is remembered of one rank from one look to the next."""

    stopped: _HeldStacks = field(default_factory=_HeldStacks)
    blocked: _HeldStacks = field(default_factory=_HeldStacks)
    used_s: float | None = None
    """Its processor time at the last look."""

    told_raised: bool = False
    stacks: list[tuple[Frame, ...]] = field(default_factory=list)
    offset: int = 0
    cpu_s: float = 0.0
    workers: list[int] | None = None
    """The loader workers that are still to be asked; None before it is known whether the rank waits for them."""

    worker: Frame | None = None
    """Where one of them is."""


class StallWatch:
    """Calls `stalled(since_s, observations, stacks)` if no rank here has made progress for `since_s`."""

    def __init__(
        self,
        run: RunDir,
        processes: RankProcesses,
        warn_s: float,
        grace_s: float,
        say: Callable[[str], None],
        stalled: Callable[[float, Sequence[Observation], str], None],
    ) -> None:
        self._run = run
        self._processes = processes
        self._warn_s = warn_s
        self._grace_s = grace_s
        self._say = say
        self._stalled = stalled
        self._watched = {rank.rank: _Watched() for rank in processes.ranks}
        self._seen: Hashable = None
        self._moved = time.monotonic()
        self._next_look = 0.0
        self._sampling_since = 0.0

    def look(self) -> None:
        """Call it on each tick: it looks at the ranks once a second, and more often during a stall."""
        now = time.monotonic()
        if now < self._next_look or not self._processes.started:
            return
        self._next_look = now + (_SAMPLE_EVERY_S if self._sampling_since else _LOOK_EVERY_S)
        self._processes.notice_raised()
        for rank in self._processes.alive:
            self._report_raised(rank, now)
        stopped = [rank for rank in self._processes.alive if self._is_stopped(rank, now)]
        progress = self._processes.progress()
        if progress != self._seen or stopped:
            self._seen, self._moved, self._sampling_since = progress, now, 0.0
        elif self._warn_s and now - self._moved >= self._warn_s:
            self._sample(now)

    def _report_raised(self, rank: Rank, now: float) -> None:
        """Report, once, a rank that has raised and does not exit: the console shows none of its output after the exception."""
        watched = self._watched[rank.rank]
        if watched.told_raised or rank.raised is None or now - rank.raised < _RAISED_S:
            return
        watched.told_raised = True
        children = listed(processes.children(rank.pid), 3) or "none"
        self._say(
            f"rank {rank.rank} raised {rank.exception} {now - rank.raised:.0f} s ago and has not exited, because a thread, a "
            f"child process or an atexit function still runs (child processes: {children}); all ranks are killed "
            f"{self._grace_s:g} s after the exception (--grace)"
        )

    def _is_stopped(self, rank: Rank, now: float) -> bool:
        """Report a rank that the kernel does not let run: stopped, or in state D at every look (a short D is normal for any
        disk). Returns whether it is stopped."""
        watched, state = self._watched[rank.rank], processes.state(rank.pid)
        before, watched.used_s = watched.used_s, processes.cpu_s(rank.pid)
        # A rank that ran since the last look is only slowed: cpulimit stops and continues a process many times per second.
        stopped = state in ("T", "t") and watched.used_s == before
        if self._is_new(rank, watched.stopped, stopped, 0.0, now):
            self._say(
                f"rank {rank.rank} is stopped (SIGSTOP); the others wait for it. To continue, type: kill -CONT {rank.pid}"
            )
        if self._is_new(rank, watched.blocked, state == "D", _BLOCKED_S, now):
            self._say(
                f"rank {rank.rank} has been waiting in the kernel for {now - (watched.blocked.since or now):.0f} s (state D in "
                f"{processes.blocked_in(rank.pid) or 'the kernel'}): a disk, a network file system or a driver does not answer"
            )
        return stopped

    def _is_new(self, rank: Rank, held: _HeldStacks, holds: bool, after_s: float, now: float) -> bool:
        """Whether to report it now: once, at the first look after `after_s`. Reports itself when such a rank runs again."""
        if not holds:
            if held.told and held.since is not None:
                self._say(f"rank {rank.rank} runs again after {now - held.since:.0f} s")
            held.since, held.told = None, False
        elif held.since is None:
            held.since = now
        elif not held.told and now - held.since >= after_s:
            held.told = True
            return True
        return False

    def hurry(self) -> None:
        """All ranks were asked to stop: if there is no progress, the user should know soon."""
        if self._warn_s:
            self._warn_s = min(self._warn_s, _ASKED_S)

    # --- stacks

    def _sample(self, now: float) -> None:
        """One step of sampling: read the answers to the last request, then ask again or report."""
        if not self._sampling_since:
            self._sampling_since = now
            for rank in self._processes.alive:
                watched = self._watched[rank.rank]
                watched.stacks, watched.cpu_s = [], processes.cpu_s(rank.pid)
                watched.workers = watched.worker = None
                self._ask(rank, rank.pid)
            return
        are_asked = [self._is_asked_again(rank) for rank in self._processes.alive]
        if not any(are_asked):
            self._tell(now)

    def _is_asked_again(self, rank: Rank) -> bool:
        """Reads the answer to the last request. Returns whether there is another: to the rank, then to its loader workers, one
        at a time, because they write into the same file."""
        watched = self._watched[rank.rank]
        dump = self._read(rank, watched.offset)
        stack = parse(dump)
        if len(watched.stacks) < _SAMPLES:
            watched.stacks.append(stack)
            if len(watched.stacks) < _SAMPLES:
                return self._ask(rank, rank.pid)
        if watched.workers is None:
            thread = thread_of(dump) if waits_for_thread(stack) else ()
            watched.workers = processes.children(rank.pid)[:_MOST_WORKERS] if waits_for_workers((*stack, *thread)) else []
            watched.worker = _innermost(thread) if not watched.workers else None
        elif watched.worker is None:
            watched.worker = busy_at(stack)
        while watched.workers and watched.worker is None:
            pid = watched.workers.pop(0)
            if self._ask(rank, pid, f"Child process {pid}:\n"):
                return True
        return False

    def _ask(self, rank: Rank, pid: int, title: str = "") -> bool:
        """Ask for a stack. A rank that is still being started has no handler, and a spawned loader worker has none."""
        watched = self._watched[rank.rank]
        with contextlib.suppress(OSError), open(self._run.stacks(rank.rank), "a") as file:
            file.write(title)
        watched.offset = self._size(rank)
        return processes.send_if_handled(pid, STACK_SIGNAL) or pid == rank.pid

    def _tell(self, now: float) -> None:
        elapsed = now - self._sampling_since
        observed = [
            Observation(
                rank.rank,
                tuple(self._watched[rank.rank].stacks),
                (processes.cpu_s(rank.pid) - self._watched[rank.rank].cpu_s) / elapsed,
                tuple(processes.command(child) for child in processes.children(rank.pid)),
                self._processes.tells_steps,
                str(self._watched[rank.rank].worker or ""),
            )
            for rank in self._processes.alive
        ]
        stacks = "\n".join(f"# rank {r.rank}\n{self._read(r, 0)}" for r in self._processes.alive)
        self._stalled(now - self._moved, observed, stacks)
        self._sampling_since = 0.0
        self._warn_s *= 2  # report again later, but less and less often

    def _size(self, rank: Rank) -> int:
        try:
            return self._run.stacks(rank.rank).stat().st_size
        except OSError:
            return 0

    def _read(self, rank: Rank, offset: int) -> str:
        try:
            with open(self._run.stacks(rank.rank), errors="replace") as file:
                file.seek(offset, os.SEEK_SET)
                return unescaped(file.read())
        except OSError:
            return ""
