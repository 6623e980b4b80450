"""Which checkpoints are kept: the last few, the best, the young, and those of named steps. The rest may be removed.

    keep = Retention(last=2, younger_than_s=86400.0, steps=frozenset({1000}))
    keep.find_gone({path: age_s, ...}, best=[path])      # pure: the oldest first; returns those that may be removed
    best = Best.of("eval_accuracy", larger_is_better=True)
    best.order({folder: manifest.metrics, ...})          # the best first

The best is decided by one metric that was measured at the save, and by a direction.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rankwise.checkpoint.folders import order
from rankwise.checkpoint.manifest import Manifest
from rankwise.errors import ConfigError
from rankwise.training.metric import is_larger_better

T = TypeVar("T")


@dataclass(frozen=True)
class Retention:
    """The rules. A checkpoint is kept if at least one rule keeps it."""

    last: int
    younger_than_s: float = 0.0
    steps: frozenset[int] = frozenset()

    def find_gone(self, ages_s: Mapping[Path, float], best: Collection[Path] = ()) -> list[Path]:
        """The checkpoints that may be removed. `ages_s`: all checkpoints with their ages, the oldest step first."""
        paths = list(ages_s)
        late = set(paths[len(paths) - self.last :] if self.last < len(paths) else paths)
        return [
            path
            for path in paths
            if path not in late
            and path not in best
            and ages_s[path] >= self.younger_than_s
            and order(path)[0] not in self.steps
        ]


# --- the best


@dataclass(frozen=True)
class Best:
    """The metric by which checkpoints are compared."""

    name: str
    larger_is_better: bool

    @classmethod
    def of(cls, name: str | None, larger_is_better: bool | None) -> Best | None:
        """None without a name. The direction is known only for a loss, and a wrong guess would keep the worst."""
        if name is None:
            if larger_is_better is not None:
                raise ConfigError(f"larger_is_better={larger_is_better} needs keep_best, the name of a metric")
            return None
        return cls(name, is_larger_better(f"keep_best={name!r}", name, larger_is_better))

    def rank(self, metrics: Mapping[str, float | None]) -> float | None:
        """The metric, with a sign such that less is better. None if it was not measured or is not finite: such a checkpoint is
        never the best."""
        value = metrics.get(self.name)
        if value is None or not math.isfinite(value):
            return None
        return -value if self.larger_is_better else value

    def order(self, measured: Mapping[T, Mapping[str, float | None]]) -> list[T]:
        """Those that have the metric, the best first; equal ones remain in the given order."""
        ranks = {key: rank for key, metrics in measured.items() if (rank := self.rank(metrics)) is not None}
        return sorted(ranks, key=ranks.__getitem__)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raises ConfigError if the metric is not among `metrics`."""
        if self.name not in metrics:
            there = ", ".join(sorted(metrics)) or "none"
            raise ConfigError(f"keep_best={self.name!r}: no such metric; the metrics are: {there}")


def find_best_figure(manifests: Sequence[Manifest], by: str | None = None, larger_is_better: bool | None = None) -> Best:
    """The metric `by` (--by); without it, the metric by which the newest of these runs kept its best. Raises ConfigError if
    there is no such metric, or its direction is neither given nor known."""
    figures = dict.fromkeys(name for manifest in manifests for name in manifest.metrics)
    if by is None and larger_is_better is not None:
        raise ConfigError("--larger-is-better and --less-is-better need --by NAME, the metric that decides which is the best")
    if by is not None and by not in figures:
        raise ConfigError(f"--by {by}: no such metric; the metrics are: {', '.join(figures) or 'none'}")
    for manifest in reversed(manifests):
        if manifest.best and larger_is_better is None and by in (None, manifest.best["name"]):
            return Best(**manifest.best)
    if by is not None:
        return Best(by, is_larger_better(f"--by {by}", by, larger_is_better, "Type --larger-is-better or --less-is-better"))
    raise ConfigError(
        "which metric decides which checkpoint is the best? The run had no keep_best; type --by NAME; the metrics are: "
        f"{', '.join(figures) or 'none'}"
    )


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no values that are not finite: None instead. Raises ConfigError for what is not a number."""
    try:
        return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"save(metrics={dict(metrics)!r}): give a number for each metric ({error})") from None
