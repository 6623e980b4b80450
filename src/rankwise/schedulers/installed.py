"""Schedulers of other packages: classes that the entry points of the group `rankwise.schedulers` name.

# pyproject.toml of such a package
[project.entry-points."rankwise.schedulers"]
spool = "rankwise_spool:Spool"

A scan of all installed metadata by importlib takes 50 to 70 ms, in each process. Here a file in which the group is not named is
not parsed: that takes a tenth of it.
"""

from __future__ import annotations

import os
import sys
from functools import cache

from rankwise.errors import ConfigError
from rankwise.schedulers.protocols import Scheduler

GROUP = "rankwise.schedulers"


@cache
def _found() -> tuple[tuple[Scheduler, str], ...]:
    found: dict[str, tuple[Scheduler, str]] = {}
    for path in _metadata():
        from importlib.metadata import PathDistribution  # it takes its time, and is for few
        from pathlib import Path

        distribution = PathDistribution(Path(path))
        package = distribution.metadata["Name"]
        for point in distribution.entry_points.select(group=GROUP):
            try:
                scheduler = point.load()()
            except Exception as error:
                raise ConfigError(
                    f"the scheduler {point.name} of the package {package} cannot be loaded: {type(error).__name__}: {error}; "
                    f"repair it, or type: pip uninstall {package}"
                ) from error
            if not isinstance(scheduler, Scheduler) or scheduler.name != point.name:
                raise ConfigError(
                    f"the entry point {point.name} of the package {package} is {point.value}, which is not a scheduler of "
                    "that name: it must be a class of rankwise.schedulers.protocols, and its `name` that of the entry point"
                )
            before = found.setdefault(point.name, (scheduler, package))
            if before[1] != package:
                raise ConfigError(
                    f"two packages have a scheduler {point.name}: {before[1]} and {package}; uninstall one of them"
                )
    return tuple(found.values())


def schedulers() -> tuple[Scheduler, ...]:
    """One of each. Raises ConfigError for one that cannot be loaded, and for two of one name."""
    return tuple(scheduler for scheduler, _ in _found())


def packages() -> dict[str, str]:
    """By scheduler, the package that it is of."""
    return {scheduler.name: package for scheduler, package in _found()}


def _metadata() -> list[str]:
    """The folders of metadata, where the group is named."""
    found, seen = [], set()
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")) and name not in seen:  # as importlib: the first on the path counts
                seen.add(name)
                try:
                    with open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                        if GROUP.encode() in file.read():
                            found.append(os.path.join(folder, name))
                except OSError:
                    pass
    return found
