"""torchrun's variables: its contract with scripts, which rankwise's agent keeps too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rankwise.errors import WorldError
from rankwise.schedulers.protocols import Launcher
from rankwise.schedulers.ranks import Ranks, Tasks, whole_number

_TRIPLE = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


class Torchrun(Launcher):
    name = "torchrun"
    variables = (*_TRIPLE, "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
    needs = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    has_store = True

    def __init__(self, starters: Callable[[], Iterable[Launcher]]) -> None:
        """`starters`: returns the launchers that start one process per task and may give no address, the innermost first."""
        self._starters = starters

    def detect(self, env: Mapping[str, str]) -> bool:
        """True if any of the three variables is set; if only some are, `ranks` raises an error. MASTER_ADDR alone does not
        count if another launcher, which gives no address, has set the ranks: the address belongs to those."""
        return "RANK" in env or "WORLD_SIZE" in env or ("MASTER_ADDR" in env and self._started(env) is None)

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Raises WorldError if only some of the variables are set, if a value is not a number, if a rank is not below the world
        size, or if a batch script has exported them, so that all tasks have the same rank."""
        missing = [name for name in (*_TRIPLE, "MASTER_PORT") if name not in env]
        if missing:
            found = ", ".join(f"{name}={env[name]}" for name in _TRIPLE if name in env)
            raise WorldError(
                f"{found} but not {', '.join(missing)}: with only some of them this process would train alone; set all, or "
                "unset all, or use a launcher: rankwise run script.py"
            )
        world_size = whole_number(env, "WORLD_SIZE")
        rank = whole_number(env, "RANK")
        origin = {"rank": "RANK", "world_size": "WORLD_SIZE", "master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}

        def optional(field: str, name: str, default: int, instead: str) -> int:
            origin[field] = name if name in env else f"{instead}, as {name} is not set"
            return whole_number(env, name) if name in env else default

        claimed = Ranks(
            rank=rank,
            world_size=world_size,
            local_rank=optional("local_rank", "LOCAL_RANK", rank, "RANK"),
            local_world_size=optional("local_world_size", "LOCAL_WORLD_SIZE", world_size, "WORLD_SIZE"),
            node_rank=optional("node_rank", "GROUP_RANK", 0, "0"),
            master_addr=env["MASTER_ADDR"],
            master_port=whole_number(env, "MASTER_PORT"),
            origin=origin,
        )
        self._check_not_exported(env, claimed)
        return claimed

    def _started(self, env: Mapping[str, str]) -> Tasks | None:
        """The tasks of the innermost launcher that started this process."""
        return next((tasks for starter in self._starters() if (tasks := starter.tasks(env)) is not None), None)

    def _check_not_exported(self, env: Mapping[str, str], ranks: Ranks) -> None:
        """Raises WorldError if the tasks of a launcher cannot each have their own RANK and WORLD_SIZE.

        With one rank per task, world size and rank are those of the tasks. With one agent per task, the world size is tasks x
        local world size.
        """
        tasks = self._started(env)
        if tasks is None or tasks.count == 1 or "TORCHELASTIC_RUN_ID" in env:  # an agent sets this one for each of its ranks
            return
        if ranks.world_size == tasks.count:
            fits = ranks.rank == tasks.index
        elif "LOCAL_WORLD_SIZE" in env:
            fits = ranks.world_size == tasks.count * ranks.local_world_size
        else:
            fits = "LOCAL_RANK" in env and ranks.world_size % tasks.count == 0
        if not fits:
            raise WorldError(
                f"RANK={ranks.rank} and WORLD_SIZE={ranks.world_size}, but {tasks.found}: the batch script exports them, so "
                "all tasks have the same rank; remove them there (unset RANK WORLD_SIZE), and each task gets its own from "
                "its launcher; MASTER_ADDR and MASTER_PORT may stay"
            )
