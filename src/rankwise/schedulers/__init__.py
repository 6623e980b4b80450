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
    one_of_several(env) -> bool  this process is one of several that `ranks` cannot join: a launcher must not start in each of
                                 them either; pure. Only where it does not say how many there are
    one_a_node(env) -> bool      each node has one of them, which is then for all its devices; pure
    of_rank(env, ranks, per_node) -> Mapping[str, str]
                                 `env`, in which it speaks of our agent, as a rank of that agent is to find it: what it says
                                 of the agent's own place says the rank's, or is taken out. Then whoever believes it, and not
                                 RANK, believes no other thing. What it says of the job stays. `per_node`: the ranks of each
                                 node, as `short_list` writes them; pure. Not asked where the task is the rank

and, where a user's own job array makes tasks that are worlds of their own,

    array_task(env) -> str | None  the number of the task that this process is in; None outside of an array; pure

and, where a job has a folder for itself, over all its starts,

    job_folder(env) -> Path | None   which; None in no such job; pure

and, where a run can be handed to it (those of BY_NAME),

    OPTIONS                      the settings of a run that it knows beside those that all know, by RunConfig's names
    render(plan) -> str          the whole text that starts the agents; pure, compared with a golden file; raises ConfigError.
                                 What a queued job prints goes to logs/job-<its id>.log in the run directory
    attached(env) -> bool        the agents run below whoever runs that text, nothing is queued: a shell, ssh, mpirun, or inside
                                 an allocation; pure
    submit(path) -> str          hand over that text; returns the job's id (where attached: the process id of a shell)
    state(job_id) -> State       what became of the job; asks the scheduler, which may have forgotten it; never raises
    cancel(job_id) -> None       ask it to stop

and, of these, where it applies,

    allocated(env) -> int | None the nodes that the job of this shell has; None in no such shell; pure
    PASSED                       where what runs the text is another starter (srun, mpirun) and not the agent itself: which
                                 signal makes it ask the agents to stop, by the one that the launcher got
    WITHIN                       of OPTIONS, those that mean something within an allocation; `plan.job` has "within" there
    AGAIN                        where `requeue` is one of OPTIONS and the text leaves it to the head's agent: the exit status
                                 by which that puts the job back into the queue
    stop_after_s(job, grace_s) -> float    where its own notice before a limit ends some of the agents: after how long the head
                                 stops the run by itself, `job` as in the plan; 0 for never; pure
    array_tasks(text) -> tuple[str, ...]   where `array` is one of OPTIONS: the numbers of a job array's tasks. Each is a run of
                                 its own in the run directory <run_dir>-<number>, as the job <job_id>_<number>

and, where the user may name the hosts (`hosts` and `hostfile` are among its OPTIONS),

    parse_hosts(text) -> tuple[Host, ...]      of -H; pure; raises ConfigError, as this does:
    read_hostfile(path) -> tuple[Host, ...]

and, where the head's agent starts those of the other nodes itself,

    hosts(plan, env) -> tuple[Host, ...]   the nodes in the order of their ranks; pure but for the file that `env` names
    reach(host, command) -> list[str]      the command that runs `command` there, its stdin and stdout passed through
    refusal(host, words) -> str | None     why that did not get there, by its words on stderr; None: they are the command's own
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from rankwise.schedulers import (
    flux,
    horovodrun,
    jsrun,
    local,
    manual,
    mpich,
    mvapich,
    openmpi,
    others,
    pals,
    sge,
    slurm,
    ssh,
    submitit,
    torchrun,
)
from rankwise.schedulers.ranks import Ranks

ORDER: dict[str, ModuleType] = {
    "torchrun": torchrun,
    "jsrun": jsrun,
    "openmpi": openmpi,
    "horovodrun": horovodrun,
    "mvapich": mvapich,
    "pals": pals,
    "flux": flux,
    "mpich": mpich,
    "submitit": submitit,
    "slurm": slurm,
    "sge": sge,
    "others": others,
    "local": local,
}

BY_NAME: dict[str, ModuleType] = {
    "local": local,
    "slurm": slurm,
    "sge": sge,
    "ssh": ssh,
    "openmpi": openmpi,
    "mpich": mpich,
    "manual": manual,
}
"""Those to which a run can be handed."""


def job_folder(env: Mapping[str, str]) -> Path | None:
    """The folder that the job of this process has for itself, over all its starts; None if it has none."""
    found = (module.job_folder(env) for module in ORDER.values() if hasattr(module, "job_folder"))
    return next(filter(None, found), None)


def named_by_task(name: str, env: Mapping[str, str]) -> str:
    """The default name of a run: in a task of the user's own job array with its number, for each task is a run of its own."""
    found = (module.array_task(env) for module in ORDER.values() if hasattr(module, "array_task"))
    task = next(filter(None, found), None)
    return name if task is None else f"{name}-{task}"


__all__ = ["BY_NAME", "ORDER", "Ranks", "job_folder", "named_by_task"]
