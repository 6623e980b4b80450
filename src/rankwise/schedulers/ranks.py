"""What a scheduler's variables tell about one process."""

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
    """None if the launcher does not give it and it cannot be derived."""

    master_addr: str | None = None
    master_port: int | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    """For each number, the variable that it came from, or how it was derived."""

    note: str | None = None
    """What a person should know about these numbers; None if there is nothing to explain."""

    def __post_init__(self) -> None:
        for name, size in (("rank", "world_size"), ("local_rank", "local_world_size")):
            value, bound = getattr(self, name), getattr(self, size)
            if not 0 <= value < bound:
                found = f"{self._set(name)} and {self._set(size)}"
                raise WorldError(
                    f"{found}: a {name.replace('_', ' ')} must be between 0 and {size} - 1; start the script with one "
                    "launcher only, for example: rankwise run script.py"
                )
        if self.local_world_size > self.world_size:
            raise WorldError(
                f"{self._set('local_world_size')} and {self._set('world_size')}: a node cannot have more ranks than there are; "
                "start the script with one launcher only, for example: rankwise run script.py"
            )
        if self.world_size > 1 and self.master_addr == "":
            raise WorldError(f"{self._set('master_addr')} is empty: set it to the host of rank 0")
        if self.world_size > 1 and self.master_port is not None and not 0 < self.master_port < 65536:
            found = self._set("master_port")
            raise WorldError(f"{found}: a port is a number from 1 to 65535; set one that is free on rank 0's host")

    def _set(self, name: str) -> str:
        """The number, with the variable that it came from."""
        return f"{self.origin.get(name, name)}={getattr(self, name)}"


@dataclass(frozen=True)
class Tasks:
    """How many processes a launcher started, and which of them this is, from its variables."""

    index: int
    count: int
    found: str
    """Both variables with their values."""


def single(origin: str, note: str | None = None) -> Ranks:
    """A process that is alone. `origin`: how that is known."""
    names = ("rank", "world_size", "local_rank", "local_world_size", "node_rank")
    return Ranks(0, 1, 0, 1, 0, origin=dict.fromkeys(names, origin), note=note)


def tasks_of(env: Mapping[str, str], index: str, count: str) -> Tasks | None:
    """The values of the two variables; None unless both are numbers. Never raises: the caller trusts another launcher more."""
    if not (env.get(index, "").isdecimal() and env.get(count, "").isdecimal()):
        return None
    return Tasks(int(env[index]), int(env[count]), shown(env, (index, count)))


def counted(env: Mapping[str, str], names: Sequence[str], launcher: str) -> Ranks:
    """The ranks from the four variables of a launcher that gives no address: rank, size, local rank, local size.

    Raises WorldError if only some of them are set, if a value is not a number, or if a rank is not below its size.
    """
    require(env, names, launcher)
    rank, world_size, local_rank, local_world_size = (whole_number(env, name) for name in names)
    # Neither rank // local size nor rank % nodes is the node: ranks may be placed round-robin, and nodes may have uneven
    # numbers.
    one_node = local_world_size == world_size
    master_addr, master_port, where = address(env, launcher)
    origin = dict(zip(("rank", "world_size", "local_rank", "local_world_size"), names, strict=True))
    origin["node_rank"] = "all ranks are on one node" if one_node else f"{launcher} does not say"
    node_rank = 0 if one_node else None
    return Ranks(
        rank, world_size, local_rank, local_world_size, node_rank, master_addr, master_port, origin={**origin, **where}
    )


def address(env: Mapping[str, str], launcher: str) -> tuple[str | None, int | None, dict[str, str]]:
    """(MASTER_ADDR, MASTER_PORT, their origins) for a launcher that gives no address: where rank 0 listens, if the user has set
    it."""
    origin = {
        field: name if name in env else f"{launcher} gives no {what}: rank 0 announces its own, or set {name}"
        for field, name, what in (("master_addr", "MASTER_ADDR", "address"), ("master_port", "MASTER_PORT", "port"))
    }
    return env.get("MASTER_ADDR"), whole_number(env, "MASTER_PORT") if "MASTER_PORT" in env else None, origin


def require(env: Mapping[str, str], names: Sequence[str], launcher: str) -> None:
    """Raises WorldError unless all of these variables are set: this launcher always sets them together."""
    missing = [name for name in names if name not in env]
    if missing:
        raise WorldError(
            f"{shown(env, names)} but not {', '.join(missing)}: {launcher} sets all of them, so something has changed the "
            f"environment; start the script with {launcher} directly, or unset them all"
        )


def not_joined(found: str, meaning: str, cure: str) -> NotJoinedError:
    """The error for a process that would train alone although several were started."""
    return NotJoinedError(
        f"{found}: {meaning}, so this process would train alone; {cure} "
        "(to train alone: --allow-independent, in Python allow_independent=True)"
    )


def shown(env: Mapping[str, str], names: Iterable[str]) -> str:
    """The variables that are set, as NAME=value."""
    return ", ".join(f"{name}={env[name]}" for name in names if name in env)


def short_list(counts: Iterable[int]) -> str:
    """[3, 1, 1] is `3,1(x2)`, as Slurm writes it."""
    runs = ((count, len(list(same))) for count, same in groupby(counts))
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


def without(env: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """`env` without the variables whose names begin with one of `names`. Keeps PMIX_MCA_*, which are settings of the user."""
    return {name: value for name, value in env.items() if not name.startswith(names) or name.startswith("PMIX_MCA_")}


def whole_number(env: Mapping[str, str], name: str) -> int:
    """The value of a variable that must be a whole number. Raises WorldError, which names the variable."""
    text = env[name]
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{name}={text!r} is not a whole number; unset it, or let the launcher set it") from None


def variables_of(ranks: Ranks, restart: int, max_restarts: int, run_id: str, nodes: int | None = None) -> dict[str, str]:
    """The variables of a rank: all those that torchrun sets. `ranks`: as an agent makes them, so no field is None.

    `nodes` None: all nodes have the same number of ranks.
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
