"""Who am I among the ranks. `discover` asks the schedulers in order and writes nothing.

world = discover(os.environ);  print(world.rank, world.world_size, world.source)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rankwise import schedulers
from rankwise.page import Page, Row
from rankwise.rundir import ENV_RUN_DIR, RunDir


@dataclass(frozen=True)
class World:
    """This process among the ranks. `is_main` is rank 0, `is_local_main` the first rank of its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    source: str
    """The scheduler whose variables said so."""

    master_addr: str | None = None
    master_port: int | None = None
    run_dir: Path | None = None
    """The run directory that rankwise's launcher made; None when something else started this process."""

    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0


def discover(env: Mapping[str, str]) -> World:
    """The first scheduler that `env` speaks of decides. Raises WorldError where it speaks half."""
    name, scheduler = next((name, module) for name, module in schedulers.ORDER.items() if module.detect(env))
    ranks = scheduler.ranks(env)
    run_dir = env.get(ENV_RUN_DIR)
    return World(
        rank=ranks.rank,
        world_size=ranks.world_size,
        local_rank=ranks.local_rank,
        local_world_size=ranks.local_world_size,
        node_rank=ranks.node_rank,
        source=name,
        master_addr=ranks.master_addr,
        master_port=ranks.master_port,
        run_dir=Path(run_dir) if run_dir is not None else None,
        origin=ranks.origin,
    )


def agent_row(world: World) -> Row | None:
    """This rank's row in the page that its agent shares with it; None when no living agent of ours started it."""
    if world.run_dir is None:
        return None
    try:
        return Page.open(RunDir(world.run_dir).lives()[-1].page).row(world.local_rank)
    except (OSError, IndexError):
        return None
