"""How many ranks this machine is for, without importing torch."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from rankwise.errors import ConfigError


def gpus(env: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """GPUs that a rank would see: CUDA_VISIBLE_DEVICES where it is set, else the device files of this host or container."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [d.strip() for d in visible.split(",") if d.strip()]
        return named.index("-1") if "-1" in named else len(named)  # CUDA stops reading at -1
    return len([d for d in dev.glob("nvidia*") if d.name.removeprefix("nvidia").isdecimal()])


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def physical_cores() -> int:
    """Cores that this process may use, a core with two hardware threads counted once."""
    import psutil

    return min(psutil.cpu_count(logical=False) or cores(), cores())


def open_files() -> int:
    """How many files a process may have open (ulimit -n)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit >= 0 else 1 << 31


def visible(wanted: str | None, env: Mapping[str, str], dev: Path = Path("/dev")) -> dict[str, str]:
    """What --gpus 0,2 puts into the environment of the ranks. Raises ConfigError for a GPU that is not there."""
    if wanted is None:
        return {}
    count = gpus({}, dev)
    numbers = [int(n) for n in wanted.split(",")]
    if max(numbers) >= count:
        there = f"has {count} GPU{'s' * (count != 1)} (0 to {count - 1})" if count else "has no GPU"
        raise ConfigError(f"--gpus {wanted}: this machine {there}; leave --gpus out, or give numbers that are there")
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))}


def ranks_for(nproc: str, env: Mapping[str, str]) -> tuple[int, str]:
    """(ranks on this machine, why so many), for a number or `auto`."""
    count = gpus(env)
    if nproc != "auto":
        return int(nproc), "as asked"
    if count > 0:
        return count, "auto: one a GPU"
    return physical_cores(), "auto: no GPU here, so one a physical core"
