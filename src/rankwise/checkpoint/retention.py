"""Which checkpoints stay: the last few, the best, the young, and those of named steps; the rest may go.

keep = Retention(last=2, younger_than_s=86400.0, steps=frozenset({1000}))
keep.gone({path: age_s, ...})                        # pure: the oldest first in, what may go out
prunable(folder, keep_last=2, older_than="7d")       # of a folder: reads what is to stay, so that something whole does
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.best import Best, best_by
from rankwise.checkpoint.folders import checkpoints_in, order, pick, remove
from rankwise.checkpoint.manifest import Manifest, saved_at
from rankwise.errors import CheckpointError, ConfigError
from rankwise.host.terminal import seconds_of


@dataclass(frozen=True)
class Retention:
    """What stays for one reason stays, whatever the others say."""

    last: int
    younger_than_s: float = 0.0
    steps: frozenset[int] = frozenset()

    @classmethod
    def of(cls, last: int, younger_than_s: float | None = None, steps: Collection[int] = ()) -> Retention:
        """Raises ConfigError for what cannot be."""
        if last < 1:
            raise ConfigError(f"keep_last={last}: at least one checkpoint must stay")
        if younger_than_s is not None and not younger_than_s > 0:
            raise ConfigError(f"keep_younger_than_s={younger_than_s}: give seconds, more than 0")
        for step in steps:
            if not isinstance(step, int) or step < 0:
                raise ConfigError(f"keep_steps={list(steps)}: {step!r} is no step")
        return cls(last, younger_than_s or 0.0, frozenset(steps))

    def gone(self, ages_s: Mapping[Path, float], best: Collection[Path] = ()) -> list[Path]:
        """Those that need not stay, of checkpoints with their ages, the oldest step first."""
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


def age_s(text: str) -> float:
    """Seconds of `90s`, `30m`, `12h`, `7d`, `2w`. Raises ConfigError for anything else."""
    if (found := seconds_of(text)) is None:
        raise ConfigError(f"--older-than {text!r} is no age; type a number and a unit: 90s, 30m, 12h, 7d, 2w")
    return found


def prunable(
    folder: Path,
    keep_last: int | None = None,
    keep_best: int | None = None,
    by: Best | None = None,
    older_than: str | None = None,
    keep: Sequence[str] = (),
) -> list[Path]:
    """What may go, the oldest first: all but the last whole ones (at least one), the best ones, those named, those younger.

    Reads every byte of the newest, until as many whole ones are found as are to stay. What is damaged does not count; where it
    is newer than all that is whole it is left to its owner. Raises ConfigError when no rule is given, or one cannot be.
    """
    for option, n in (("--keep-last", keep_last), ("--keep-best", keep_best)):
        if n is not None and n < 1:
            raise ConfigError(f"{option} {n}: give a whole number from 1 up")
    if not (keep_last or keep_best or older_than is not None or keep):
        raise ConfigError("what should stay? Type for example --keep-last 2, --keep-best 1, --older-than 7d, --keep 400")
    older_than_s = age_s(older_than) if older_than is not None else 0.0
    paths = checkpoints_in(folder)
    named = {pick(folder, name, "--keep") for name in keep}
    whole = _first_whole(reversed(paths), keep_last or 1)
    if not whole:
        raise CheckpointError(f"no checkpoint in {folder} is whole, so none is removed")
    older = [path for path in paths if order(path) < order(whole[0])]
    kept = {*whole, *named}
    if keep_best is not None:
        found = {path: manifest for path in paths if (manifest := _read(path)) is not None}
        by = by or best_by(list(found.values()))
        kept.update(_first_whole(by.order({path: each.metrics for path, each in found.items()}), keep_best))
    now = time.time()
    return [path for path in older if path not in kept and now - saved_at(path) >= older_than_s]


def removed(path: Path) -> str:
    """Remove it, and say so."""
    if not remove(path):
        raise CheckpointError(f"{path} cannot be removed")
    return f"removed {path}"


def _first_whole(paths: Iterable[Path], n: int) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if len(found) == n:
            break
        with contextlib.suppress(CheckpointError):  # damaged, or gone by now
            manifests.verify(path)
            found.append(path)
    return found


def _read(path: Path) -> Manifest | None:
    try:
        return Manifest.read(path)
    except CheckpointError:
        return None
