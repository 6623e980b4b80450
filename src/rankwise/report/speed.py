"""How fast runs train on different numbers of ranks: whether more of them helped, and where the rest of the time went.

speeds(run, run.read_metrics())    # of one run whose attempts had different numbers of ranks or nodes
since_change(run)                  # of its last attempt, compared with the last one of another size
compare(["one", "two"])            # of several runs
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rankwise.errors import RunDirError
from rankwise.host.text import count, listed, rounded, wrapped
from rankwise.report.table import table
from rankwise.run.directory import RunDir, find_run

Record = Mapping[str, Any]

_NOT_TRAINING = ("evaluation", "saving")
_COMPUTING = "computing"
_COMPUTING_TEXT = "computing (smaller batches per rank, shared cores; on GPUs, all-reduce too)"
_LEAST = 0.05  # a smaller part of the lost time is not reported, and a smaller loss needs no explanation


@dataclass(frozen=True)
class Speed:
    """What one run has trained on one number of ranks and nodes, without evaluation and saves."""

    run: str
    ranks: int
    nodes: int
    samples: float
    parts_s: Mapping[str, float]
    """The seconds of each part of the time, computing included."""

    @property
    def samples_per_s(self) -> float:
        return self.samples / sum(self.parts_s.values())

    def per_sample_s(self, part: str) -> float:
        """The time of ranks that one sample takes in this part."""
        return self.ranks * self.parts_s.get(part, 0.0) / self.samples

    def share(self, part: str) -> float:
        return self.parts_s.get(part, 0.0) / sum(self.parts_s.values())


def speeds(run: RunDir, records: Sequence[Record]) -> str:
    """Empty if the run has trained on one number of ranks only, or did not record its speed."""
    found = list(measured(run, records))
    return text(found, named=False) if len(found) > 1 else ""


def since_change(run: RunDir) -> list[str]:
    """A sentence in lines; none if no attempt before the last one had another number of ranks or nodes, or if a record cannot
    be read: this must not end a run that has trained."""
    with contextlib.suppress(RunDirError, OSError):
        sizes = list(_sizes(run).values())
        if others := [size for size in sizes if size != sizes[-1]]:
            found = {(speed.ranks, speed.nodes): speed for speed in measured(run, run.read_metrics())}
            if {sizes[-1], others[-1]} <= found.keys():
                return _sentence(found[others[-1]], found[sizes[-1]], named=False)
    return []


def compare(names: Sequence[str]) -> str:
    """Raises RunDirError if there is no run of this name, or if it has not recorded its speed."""
    found: list[Speed] = []
    for name in names:
        run = find_run(name, "report")
        of_run = list(measured(run, run.read_metrics()))
        if not of_run:
            raise RunDirError(
                f"{run.path} has no samples_per_s in its metrics.jsonl, which a Trainer records every 50 steps; to see what "
                f"this run did, give only its name"
            )
        found += of_run
    return text(found, named=True)


def _sizes(run: RunDir) -> dict[int, tuple[int, int]]:
    """The ranks and nodes of each attempt."""
    return {attempt.life: (attempt.ranks, max(len(attempt.parts), 1)) for attempt in run.attempts()}


def measured(run: RunDir, records: Sequence[Record]) -> Iterator[Speed]:
    """For each number of ranks and nodes that the attempts of this run had. The first interval of an attempt does not count,
    because it starts slowly, unless it is the only one."""
    had = _sizes(run)
    sums: dict[tuple[int, int], dict[str, float]] = {}
    for life, of_attempt in groupby(records, lambda record: record.get("life")):
        intervals = list(_intervals(of_attempt))
        if life in had:
            into = sums.setdefault(had[life], {})
            for interval in intervals[1:] or intervals:
                for name, value in interval.items():
                    into[name] = into.get(name, 0.0) + value
    for (ranks, nodes), parts in sums.items():
        samples = parts.pop("", 0.0)
        if samples > 0 and sum(parts.values()) > 0:
            yield Speed(run.path.name, ranks, nodes, samples, parts)


def _intervals(records: Iterable[Record]) -> Iterator[dict[str, float]]:
    """For each log interval of an attempt: the seconds of each part, and under "" the samples."""
    before = 0.0
    for record in records:
        now, rate = record.get("clock_s"), record.get("samples_per_s")
        if not (isinstance(now, int | float) and isinstance(rate, int | float)) or now <= before:
            continue
        seconds, before = now - before, now
        shares = {name.removeprefix("share/"): value for name, value in record.items() if name.startswith("share/")}
        parts = {name: value * seconds for name, value in shares.items() if isinstance(value, int | float)}
        computing = max(seconds - sum(parts.values()), 0.0)
        yield {
            "": rate * seconds, _COMPUTING: computing,
            **{name: value for name, value in parts.items() if name not in _NOT_TRAINING},
        }  # fmt: skip


def text(found: Sequence[Speed], named: bool) -> str:
    """A table, and a sentence for each row but the first, which has the fewest ranks. `named`: with the names of the runs."""
    base, *others = order = sorted(found, key=lambda speed: (speed.ranks, speed.nodes))
    rows = [["run"] * named + ["ranks", "nodes", "samples/s", "speed-up", "per rank", "all-reduce", "data wait"]]
    for speed in order:
        gain = speed.samples_per_s / base.samples_per_s
        numbers = [str(speed.ranks), str(speed.nodes), rounded(speed.samples_per_s, 4), f"{gain:.2f}"]
        shares = [gain * base.ranks / speed.ranks, speed.share("all-reduce"), speed.share("data wait")]
        rows.append([speed.run] * named + numbers + [f"{100 * share:.1f}%" for share in shares])
    return "\n".join([table(rows), *(line for speed in others for line in _sentence(base, speed, named))])


def _sentence(base: Speed, speed: Speed, named: bool) -> list[str]:
    """How fast it is compared with `base`, and, if it should be faster, which part of the time takes longer per sample."""
    gain, ideal = speed.samples_per_s / base.samples_per_s, speed.ranks / base.ranks
    here, there = (f"{_size(each)}{f' ({each.run})' * named}" for each in (speed, base))
    sentence = f"{here}: {gain:.2f} times as fast as {there}, ideal is {ideal:.3g}"
    if gain < (1 - _LEAST) * ideal:
        lost = {part: speed.per_sample_s(part) - base.per_sample_s(part) for part in {*base.parts_s, *speed.parts_s}}
        whole = sum(max(seconds, 0.0) for seconds in lost.values())
        order = sorted(((seconds / whole, part) for part, seconds in lost.items() if seconds >= _LEAST * whole), reverse=True)
        causes = listed(f"{100 * share:.0f}% {_COMPUTING_TEXT if part == _COMPUTING else part}" for share, part in order)
        sentence += f"; the lost time is {causes}"
    return wrapped(sentence)


def _size(speed: Speed) -> str:
    return f"{count(speed.ranks, 'rank')} on {count(speed.nodes, 'node')}"
