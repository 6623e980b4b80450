"""What all benchmarks share: rounds in which the ways take turns, ratios of pairs, and the spread of numbers.

found = rounds({"torchrun": lambda turn: theirs(), "rankwise": lambda turn: ours()}, 9)
print(spread(ratios(found["rankwise"], found["torchrun"])))          0.62 (0.58 .. 0.71)
"""

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import TypeVar

__all__ = ["cpu_s", "median", "p10", "p90", "ratios", "rounds", "spread"]

Figure = TypeVar("Figure")


def rounds(
    ways: Mapping[str, Callable[[int], Figure]], count: int, warm: int = 0, rotate: bool = False
) -> dict[str, list[Figure]]:
    """What each way returned in each of `count` rounds. They take turns, so that a busy machine is busy for all ways.

    Each round calls each way once with the number of the round, in the order of `ways`; with `rotate`, each round starts with
    the next way. The first `warm` rounds also run, but are not counted.
    """
    names = list(ways)
    found: dict[str, list[Figure]] = {name: [] for name in names}
    for turn in range(warm + count):
        first = turn % len(names) if rotate else 0
        for name in names[first:] + names[:first]:
            figure = ways[name](turn)
            if turn >= warm:
                found[name].append(figure)
    return found


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> list[float]:
    """The ratio of the two numbers of each round. Raises ValueError if there are not equally many."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def spread(figures: Iterable[float], digits: int = 2, unit: str = "") -> str:
    """The median, the smallest and the largest: `1.02 (0.98 .. 1.10)`. The unit follows the median."""
    figures = list(figures)
    return f"{median(figures):.{digits}f}{unit} ({min(figures):.{digits}f} .. {max(figures):.{digits}f})"


def p10(figures: Iterable[float]) -> float:
    """The value that a tenth of the numbers are below; at least two numbers."""
    return statistics.quantiles(figures, n=10)[0]


def p90(figures: Iterable[float]) -> float:
    """The value that a tenth of the numbers are above; at least two numbers."""
    return statistics.quantiles(figures, n=10)[-1]


def cpu_s() -> float:
    """CPU seconds of this process and its children, including those that have exited."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    clocks = [(~child.pid << 3) | 2 for child in multiprocessing.active_children()]  # clock_getcpuclockid(3)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(time.clock_gettime, clocks))
