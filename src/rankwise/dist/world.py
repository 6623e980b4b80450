"""Which rank this process is. `discover` asks the schedulers in order and writes nothing; `explain` says why.

world = discover(os.environ);  print(world.rank, world.world_size, world.source)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, Unpack

from rankwise import schedulers
from rankwise.errors import NotJoinedError, WorldError
from rankwise.ipc.shared_page import Page, Row
from rankwise.run.directory import ENV_RUN_DIR, Attempt, NodeRecord, RunDir
from rankwise.schedulers import Launcher
from rankwise.schedulers.ranks import Ranks, shown, single

ARGUMENTS = "arguments"
"""The source of a World from arguments."""


class Given(TypedDict, total=False):
    """The numbers of a World as arguments: give all four; give the host and port of rank 0 both or not at all. None means not
    given."""

    rank: int | None
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    master_addr: str | None
    master_port: int | None


@dataclass(frozen=True)
class World:
    """This process among the ranks. `is_main` is rank 0, `is_local_main` the first rank of its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int | None
    """None if the launcher does not give it (Open MPI and MPICH on several nodes)."""

    source: str
    """The scheduler whose variables were used, or "arguments"."""

    master_addr: str | None = None
    master_port: int | None = None
    run_dir: Path | None = None
    """The run directory of rankwise's launcher; None if something else started this process."""

    origin: Mapping[str, str] = field(default_factory=dict)
    note: str | None = None
    """What the user should know about this choice; None if the numbers are enough."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    @classmethod
    def discover(cls, env: Mapping[str, str], *, allow_independent: bool = False, **given: Unpack[Given]) -> World:
        """The same as `discover`."""
        return discover(env, allow_independent=allow_independent, **given)


@dataclass(frozen=True)
class NotTaken:
    """A scheduler that was not used."""

    scheduler: str
    found: Mapping[str, str]
    """Those of its variables that are set."""

    why: str


@dataclass(frozen=True)
class Explanation:
    """Which rank a process is, or why this is not known, with the evidence."""

    source: str
    """The scheduler that was used, or "arguments"."""

    found: Mapping[str, str]
    """Those of its variables that are set."""

    outcome: World | WorldError
    not_taken: tuple[NotTaken, ...]
    """Every other scheduler, in the order in which they are asked."""

    @property
    def world(self) -> World | None:
        return self.outcome if isinstance(self.outcome, World) else None

    @property
    def error(self) -> WorldError | None:
        return self.outcome if isinstance(self.outcome, WorldError) else None


def discover(env: Mapping[str, str], *, allow_independent: bool = False, **given: Unpack[Given]) -> World:
    """The World of a process with this environment. The first scheduler that recognises its variables in `env` decides.

    Arguments have precedence over all schedulers. Raises WorldError if `env` or the arguments are incomplete. Raises
    NotJoinedError, unless `allow_independent`, if this is one of several processes and nothing connects them: each would train
    alone.
    """
    outcome = explain(env, allow_independent=allow_independent, **given).outcome
    if isinstance(outcome, WorldError):
        raise outcome
    return outcome


def explain(env: Mapping[str, str], *, allow_independent: bool = False, **given: Unpack[Given]) -> Explanation:
    """What `discover` returns or raises for the same arguments, and why. Pure. Raises only ConfigError, if the scheduler of a
    package cannot be loaded."""
    by_hand = any(value is not None for value in given.values())
    launchers = schedulers.launchers(env)
    claims = [name for name, launcher in launchers.items() if launcher.detect(env)]
    source = ARGUMENTS if by_hand else claims[0]

    def asked() -> Ranks:
        return _from_arguments(given) if by_hand else launchers[source].ranks(env)

    return Explanation(
        source=source,
        found={} if by_hand else _found(launchers[source], env),
        outcome=_outcome(asked, source, env, allow_independent),
        not_taken=tuple(
            NotTaken(name, _found(launcher, env), _why_not(launcher, env, source if name in claims else None))
            for name, launcher in launchers.items()
            if name != source
        ),
    )


def _outcome(asked: Callable[[], Ranks], source: str, env: Mapping[str, str], allow_independent: bool) -> World | WorldError:
    try:
        ranks = asked()
    except NotJoinedError as error:
        if not allow_independent:
            return error
        ranks = single(
            "an independent process, because of --allow-independent", f"without --allow-independent this is an error: {error}"
        )
    except WorldError as error:
        return error
    run_dir = env.get(ENV_RUN_DIR)
    return World(
        rank=ranks.rank,
        world_size=ranks.world_size,
        local_rank=ranks.local_rank,
        local_world_size=ranks.local_world_size,
        node_rank=ranks.node_rank,
        source=source,
        master_addr=ranks.master_addr,
        master_port=ranks.master_port,
        run_dir=Path(run_dir) if run_dir is not None else None,
        origin=ranks.origin,
        note=ranks.note,
    )


def _from_arguments(given: Given) -> Ranks:
    rank, world_size = given.get("rank"), given.get("world_size")
    local_rank, local_world_size = given.get("local_rank"), given.get("local_world_size")
    master_addr, master_port = given.get("master_addr"), given.get("master_port")
    whole = (master_addr is None) == (master_port is None)
    if rank is None or world_size is None or local_rank is None or local_world_size is None or not whole:
        needed = ["rank", "world_size", "local_rank", "local_world_size", *([] if whole else ["master_addr", "master_port"])]
        has = {name: str(value) for name, value in given.items() if value is not None}
        raise WorldError(
            f"got {shown(has, has)} as arguments, but not {', '.join(name for name in needed if name not in has)}; "
            "give all of them, or none: then the launcher's variables are used"
        )
    one_node = local_world_size == world_size
    origin = {name: f"the argument {name}" for name, value in given.items() if value is not None}
    origin["node_rank"] = "all ranks are on one node" if one_node else "no argument gives it"
    node_rank = 0 if one_node else None
    return Ranks(rank, world_size, local_rank, local_world_size, node_rank, master_addr, master_port, origin=origin)


def _found(launcher: Launcher, env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in launcher.variables if name in env}


def _why_not(launcher: Launcher, env: Mapping[str, str], believed: str | None) -> str:
    """`believed`: the source in use, which comes before this scheduler; None if this scheduler does not recognise `env`."""
    if believed is None:
        needs = f"needs {launcher.needs}"
        return f"{needs}: not enough of them set" if _found(launcher, env) else f"{needs}: not set"
    try:
        ranks = launcher.ranks(env)
    except WorldError:
        return f"{believed} comes first; without it, this would be an error"
    return f"{believed} comes first; without it, this would be rank {ranks.rank} of {ranks.world_size}"


def agent_row(world: World) -> Row | None:
    """The row of this rank in the page that it shares with its agent; None without a running agent of ours."""
    part = _part(world)
    try:
        return Page.open(part.page).row(world.rank - part.first) if part is not None else None
    except OSError:
        return None


def row_for_waits(world: World) -> Row | None:
    """The row in which a loop reports how long it waits for data; None without our agent, or if a Trainer explains its time."""
    row = agent_row(world)
    return row if row is not None and not row.explains else None


def ranks_of_one_agent(world: World) -> int:
    """The number of ranks that our agent has started here, which all see the same devices; 1 without our agent."""
    part = _part(world)
    return part.ranks if part is not None else 1


def store_address(world: World) -> str:
    """The address at which all ranks reach rank 0's store; empty without our agent."""
    part = _part(world)
    return part.store if part is not None else ""


def checkpoint_scope(world: World) -> str:
    """The value of `rankwise run --checkpoint-scope`: `main` or `node`."""
    attempt = _attempt(world)
    return attempt.checkpoint_scope if attempt is not None else "main"


def strategy_name(world: World) -> str:
    """The value of `rankwise run --sync`; empty if it was not given."""
    attempt = _attempt(world)
    return attempt.sync if attempt is not None else ""


def _part(world: World) -> NodeRecord | None:
    """The record of this rank's node in the newest attempt of the run."""
    attempt = _attempt(world)
    return attempt.part_of(world.rank) if attempt is not None else None


def _attempt(world: World) -> Attempt | None:
    """The newest attempt of the run; None without our agent."""
    attempts = RunDir(world.run_dir).attempts() if world.run_dir is not None else []
    return attempts[-1] if attempts else None
