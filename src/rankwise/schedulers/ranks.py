"""What a scheduler's variables say of one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rankwise.errors import WorldError


@dataclass(frozen=True)
class Ranks:
    """Ranks count from 0; a node is a host, or what the scheduler calls one."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str | None = None
    master_port: int | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    """For each number the variable that it came from, or how it was derived."""

    def __post_init__(self) -> None:
        for name, size in (("rank", "world_size"), ("local_rank", "local_world_size")):
            value, bound = getattr(self, name), getattr(self, size)
            if not 0 <= value < bound:
                found = f"{self.origin.get(name, name)}={value} and {self.origin.get(size, size)}={bound}"
                raise WorldError(
                    f"{found}: a {name.replace('_', ' ')} lies between 0 and {size} - 1; "
                    "start the script with one launcher alone, for example: rankwise run script.py"
                )


def whole_number(env: Mapping[str, str], name: str) -> int:
    """The value of a variable that must hold one; WorldError says which does not."""
    text = env[name]
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{name}={text!r} is no whole number; unset it, or let the launcher set it") from None
