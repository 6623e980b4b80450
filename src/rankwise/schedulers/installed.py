"""Schedulers of other packages: the classes in their entry points of the group `rankwise.schedulers`.

# pyproject.toml of such a package
[project.entry-points."rankwise.schedulers"]
spool = "rankwise_spool:Spool"

importlib takes 50 to 70 ms to scan all installed metadata, in each process. This module parses only files that contain the name
of the group: that takes a tenth of the time.
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
        from importlib.metadata import PathDistribution  # slow to import, and rarely needed
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
    """One object per scheduler. Raises ConfigError if one cannot be loaded, or if two have the same name."""
    return tuple(scheduler for scheduler, _ in _found())


def packages() -> dict[str, str]:
    """By scheduler, the package that provides it."""
    return {scheduler.name: package for scheduler, package in _found()}


def _metadata() -> list[str]:
    """The metadata folders of the packages that name the group."""
    found, seen = [], set()
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")) and name not in seen:  # as in importlib: the first on the path counts
                seen.add(name)
                try:
                    with open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                        if GROUP.encode() in file.read():
                            found.append(os.path.join(folder, name))
                except OSError:
                    pass
    return found
