"""Why the ranks of any script are slow: data that comes late, and too few processors.

    clock = RankTimes(processes, page)               # on each node;  times = clock.look() every tick
    line = SlowRanks().look(times_of_all_nodes, hosts, time.monotonic())     # at the head; None: nothing to print

A Trainer knows more of its own time (telemetry/slowness.py): of its ranks, only the processors are looked at here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from rankwise.agent.rank_processes import RankProcesses
from rankwise.host import machine, processes
from rankwise.host.text import count
from rankwise.ipc.shared_page import Page
from rankwise.telemetry.slowness import MOSTLY, Found, Reports, Spent, late_data, named

_EVERY_S = 5.0
_LOOK_EVERY_S = 1.0
_WINDOW_S = 10.0
_LONGEST_WINDOW_S = 60.0
_FEW_BATCHES = 3
"""Windows with fewer batches become longer: a wait is known only when its batch has come."""

_STARTING = 0.15
"""Of the time, if the ranks wait for it."""

_FULL = 0.85
"""Of the time of all cores."""


class RankTime(NamedTuple):
    """What one rank has done since it started."""

    batches: int
    """From torch's DataLoader, or ours."""

    data_wait_s: float
    collectives: int
    explains: bool
    """Whether it reports itself why it is slow."""

    used_s: float
    """The processor time of its threads and of its children."""

    queued_s: float
    """How long its main thread has waited for a processor."""

    epoch_wait_s: float
    """How much of the wait for data was at the start and the end of epochs."""


class NodeTimes(NamedTuple):
    at_s: float
    """By the clock of this node."""

    cores: int
    first: int
    """The lowest rank here."""

    loader_workers: int
    ranks: tuple[RankTime, ...]

    @classmethod
    def of(cls, record: list[Any]) -> NodeTimes:
        """From a message of another agent."""
        at_s, cores, first, loader_workers, ranks = record
        return cls(at_s, cores, first, loader_workers, tuple(RankTime(*rank) for rank in ranks))


class RankTimes:
    """Reads the times of the ranks of this node."""

    def __init__(self, ranks: RankProcesses, page: Page) -> None:
        self._ranks = ranks
        self._page = page
        self._cores = machine.cores()
        self._next = 0.0
        self._times: NodeTimes | None = None

    def look(self) -> NodeTimes | None:
        """Call it on each tick; it reads /proc every few seconds. None before the first time."""
        now = time.monotonic()
        if now >= self._next and self._ranks.started:
            self._next = now + _EVERY_S
            rows = [self._page.row(i) for i in range(len(self._ranks.ranks))]
            times = (
                RankTime(
                    row.batches, row.data_wait_s, row.collectives, row.explains,
                    processes.used_s(rank.pid), processes.queued_s(rank.pid), row.epoch_wait_s,
                )
                for rank, row in zip(self._ranks.ranks, rows, strict=True)
            )  # fmt: skip
            workers = max(row.loader_workers for row in rows)
            self._times = NodeTimes(now, self._cores, self._ranks.ranks[0].rank, workers, tuple(times))
        return self._times


class _Window(NamedTuple):
    """What one rank did between two looks."""

    elapsed_s: float
    batches: int
    data_wait_s: float
    meets: bool
    """Whether it has met the other ranks in a collective."""

    used_s: float
    queued_s: float
    epoch_wait_s: float


class SlowRanks:
    """Compares what all ranks did in the last seconds, at the head."""

    def __init__(self) -> None:
        self._next = 0.0
        self._before: Sequence[NodeTimes] | None = None
        self._windows = 0
        self._reports = Reports()

    def look(self, nodes: Sequence[NodeTimes | None], hosts: Sequence[str], now: float) -> str | None:
        """What to print; call it on each tick. `hosts`: of each node. The first window is ignored: a script starts slowly."""
        if now < self._next:
            return None
        self._next = now + _LOOK_EVERY_S
        times = [node for node in nodes if node is not None]
        if len(times) < len(nodes):
            return None
        if self._before is None or _others(self._before, times):
            self._before = times
            return None
        windows = [_windows(a, b) for a, b in zip(self._before, times, strict=True)]
        elapsed_s = min(ranks[0].elapsed_s for ranks in windows)
        few = any(0 < rank.batches < _FEW_BATCHES for ranks in windows for rank in ranks)
        if elapsed_s < _WINDOW_S or (few and elapsed_s < _LONGEST_WINDOW_S):
            return None
        self._before = times
        self._windows += 1
        if self._windows == 1:
            return None
        several = len(set(hosts)) > 1
        of_each = [host for host, node in zip(hosts, times, strict=True) for _ in node.ranks] if several else []
        found = _late(windows, of_each) or _queued(times, windows, of_each) or _starts(times, windows)
        found = found or _waits_for_data(times, windows)
        return self._reports.line(found, now)


def _others(before: Sequence[NodeTimes], now: Sequence[NodeTimes]) -> bool:
    """Whether these are other ranks than before: the ranks were started again."""
    return [(node.first, len(node.ranks)) for node in before] != [(node.first, len(node.ranks)) for node in now]


def _windows(before: NodeTimes, now: NodeTimes) -> list[_Window]:
    return [
        _Window(
            now.at_s - before.at_s, b.batches - a.batches if not b.explains else 0, b.data_wait_s - a.data_wait_s,
            b.collectives > a.collectives, max(b.used_s - a.used_s, 0.0), max(b.queued_s - a.queued_s, 0.0),
            b.epoch_wait_s - a.epoch_wait_s,
        )
        for a, b in zip(before.ranks, now.ranks, strict=True)
    ]  # fmt: skip


def _late(windows: Sequence[Sequence[_Window]], hosts: Sequence[str]) -> Found | None:
    """The ranks whose data is late, if the ranks wait for each other."""
    ranks = list(chain.from_iterable(windows))
    if not all(rank.batches and rank.meets for rank in ranks):
        return None
    return late_data([Spent(rank.elapsed_s, {"data wait": rank.data_wait_s}, 0.0) for rank in ranks], hosts)


def _queued(nodes: Sequence[NodeTimes], windows: Sequence[Sequence[_Window]], hosts: Sequence[str]) -> Found | None:
    """The nodes whose ranks wait for processors. If there are more ranks than cores, the launcher has said so."""
    for node, ranks in zip(nodes, windows, strict=True):
        share = sum(rank.queued_s / rank.elapsed_s for rank in ranks) / len(ranks)
        if share >= MOSTLY and len(ranks) <= node.cores:
            who = named(range(node.first, node.first + len(ranks)), hosts)
            wait = "waits" if len(ranks) == 1 else "wait"
            return f"queued {node.first}", (
                f"{who} {wait} {share:.0%} of the time for a processor: their threads, loader workers and other programs need "
                f"more than the {count(node.cores, 'core')} here; use fewer loader workers or threads (--threads), or ask for "
                "more cores"
            )
    return None


def _starts(nodes: Sequence[NodeTimes], windows: Sequence[Sequence[_Window]]) -> Found | None:
    """That loader workers start again in each epoch, and epochs are short. A Trainer does not measure this itself."""
    ranks = list(chain.from_iterable(windows))
    share = sum(rank.epoch_wait_s / rank.elapsed_s for rank in ranks) / len(ranks)
    workers = max(node.loader_workers for node in nodes)
    if share < _STARTING or not workers:
        return None
    return "starts", (
        f"{min(share, 1.0):.0%} of the time loader workers start and end ({workers} in each epoch); give "
        "persistent_workers=True to the DataLoader or Loader, then they stay"
    )


def _waits_for_data(nodes: Sequence[NodeTimes], windows: Sequence[Sequence[_Window]]) -> Found | None:
    """That all ranks wait for data, and what helps."""
    reading = [rank for rank in chain.from_iterable(windows) if rank.batches]
    if not reading:
        return None
    share = sum(rank.data_wait_s / rank.elapsed_s for rank in reading) / len(reading)
    if share < MOSTLY:
        return None
    full = [
        node for node, ranks in zip(nodes, windows, strict=True)
        if sum(rank.used_s for rank in ranks) >= _FULL * node.cores * ranks[0].elapsed_s
    ]  # fmt: skip
    workers = max(node.loader_workers for node in nodes)
    if full:
        helps = f"the ranks and their loader workers use all {full[0].cores} cores; make the samples cheaper to read"
    else:
        helps = f"raise num_workers (now {workers}), or make the samples cheaper to read"
    return "data", f"{min(share, 1.0):.0%} of the time is data wait: {helps}"
