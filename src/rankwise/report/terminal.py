"""A report of what a run did, on one screen of text.

print_report(["train"])      # ./runs/train, or any folder
"""

from __future__ import annotations

import shlex
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rankwise.host.text import clock, rounded, stamp
from rankwise.report.speed import compare, speeds
from rankwise.report.table import table
from rankwise.run.directory import Attempt, RunDir, find_run

_MOMENTS = 10
_MOST_ATTEMPTS = 10
_MOST_CHECKPOINTS = 10
_COLUMNS = 80
_LEAST_ROOM = 20
_LARGE = 1e6  # numbers below it are written with all digits before the point


def print_report(runs: Sequence[str]) -> None:
    """Of one run; of several, how fast they were. Raises RunDirError if there is no run of that name, or if no name is given
    and there are several runs."""
    if len(runs) > 1:
        print(compare(runs))
    else:
        print(report(find_run(runs[0] if runs else None, "report"), shutil.get_terminal_size().columns))


def report(run: RunDir, columns: int = _COLUMNS) -> str:
    """The complete text. How an attempt ended is shortened to fit into `columns`, and the failure is broken between words."""
    attempts = run.attempts()
    sections = [f"run {run.path.name} in {run.path}", _attempts(run, attempts, columns)]
    figures = run.read_metrics()
    if figures:
        sections += [*_course(figures, columns), _time(figures)]
    if compared := speeds(run, figures):
        sections.append(compared)
    if saved := run.saved():
        many = f"{len(saved)}, from {saved[0]} to {saved[-1]}"
        sections.append(f"checkpoints: {', '.join(saved) if len(saved) <= _MOST_CHECKPOINTS else many}")
    failure = run.read_failure()
    if failure is not None:
        lines = textwrap.wrap(f"failed: {failure.summary}", columns, subsequent_indent="  ", break_long_words=False)
        sections.append("\n".join([*lines, f"its output: {failure.log}"]))
    return "\n\n".join(sections)


def _attempts(run: RunDir, attempts: Sequence[Attempt], columns: int) -> str:
    """The newest: a run that a queue interrupts each hour has hundreds."""
    rows = [["attempt", "started", "took", "ranks", "how it ended"]]
    for attempt in attempts[-_MOST_ATTEMPTS:]:
        began = stamp(attempt.started)
        took = clock(attempt.ended - attempt.started) if attempt.ended is not None else "-"
        rows.append(
            [str(attempt.life), began, took, str(attempt.ranks), attempt.outcome or _open_end(run, attempt, attempts[-1])]
        )
    if not attempts:
        return "no attempt yet"
    room = columns - sum(max(map(len, column)) + 2 for column in zip(*(row[:-1] for row in rows), strict=True))
    rows = [[*row[:-1], _shortened(row[-1], max(room, _LEAST_ROOM))] for row in rows]
    return f"{shlex.join(attempts[-1].argv)}\n\n{table(rows)}"


def _shortened(text: str, columns: int) -> str:
    """On one line of `columns`, with the end cut after a word: the beginning is more important."""
    return textwrap.shorten(text, columns, placeholder="...", break_on_hyphens=False)


def _open_end(run: RunDir, attempt: Attempt, newest: Attempt) -> str:
    """The outcome of an attempt without a recorded end: it runs, or was killed together with its agent."""
    holder = run.holder()
    alive = attempt is newest and holder is not None and not holder.is_gone()
    return f"running, pid {holder.pid} on {holder.host}" if alive and holder is not None else "killed, or its machine went down"


def _course(figures: Sequence[dict[str, Any]], columns: int) -> Iterator[str]:
    """The loss and other metrics at ten steps and the last one, and at steps with an evaluation. More metrics than fit side by
    side are in several tables."""
    names = [n for n in dict.fromkeys(k for f in figures for k in f) if not n.startswith("share/")]
    names = [n for n in names if n not in ("life", "step", "epoch", "clock_s")]
    steps: dict[int, dict[str, Any]] = {}
    for record in figures:  # a later attempt may repeat steps of one that was killed: the later one counts
        steps.setdefault(record["step"], {}).update(record)
    order = sorted(steps)
    shown = sorted({order[round(k * (len(order) - 1) / _MOMENTS)] for k in range(_MOMENTS + 1)} | _with_evaluation(steps))
    first = ["step", *map(str, shown)]
    block: list[list[str]] = []
    for name in names:
        column = [name, *(_figure(steps[step].get(name)) for step in shown)]
        if block and sum(max(map(len, each)) + 2 for each in (first, *block, column)) - 2 > columns:
            yield _side_by_side(first, *block)
            block = []
        block.append(column)
    if block:
        yield _side_by_side(first, *block)


def _side_by_side(*columns: Sequence[str]) -> str:
    return table(list(map(list, zip(*columns, strict=True))))


def _with_evaluation(steps: dict[int, dict[str, Any]]) -> set[int]:
    found = sorted(s for s, record in steps.items() if any(k.startswith("eval_") for k in record))
    return set(found if len(found) <= _MOMENTS else found[:: len(found) // _MOMENTS] + found[-1:])


def _figure(value: Any) -> str:
    if not isinstance(value, int | float):
        return "" if value is None else str(value)
    return rounded(value, 4) if 0 <= value < _LARGE else f"{value:.4g}"


def _time(figures: Sequence[dict[str, Any]]) -> str:
    """How the time was spent: the shares of each interval, weighted by its seconds."""
    total = 0.0
    parts: dict[str, float] = {}
    clocks: dict[str, float] = {}
    for record in figures:
        if not isinstance(record.get("clock_s"), int | float):
            continue
        attempt = str(record.get("life"))
        seconds = max(record["clock_s"] - clocks.get(attempt, 0.0), 0.0)
        clocks[attempt] = record["clock_s"]
        total += seconds
        for name, value in record.items():
            if name.startswith("share/") and isinstance(value, int | float):
                part = name.removeprefix("share/")
                parts[part] = parts.get(part, 0.0) + value * seconds
    if not total:
        return "no time was recorded"
    computing = max(total - sum(parts.values()), 0.0)
    rows = [["time", "share", ""]]
    for name, seconds in [("computing", computing), *sorted(parts.items(), key=lambda item: -item[1])]:
        rows.append([clock(seconds), f"{100 * seconds / total:.1f}%", name])
    return table(rows)
