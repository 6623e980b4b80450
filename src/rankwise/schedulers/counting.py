"""Launchers that give each rank only four numbers: its rank, the number of ranks, and both within its node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rankwise.schedulers.protocols import Launcher
from rankwise.schedulers.ranks import Ranks, Tasks, counted, tasks_of


class Counting(Launcher):
    """`variables` are the four, in this order: rank, size, local rank, local size."""

    called: ClassVar[str]
    """Its name for people, in errors: "Open MPI"."""

    def detect(self, env: Mapping[str, str]) -> bool:
        """True if a rank or a size is set. If only some of the variables are set, `ranks` raises an error that explains it."""
        return any(name in env for name in self.variables[:2])

    def tasks(self, env: Mapping[str, str]) -> Tasks | None:
        rank, size, *_ = self.variables
        return tasks_of(env, rank, size) if self.detect(env) else None

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Raises WorldError if only some of the variables are set, if a value is not a number, or if a rank is not below its
        size."""
        return counted(env, self.variables, self.called)
