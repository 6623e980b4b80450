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
    """As `--on` and `rankwise explain` have it."""


class Launcher(Scheduler):
    """Who am I: what an environment says of one process."""

    variables: ClassVar[tuple[str, ...]] = ()
    """The variables that it sets, in the order in which `rankwise explain` lists them."""

    needs: ClassVar[str] = "nothing"
    """What must be set for `detect`, for `rankwise explain`."""

    has_store: ClassVar[bool] = False
    """The address that it gives may be that of a torch store which listens there already."""

    when_bound: ClassVar[str] = ""
    """A sentence for people, with {cores} for the number of cores, if it binds each process to a single core by default."""

    @abstractmethod
    def detect(self, env: Mapping[str, str]) -> bool:
        """Whether its variables are in this environment."""

    @abstractmethod
    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Which rank this process is, each number with the variable that it came from. Raises NotJoinedError for one of several
        processes that nothing has joined, WorldError for variables that contradict themselves."""

    def tasks(self, env: Mapping[str, str]) -> Tasks | None:
        """How many processes it started, and which of them this is, where it gives no address of rank 0. Never raises."""
        return None

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """A name that all processes of this very start have in common, and no other start that may be alive. `ancestors`: the
        command lines above this process, the nearest first."""
        return None

    def one_of_several(self, env: Mapping[str, str]) -> bool:
        """This process is one of several that `ranks` cannot join, as it does not say how many: a launcher must not start in
        each of them either."""
        return False

    def one_per_node(self, env: Mapping[str, str]) -> bool | None:
        """Whether each node has one of the `tasks`, which is then for all its devices; else each is one rank. None: `rankwise
        run` cannot stand in its tasks."""
        return None

    def rank_env(self, env: Mapping[str, str], ranks: Ranks, per_node: str) -> Mapping[str, str]:
        """`env`, in which it speaks of our agent, as a rank of that agent is to find it: what it says of the agent's own place
        says the rank's, or is taken out. Then whoever believes it, and not RANK, believes no other thing. What it says of the
        job stays. `per_node`: the ranks of each node, as `short_list` writes them. Not asked where the task is the rank."""
        return env

    def array_task(self, env: Mapping[str, str]) -> str | None:
        """The number of this process's task of the user's own job array, whose tasks are worlds of their own; None outside."""
        return None

    def job_folder(self, env: Mapping[str, str]) -> Path | None:
        """The folder that a job has for itself, over all its starts; None where it has none."""
        return None


class Hosts(Scheduler):
    """Where are the hosts: the head's agent starts those of the other nodes itself."""

    @abstractmethod
    def hosts(self, plan: Plan, env: Mapping[str, str]) -> tuple[Host, ...]:
        """The nodes in the order of their ranks. It may read the file that `env` names. Raises WorldError."""

    @abstractmethod
    def reach(self, host: str, command: list[str]) -> list[str]:
        """The command that runs `command` there, its stdin and stdout passed through. Pure."""

    def refusal(self, host: str, words: str) -> str | None:
        """Why that did not get there, by its words on stderr, and what to type; None: they are the command's own. Pure."""
        return None


class Jobs(Scheduler):
    """A queue: what a run can be handed to. A `job` is what the run's job.json holds of it: `id`, and its options."""

    title: ClassVar[str] = ""
    """The heading of its own options in `--help`; its name when empty."""

    options: ClassVar[tuple[Option, ...]] = ()
    """What it may be asked for, in the order of `--help`."""

    stop_signals: ClassVar[Mapping[int, int]] = {}
    """Where what runs the text is another starter (srun, mpirun) and not the agent itself: which signal makes it ask the agents
    to stop, by the one that the launcher got."""

    requeue_status: ClassVar[int | None] = None
    """Where `requeue` is among the options and the text leaves it to the head's agent: the exit status by which that puts the
    job back into the queue."""

    cures: ClassVar[Mapping[str, str]] = {}
    """By the name of an option that it does not know: what to type, where another scheduler is not the answer."""

    this_machine: ClassVar[bool] = False
    """It starts ranks on this machine alone: what that has can be looked at now."""

    @abstractmethod
    def render(self, plan: Plan) -> str:
        """The whole text that starts the agents. Pure, and compared with a golden file; raises ConfigError. What a queued job
        prints goes to logs/job-<its id>.log in the run directory."""

    @abstractmethod
    def submit(self, script: str, job: Mapping[str, Any]) -> str:
        """Hand over that text, which is at the path `script`; returns the job's id (where attached: the process id of a shell).
        `job` has the options alone. Raises ConfigError, in one line, for what the queue refuses."""

    @abstractmethod
    def state(self, job: Mapping[str, Any]) -> State:
        """What became of the job; asks the queue, which may have forgotten it. Never raises."""

    @abstractmethod
    def cancel(self, job: Mapping[str, Any]) -> None:
        """Ask it to stop. Raises ConfigError."""

    def claims(self, asked: Mapping[str, Any]) -> str | None:
        """Why it is meant though nobody typed its name, by the options that were given; None: it is not."""
        return None

    def check(self, job: Mapping[str, Any]) -> None:
        """Raises ConfigError for options that do not go together. Pure."""

    def attached(self, env: Mapping[str, str]) -> bool:
        """The agents run below whoever runs the text, and nothing is queued: within an allocation."""
        return False

    def allocated(self, env: Mapping[str, str]) -> int | None:
        """The nodes that the job of this shell has; None in no such shell."""
        return None

    def named_hosts(self, job: Mapping[str, Any]) -> tuple[Host, ...]:
        """The hosts that the user has named, in the order of their ranks; they may be in a file. Raises ConfigError."""
        return ()

    def stop_after_s(self, job: Mapping[str, Any], grace_s: float) -> float:
        """Where its own notice before a limit ends some of the agents: after how long the head stops the run by itself; 0 for
        never. Pure."""
        return 0.0

    def array_tasks(self, job: Mapping[str, Any]) -> tuple[str, ...]:
        """The numbers of a job array's tasks: each is a run of its own in the run directory <run_dir>-<number>, as the job
        <id>_<number>. Empty for a job that is none. Pure; raises ConfigError."""
        return ()
