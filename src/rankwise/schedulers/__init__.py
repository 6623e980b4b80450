"""All that is known of each way to start jobs, one file each; the order of the dict is the order of belief.

A scheduler is a module with

    detect(env) -> bool          does this environment speak of it? pure
    ranks(env) -> Ranks          which rank is this process, each number with the variable that it came from; pure;
                                 raises NotJoinedError for one of several processes that nothing has joined
    VARIABLES                    the names in which it speaks, in the order in which a person reads them
    NEEDS                        in words, what must be set for `detect`

and, where it starts the processes but gives no address of rank 0,

    tasks(env) -> Tasks | None   how many it started, and which of them this is; pure, never raises
    start(env, ancestors) -> str | None
                                 a name that all processes of this very start have in common, and no other start that may be
                                 alive; `ancestors` are the command lines above this process, the nearest first; pure

and, where jobs can be handed to it,

    render(plan) -> str          the whole text that starts the run; pure, compared with a golden file
    submit(path) -> str          hand over that text; returns the job's id
    state(job_id) -> str         "running" or "ended"
    cancel(job_id) -> None       ask it to stop
"""

from __future__ import annotations

from types import ModuleType

from rankwise.schedulers import local, mpich, openmpi, sge, slurm, torchrun
from rankwise.schedulers.ranks import Ranks

ORDER: dict[str, ModuleType] = {
    "torchrun": torchrun,
    "openmpi": openmpi,
    "mpich": mpich,
    "slurm": slurm,
    "sge": sge,
    "local": local,
}

__all__ = ["ORDER", "Ranks"]
