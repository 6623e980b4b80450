"""How many ranks this machine is for, without importing torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def gpus(env: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """GPUs that a rank would see: CUDA_VISIBLE_DEVICES where it is set, else the device files of this host or container."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() not in ("", "-1")])
    return len([d for d in dev.glob("nvidia*") if d.name.removeprefix("nvidia").isdecimal()])


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def physical_cores() -> int:
    """Cores that this process may use, a core with two hardware threads counted once."""
    import psutil

    return min(psutil.cpu_count(logical=False) or cores(), cores())


def ranks_for(nproc: str, env: Mapping[str, str]) -> tuple[int, str]:
    """(ranks on this machine, why so many), for a number or `auto`."""
    if nproc != "auto":
        return int(nproc), "as asked"
    if (count := gpus(env)) > 0:
        return count, "auto: one a GPU"
    return physical_cores(), "auto: no GPU here, so one a physical core"
