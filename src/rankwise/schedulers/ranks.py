"""What a scheduler's variables say about one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rankwise.errors import NotJoinedError, WorldError


@dataclass(frozen=True)
class Ranks:
    """Ranks count from 0; a node is a host, or what the scheduler calls one."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int | None
    """None if the launcher does not say it and it cannot be derived."""

    master_addr: str | None = None
    master_port: int | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    """For each number the variable that it came from, or how it was derived."""

    note: str | None = None
    """What a person should know of these numbers; None where they speak for themselves."""

    def __post_init__(self) -> None:
        for name, size in (("rank", "world_size"), ("local_rank", "local_world_size")):
            value, bound = getattr(self, name), getattr(self, size)
            if not 0 <= value < bound:
                found = f"{self.origin.get(name, name)}={value} and {self.origin.get(size, size)}={bound}"
                raise WorldError(
                    f"{found}: a {name.replace('_', ' ')} must be between 0 and {size} - 1; start the script with one "
                    "launcher only, for example: rankwise run script.py"
                )


@dataclass(frozen=True)
class Tasks:
    """How many processes a launcher started, and which of them this is, as its variables say."""

    index: int
    count: int
    found: str
    """Both variables with their values."""


def single(origin: str, note: str | None = None) -> Ranks:
    """A process that is alone; `origin` says how that is known."""
    names = ("rank", "world_size", "local_rank", "local_world_size", "node_rank")
    return Ranks(0, 1, 0, 1, 0, origin=dict.fromkeys(names, origin), note=note)


def tasks_of(env: Mapping[str, str], index: str, count: str) -> Tasks | None:
    """The two variables as numbers; None unless both are. Never raises: who asks believes another launcher more."""
    if not (env.get(index, "").isdecimal() and env.get(count, "").isdecimal()):
        return None
    return Tasks(int(env[index]), int(env[count]), shown(env, (index, count)))


def counted(env: Mapping[str, str], names: Sequence[str], launcher: str) -> Ranks:
    """By the four variables of a launcher that counts ranks and gives no address: rank, size, local rank, local size.

    Raises WorldError for a part of them, a value that is no number, a rank that is not below its size.
    """
    require(env, names, launcher)
    rank, world_size, local_rank, local_world_size = (whole_number(env, name) for name in names)
    # Neither rank // local size nor rank % nodes is the node: ranks may be dealt out in turn, and nodes have uneven numbers.
    one_node = local_world_size == world_size
    master_addr, master_port, where = address(env, launcher)
    origin = dict(zip(("rank", "world_size", "local_rank", "local_world_size"), names, strict=True))
    origin["node_rank"] = "all ranks are on one node" if one_node else f"{launcher} does not say"
    node_rank = 0 if one_node else None
    return Ranks(
        rank, world_size, local_rank, local_world_size, node_rank, master_addr, master_port, origin={**origin, **where}
    )


def address(env: Mapping[str, str], launcher: str) -> tuple[str | None, int | None, dict[str, str]]:
    """Where rank 0 listens, for a launcher that counts ranks and gives no address: MASTER_ADDR, MASTER_PORT, the origins."""
    origin = {
        field: name if name in env else f"{launcher} gives none: rank 0 announces its own, or set  {name}"
        for field, name in (("master_addr", "MASTER_ADDR"), ("master_port", "MASTER_PORT"))
    }
    return env.get("MASTER_ADDR"), whole_number(env, "MASTER_PORT") if "MASTER_PORT" in env else None, origin


def require(env: Mapping[str, str], names: Sequence[str], launcher: str) -> None:
    """WorldError unless every one of the variables is set, which this launcher sets together."""
    missing = [name for name in names if name not in env]
    if missing:
        raise WorldError(
            f"{shown(env, names)} but not {', '.join(missing)}: {launcher} sets all of them, so something has changed the "
            f"environment; start the script with {launcher} directly, or unset them all"
        )


def not_joined(found: str, meaning: str, cure: str) -> NotJoinedError:
    """The error of a process that would train alone though several were asked for."""
    return NotJoinedError(
        f"{found}: {meaning}, so this process would train alone; {cure} "
        "(to train alone: --allow-independent, in Python allow_independent=True)"
    )


def shown(env: Mapping[str, str], names: Iterable[str]) -> str:
    """Those of the variables that are set, as NAME=value."""
    return ", ".join(f"{name}={env[name]}" for name in names if name in env)


def short_list(counts: Iterable[int]) -> str:
    """[3, 1, 1] is `3,1(x2)`, as Slurm writes it."""
    runs = ((count, len(list(same))) for count, same in groupby(counts))
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


def without(env: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """`env` but for the variables whose names begin so. PMIX_MCA_* is what a user sets."""
    return {name: value for name, value in env.items() if not name.startswith(names) or name.startswith("PMIX_MCA_")}


def whole_number(env: Mapping[str, str], name: str) -> int:
    """The value of a variable that must hold one; WorldError says which does not."""
    text = env[name]
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{name}={text!r} is not a whole number; unset it, or let the launcher set it") from None


def variables_of(ranks: Ranks, restart: int, max_restarts: int, run_id: str, nodes: int | None = None) -> dict[str, str]:
    """What a rank finds in its environment: all that torchrun sets. `ranks` as an agent makes them: nothing is None.

    `nodes` None: all nodes have as many ranks.
    """
    nodes = nodes or max(1, ranks.world_size // ranks.local_world_size)
    return {
        "RANK": str(ranks.rank),
        "LOCAL_RANK": str(ranks.local_rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
        "GROUP_RANK": str(ranks.node_rank),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_RANK": str(ranks.rank),
        "ROLE_WORLD_SIZE": str(ranks.world_size),
        "MASTER_ADDR": str(ranks.master_addr),
        "MASTER_PORT": str(ranks.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
    }
