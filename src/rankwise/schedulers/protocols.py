"""What a scheduler can be: three small classes. Whatever is optional has its default here; a capability is a class.

class Slurm(Launcher, Jobs): ...       # says who a process is, and takes jobs
class Ssh(Foreground, Hosts): ...      # foreground.py: runs below the launcher, and reaches the other hosts

`env` is an environment. What takes one is pure, asks no program and no file, unless its docstring names one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rankwise.run.options import Option
from rankwise.run.plan import Host, Plan
from rankwise.schedulers.job import State
from rankwise.schedulers.ranks import Ranks, Tasks


class Scheduler(ABC):
    """One way to start processes."""

    name: ClassVar[str]
    """Its name for `--on` and `rankwise explain`."""


class Launcher(Scheduler):
    """Which rank a process is, by its environment."""

    variables: ClassVar[tuple[str, ...]] = ()
    """The variables that it sets, in the order in which `rankwise explain` lists them."""

    needs: ClassVar[str] = "nothing"
    """What must be set for `detect`, for `rankwise explain`."""

    has_store: ClassVar[bool] = False
    """Whether the address that it gives may be that of a torch store which listens there already."""

    when_bound: ClassVar[str] = ""
    """A sentence for people, with {cores} for the number of cores, if it binds each process to a single core by default."""

    @abstractmethod
    def detect(self, env: Mapping[str, str]) -> bool:
        """Whether its variables are in this environment."""

    @abstractmethod
    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Which rank this process is, each number with the variable that it came from. Raises NotJoinedError for one of several
        processes that nothing connects, WorldError for variables that contradict each other."""

    def tasks(self, env: Mapping[str, str]) -> Tasks | None:
        """How many processes it started, and which of them this is, for a launcher that gives no address of rank 0. Never
        raises."""
        return None

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """A name that is the same for all processes of this start, and different from that of any other start still running.
        `ancestors`: the command lines above this process, the nearest first."""
        return None

    def one_of_several(self, env: Mapping[str, str]) -> bool:
        """Whether this process is one of several that `ranks` cannot connect, because it does not say how many: then a launcher
        must not start in each of them either."""
        return False

    def one_per_node(self, env: Mapping[str, str]) -> bool | None:
        """Whether each node has one of the `tasks`, which then uses all devices of the node; otherwise each task is one rank.
        None: `rankwise run` cannot be used in its tasks."""
        return None

    def rank_env(self, env: Mapping[str, str], ranks: Ranks, per_node: str) -> Mapping[str, str]:
        """`env` describes our agent; return it as a rank of that agent needs it: variables of the agent's own place are set for
        the rank, or removed, so that a program that reads them instead of RANK finds the same. Variables of the job stay.
        `per_node`: the ranks of each node, as `short_list` writes them. Not called if the task is the rank."""
        return env

    def array_task(self, env: Mapping[str, str]) -> str | None:
        """The number of this process's task in the user's own job array, whose tasks train separately; None outside of one."""
        return None

    def job_folder(self, env: Mapping[str, str]) -> Path | None:
        """The folder of the job, the same in each of its starts; None if it has none."""
        return None


class Hosts(Scheduler):
    """The hosts: the head's agent starts the agents of the other nodes itself."""

    @abstractmethod
    def hosts(self, plan: Plan, env: Mapping[str, str]) -> tuple[Host, ...]:
        """The nodes in the order of their ranks. It may read the file that `env` names. Raises WorldError."""

    @abstractmethod
    def reach(self, host: str, command: list[str]) -> list[str]:
        """The command that runs `command` there, its stdin and stdout passed through. Pure."""

    def refusal(self, host: str, words: str) -> str | None:
        """Why the command did not get there, by what it printed on stderr, and what to type; None if the command itself printed
        that. Pure."""
        return None


class Jobs(Scheduler):
    """A queue that takes runs. A `job` is what the run's job.json holds of it: `id`, and its options."""

    title: ClassVar[str] = ""
    """The heading of its own options in `--help`; its name when empty."""

    options: ClassVar[tuple[Option, ...]] = ()
    """Its options, in the order of `--help`."""

    stop_signals: ClassVar[Mapping[int, int]] = {}
    """If another launcher (srun, mpirun) runs the script instead of the agent: which signal makes it ask the agents to stop,
    for each signal that our launcher gets."""

    requeue_status: ClassVar[int | None] = None
    """If `requeue` is an option, and the script leaves it to the head's agent: the exit status with which the agent puts the
    job back into the queue."""

    cures: ClassVar[Mapping[str, str]] = {}
    """By the name of an option that it does not have: what to type, if the answer is not another scheduler."""

    this_machine: ClassVar[bool] = False
    """It starts ranks only on this machine, so the devices of this machine can be looked at now."""

    @abstractmethod
    def render(self, plan: Plan) -> str:
        """The whole script that starts the agents. Pure, and compared with a golden file; raises ConfigError. The output of a
        queued job goes to logs/job-<its id>.log in the run directory."""

    @abstractmethod
    def submit(self, script: str, job: Mapping[str, Any]) -> str:
        """Submit that script, which is at the path `script`; returns the job's id (if attached: the process id of a shell).
        `job` has only the options. Raises ConfigError, in one line, if the queue refuses it."""

    @abstractmethod
    def state(self, job: Mapping[str, Any]) -> State:
        """The state of the job; asks the queue, which may have no record of it any more. Never raises."""

    @abstractmethod
    def cancel(self, job: Mapping[str, Any]) -> None:
        """Ask it to stop. Raises ConfigError."""

    def claims(self, asked: Mapping[str, Any]) -> str | None:
        """Why this scheduler is meant although its name was not given, by the options that were given; None if it is not."""
        return None

    def check(self, job: Mapping[str, Any]) -> None:
        """Raises ConfigError for options that do not go together. Pure."""

    def attached(self, env: Mapping[str, str]) -> bool:
        """Whether the agents run below the process that runs the script, without a queue: inside an allocation."""
        return False

    def allocated(self, env: Mapping[str, str]) -> int | None:
        """The number of nodes of the job that this shell is in; None outside of a job."""
        return None

    def named_hosts(self, job: Mapping[str, Any]) -> tuple[Host, ...]:
        """The hosts that the user has named, in the order of their ranks; they may be in a file. Raises ConfigError."""
        return ()

    def stop_after_s(self, job: Mapping[str, Any], grace_s: float) -> float:
        """If its own notice before a time limit kills some of the agents: after how long the head stops the run by itself; 0
        for never. Pure."""
        return 0.0

    def array_tasks(self, job: Mapping[str, Any]) -> tuple[str, ...]:
        """The numbers of the tasks of a job array: each is a run of its own in the run directory <run_dir>-<number>, as the job
        <id>_<number>. Empty if the job is not an array. Pure; raises ConfigError."""
        return ()
