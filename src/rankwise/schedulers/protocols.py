"""What a scheduler can do: three small classes, one per capability. Optional methods have their defaults here.

class Slurm(Launcher, Jobs): ...       # finds the rank of a process, and takes jobs
class Ssh(Foreground, Hosts): ...      # runs below the launcher (foreground.py), and starts agents on other hosts

`env` is an environment. A method that takes one is pure: it runs no program and reads no file, unless its docstring says so.
"""

from __future__ import annotations

import signal
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
    """Finds the rank of a process from its environment."""

    variables: ClassVar[tuple[str, ...]] = ()
    """The variables that it sets, in the order in which `rankwise explain` lists them."""

    needs: ClassVar[str] = "nothing"
    """What must be set for `detect`, for `rankwise explain`."""

    has_store: ClassVar[bool] = False
    """Whether a torch store may listen already at the address that it gives."""

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
        """For a launcher that gives no address of rank 0: how many processes it started, and which of them this is. Never
        raises."""
        return None

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """A name that is the same for all processes of this start, and different from that of any other start still running.
        `ancestors`: the command lines above this process, the nearest first."""
        return None

    def one_of_several(self, env: Mapping[str, str]) -> bool:
        """Whether this process is one of several that `ranks` cannot connect, because their number is unknown: then `rankwise
        run` must not start in each of them either."""
        return False

    def one_per_node(self, env: Mapping[str, str]) -> bool | None:
        """Whether each node has one of the `tasks`, which then uses all devices of the node; otherwise each task is one rank.
        None: `rankwise run` cannot be used in its tasks."""
        return None

    def rank_env(self, env: Mapping[str, str], ranks: Ranks, per_node: str) -> Mapping[str, str]:
        """Change the agent's environment `env` for one of its ranks: variables with the agent's own index are set for the rank,
        or removed, so that a program that reads them instead of RANK finds the same rank. Variables of the job stay.
        `per_node`: the number of ranks of each node, as `short_list` writes them. Not called if the task itself is the rank."""
        return env

    def array_task(self, env: Mapping[str, str]) -> str | None:
        """The number of this process's task in the user's own job array, whose tasks train separately; None outside of one."""
        return None

    def job_folder(self, env: Mapping[str, str]) -> Path | None:
        """The folder of the job, the same in each of its starts; None if it has none."""
        return None


class Hosts(Scheduler):
    """A scheduler with which the head starts the agents of the other nodes itself."""

    @abstractmethod
    def hosts(self, plan: Plan, env: Mapping[str, str]) -> tuple[Host, ...]:
        """The nodes in the order of their ranks. May read a file that `env` names. Raises WorldError."""

    @abstractmethod
    def reach(self, host: str, command: list[str]) -> list[str]:
        """The command that runs `command` on that host and connects its stdin and stdout. Pure."""

    def refusal(self, host: str, words: str) -> str | None:
        """Why the command did not start on that host, and what to type; None if the command itself printed `words`, the text on
        stderr. Pure."""
        return None


USER_SIGNALS: Mapping[int, int] = {signal.SIGINT: signal.SIGUSR2, signal.SIGTERM: signal.SIGUSR1, signal.SIGHUP: signal.SIGUSR1}
"""`stop_signals` of a launcher that passes only these two on."""

FROM_USER_SIGNALS: Mapping[int, int] = {signal.SIGUSR2: signal.SIGINT, signal.SIGUSR1: signal.SIGTERM}


class Jobs(Scheduler):
    """A scheduler that takes runs. A `job` is the scheduler's part of job.json: `id`, and its options."""

    title: ClassVar[str] = ""
    """The heading of its own options in `--help`; its name if empty."""

    options: ClassVar[tuple[Option, ...]] = ()
    """Its options, in the order of `--help`."""

    stop_signals: ClassVar[Mapping[int, int]] = {}
    """If the script becomes another launcher (srun, mpirun) instead of the agent: for each signal that `rankwise run` gets, the
    signal that makes that launcher ask the agents to stop."""

    taken_as: ClassVar[Mapping[int, int]] = {}
    """What the agents take a signal for that came instead of another one (`stop_signals`): their ranks get that other one."""

    requeue_status: ClassVar[int | None] = None
    """If `requeue` is an option, and the head's agent does it instead of the script: the exit status that puts the job back
    into the queue."""

    cures: ClassVar[Mapping[str, str]] = {}
    """By the name of an option that it does not have: what to type, if the advice is not to use another scheduler."""

    default_port: ClassVar[int] = 0
    """The port at which the ranks or agents meet if the user gives none; 0: a free one, which the first agent announces."""

    this_machine: ClassVar[bool] = False
    """Whether it starts ranks only on this machine, so that its devices can be counted now."""

    @abstractmethod
    def render(self, plan: Plan) -> str:
        """The complete script that starts the agents. Pure, and tests compare it with a golden file; raises ConfigError. The
        script writes the output of a queued job to logs/job-<its id>.log in the run directory."""

    @abstractmethod
    def submit(self, script: str, job: Mapping[str, Any]) -> str:
        """Submit the script at the path `script`; returns the job's id (if attached: the process id of a shell). `job` has only
        the options. Raises ConfigError, in one line, if the queue refuses it."""

    @abstractmethod
    def state(self, job: Mapping[str, Any]) -> State:
        """The state of the job. Asks the queue, which may no longer know the job. Never raises."""

    @abstractmethod
    def cancel(self, job: Mapping[str, Any]) -> None:
        """Ask the job to stop. Raises ConfigError."""

    def claims(self, asked: Mapping[str, Any]) -> str | None:
        """Why the given options mean this scheduler, if the user did not name one; None if they do not."""
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
        """The hosts that the user has listed, maybe in a file, in the order of their ranks. Raises ConfigError."""
        return ()

    def stop_after_s(self, job: Mapping[str, Any], grace_s: float) -> float:
        """How long after its start the head stops the run by itself, if the scheduler's own notice before a time limit comes
        too late or kills some of the agents; 0 for never. Pure."""
        return 0.0

    def array_tasks(self, job: Mapping[str, Any]) -> tuple[str, ...]:
        """The numbers of the tasks of a job array: each task is a separate run, in <run_dir>-<number>, and the job
        <id>_<number>. Empty if the job is not an array. Pure; raises ConfigError."""
        return ()
