"""The ways to start processes, one file each; protocols.py describes what such a file contains.

schedulers.queue("slurm")               # a scheduler that takes runs, by its name
schedulers.launchers(os.environ)        # what may have started this process, the most credible first
schedulers.options()                    # the options of all of them

Schedulers of other packages are found by their entry points (installed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from rankwise.errors import ConfigError
from rankwise.run.options import Knows, Options
from rankwise.schedulers import installed, mpi
from rankwise.schedulers.flux import Flux
from rankwise.schedulers.foreground import Foreground
from rankwise.schedulers.horovodrun import Horovodrun
from rankwise.schedulers.jsrun import Jsrun
from rankwise.schedulers.local import ThisMachine
from rankwise.schedulers.lsf import Lsf
from rankwise.schedulers.manual import Manual
from rankwise.schedulers.mpich import Mpich
from rankwise.schedulers.mvapich import Mvapich
from rankwise.schedulers.openmpi import OpenMpi
from rankwise.schedulers.options import SHARED
from rankwise.schedulers.others import OtherLaunchers
from rankwise.schedulers.pals import Pals
from rankwise.schedulers.pbs import Pbs
from rankwise.schedulers.protocols import Hosts, Jobs, Launcher, Scheduler
from rankwise.schedulers.ranks import Ranks
from rankwise.schedulers.sge import GridEngine
from rankwise.schedulers.slurm import Slurm
from rankwise.schedulers.ssh import Ssh
from rankwise.schedulers.submitit import Submitit
from rankwise.schedulers.torchrun import Torchrun

LOCAL = ThisMachine()
_OPENMPI, _MPICH, _SLURM, _SGE, _PBS, _LSF = OpenMpi(), Mpich(), Slurm(), GridEngine(), Pbs(), Lsf()


def _of_others() -> list[Scheduler]:
    """The schedulers of other packages. Raises ConfigError as `installed.schedulers` does, and if one has the name of ours."""
    for each in installed.schedulers():
        if each.name in _NAMES:
            package = installed.packages()[each.name]
            raise ConfigError(
                f"the package {package} provides a scheduler {each.name}, which rankwise has too; type: pip uninstall {package}"
            )
    return list(installed.schedulers())


def _starters() -> Iterator[Launcher]:
    yield from _LAUNCHERS[1:]
    yield from (each for each in _of_others() if isinstance(each, Launcher))


_LAUNCHERS: tuple[Launcher, ...] = (
    Torchrun(_starters), Jsrun(), _OPENMPI, Horovodrun(), Mvapich(), Pals(), Flux(), _MPICH, Submitit(), _SLURM, _SGE,
    _PBS, _LSF, OtherLaunchers(),
)  # fmt: skip
"""Our launchers, the most credible first. Those of other packages follow, and LOCAL is the last."""

_QUEUES: tuple[Jobs, ...] = (LOCAL, _SLURM, _SGE, _PBS, _LSF, Ssh(), _OPENMPI, _MPICH, Manual())
"""Our schedulers that take runs, in the order in which messages list them."""

_NAMES = {each.name for each in (*_LAUNCHERS, *_QUEUES)}

ALIASES: Mapping[str, Callable[[], str]] = {"mpi": mpi.installed}
"""Other names for `--on`, each with a function that returns the scheduler that it means on this host."""


def queues() -> dict[str, Jobs]:
    """The schedulers that take runs, by name. Raises ConfigError as `installed.schedulers` does."""
    return {each.name: each for each in (*_QUEUES, *_of_others()) if isinstance(each, Jobs)}


def queue(name: str) -> Jobs | None:
    """None if no scheduler has that name."""
    ours = next((each for each in _QUEUES if each.name == name), None)
    return ours if ours is not None else queues().get(name)


def launchers(env: Mapping[str, str]) -> dict[str, Launcher]:
    """The launchers that may have started a process with this environment, by name, the most credible first. Looks for those of
    other packages only if none of ours is detected."""
    others = [] if any(each.detect(env) for each in _LAUNCHERS) else _of_others()
    return {each.name: each for each in (*_LAUNCHERS, *others, LOCAL) if isinstance(each, Launcher)}


def launcher(name: str) -> Launcher:
    """Raises KeyError if none has that name."""
    ours = next((each for each in (*_LAUNCHERS, LOCAL) if each.name == name), None)
    return ours if ours is not None else {each.name: each for each in _of_others() if isinstance(each, Launcher)}[name]


@cache
def options() -> Options:
    """The options of all schedulers. Raises ConfigError if two packages use one word for different options."""
    package = installed.packages()
    return Options(
        [Knows(each.name, each.title, package.get(each.name, "rankwise"), each.options) for each in queues().values()], SHARED
    )


def job_folder(env: Mapping[str, str]) -> Path | None:
    """The folder of this process's job, the same in each start of the job; None if it has none."""
    return next(filter(None, (each.job_folder(env) for each in launchers(env).values())), None)


def named_by_task(name: str, env: Mapping[str, str]) -> str:
    """The default name of a run. In a task of the user's own job array it gets the number of the task, because each task is a
    separate run."""
    task = next(filter(None, (each.array_task(env) for each in launchers(env).values())), None)
    return name if task is None else f"{name}-{task}"


__all__ = [
    "ALIASES", "LOCAL", "Foreground", "Hosts", "Jobs", "Launcher", "Ranks", "Scheduler", "job_folder", "launcher", "launchers",
    "named_by_task", "options", "queue", "queues",
]  # fmt: skip
