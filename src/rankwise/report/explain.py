"""Explains which rank a process is: as text for a person, as a record for a program.

print(as_text(world.explain(os.environ)))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankwise.dist.world import Explanation, NotTaken, World
from rankwise.schedulers.ranks import shown

_NUMBERS = ("rank", "local_rank", "world_size", "local_world_size", "node_rank", "master_addr", "master_port")
_LONGEST = 60
"""The most characters of a variable's value: SLURM_GTIDS of a large node would fill the screen."""


def as_text(told: Explanation) -> str:
    """The complete text: the ranks, where each number comes from, what a person should know, and what was not used.

    Does not contain the message of an error, which the caller prints, but what was found and was not enough.
    """
    if told.world is not None:
        sections = [f"{_headline(told.world)} (source: {told.source})", _numbers(told.world)]
        if told.world.note is not None:
            sections.append(f"note: {told.world.note}")
    else:
        sections = [f"the rank is not known (source: {told.source})"]
        if told.found:
            sections.append("found\n" + _lines([(name, _short(value)) for name, value in told.found.items()]))
    sections.append("not taken\n" + _lines([(other.scheduler, _reason(other)) for other in told.not_taken]))
    return "\n\n".join(sections)


def as_record(told: Explanation) -> dict[str, Any]:
    """The same for a program. Numbers are null if there is an error, or if a number is not known."""
    world = told.world
    return {
        **{name: getattr(world, name, None) for name in _NUMBERS},
        "source": told.source,
        "run_dir": str(world.run_dir) if world is not None and world.run_dir is not None else None,
        "origin": dict(world.origin) if world is not None else {},
        "note": world.note if world is not None else None,
        "error": str(told.error) if told.error is not None else None,
        "found": dict(told.found),
        "not_taken": [{"scheduler": other.scheduler, "found": dict(other.found), "why": other.why} for other in told.not_taken],
    }


def _headline(world: World) -> str:
    if world.world_size == 1:
        return "a single process: rank 0 of 1"
    node = f"node {world.node_rank}" if world.node_rank is not None else "node not known"
    return f"rank {world.rank} of {world.world_size}: local rank {world.local_rank} of {world.local_world_size}, {node}"


def _numbers(world: World) -> str:
    rows = [("", "", "from which variable")]
    for name in _NUMBERS:
        value = getattr(world, name)
        if value is not None or name in world.origin:
            label = name.replace("_", " ").replace("addr", "address")
            rows.append((label, "unknown" if value is None else str(value), world.origin.get(name, "")))
    return _lines(rows)


def _reason(other: NotTaken) -> str:
    found = shown(_shortened(other.found), other.found)
    return f"{found}: {other.why}" if found else other.why


def _shortened(found: Mapping[str, str]) -> dict[str, str]:
    return {name: _short(value) for name, value in found.items()}


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."


def _lines(rows: Sequence[Sequence[str]]) -> str:
    """Columns, each as wide as its widest cell, indented by two."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
