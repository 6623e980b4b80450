"""All that is known of each way to start jobs, one file each; the order of the dict is the order of belief.

A scheduler is a module with

    detect(env) -> bool          does this environment speak of it? pure
    ranks(env) -> Ranks          which rank is this process, each number with the variable that it came from; pure

and, where jobs can be handed to it,

    render(plan) -> str          the whole text that starts the run; pure, compared with a golden file
    submit(path) -> str          hand over that text; returns the job's id
    state(job_id) -> str         "running" or "ended"
    cancel(job_id) -> None       ask it to stop
"""

from __future__ import annotations

from types import ModuleType

from rankwise.schedulers import local, torchrun
from rankwise.schedulers.ranks import Ranks

ORDER: dict[str, ModuleType] = {"torchrun": torchrun, "local": local}

__all__ = ["ORDER", "Ranks"]
