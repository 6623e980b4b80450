"""Which scheduler starts the agents, why, and which of the settings are its own.

choice = choose(config, os.environ);  print(choice.name, choice.why)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rankwise.errors import ConfigError
from rankwise.launch.outcome import say
from rankwise.run.config import SCHEDULERS, RunConfig, is_given, option
from rankwise.run.plan import Host
from rankwise.schedulers import BY_NAME, local, mpi

_IN_PLAN = ("on", "hosts", "hostfile", "nodes", "node_rank", "master_addr")
"""They have places of their own in the Plan; what is left is the scheduler's `job`."""


@dataclass(frozen=True)
class Choice:
    """A scheduler, and what it was asked for."""

    name: str
    why: str
    """In a few words, for a person."""

    attached: bool
    """The agents run below this process; otherwise a job is queued."""

    nodes: int
    min_nodes: int
    hosts: tuple[Host, ...]
    node_rank: int
    master_addr: str
    job: dict[str, Any]
    joined: bool = False
    """The scheduler has started this process and its like already: each has an agent below it, nothing is left to start."""

    word: str = "node"
    """What it has one agent for."""

    @property
    def starts_agents(self) -> bool:
        """Whether another starter (srun, mpirun) stands between this process and the agents."""
        return hasattr(self.module, "PASSED") and not self.joined

    @property
    def module(self) -> ModuleType:
        return BY_NAME[self.name]

    @property
    def is_here(self) -> bool:
        """This machine alone: what it has can be looked at now."""
        return self.module is local


def choose(config: RunConfig, env: Mapping[str, str]) -> Choice:
    """Raises ConfigError for a scheduler that is none, and for a setting that it does not know."""
    name, why = _scheduler(config, env)
    module = BY_NAME[name]
    settings = _settings(config, name, why)
    if name == "manual" and not (config.master_addr and config.master_port):
        raise ConfigError(
            f"--node-rank {config.node_rank}: where do the nodes meet? Type the same on each of them: --master-addr HOST "
            "--master-port PORT, the host of node 0 and a port that is free there"
        )
    attached: bool = module.attached(env)
    if attached and hasattr(module, "WITHIN"):
        settings = _within(module, settings, config)
    hosts = _hosts(settings, module)
    least, most = _nodes(settings, hosts, getattr(module, "allocated", _nothing)(env) if attached else None)
    return Choice(
        name=name,
        why=why,
        attached=attached,
        nodes=most,
        min_nodes=least,
        hosts=hosts,
        node_rank=settings.get("node_rank", -1),
        master_addr=settings.get("master_addr", ""),
        job={key: value for key, value in settings.items() if key not in (*_IN_PLAN, "gpus")},
    )


def _scheduler(config: RunConfig, env: Mapping[str, str]) -> tuple[str, str]:
    """(its name, why): what was said, then what follows from what was said, then where this is, then the site's habit."""
    several = config.nodes is not None and config.node_counts() != (1, 1)
    if config.on is not None:
        return _known(config.on, f"--on {config.on}"), "as asked"
    if config.hosts is not None or config.hostfile is not None:
        given = "-H" if config.hosts is not None else "--hostfile"
        return _known("ssh", given), f"{given} names hosts"
    if several and config.node_rank is not None:
        return _known("manual", "--node-rank"), "--node-rank: each node is started by hand"
    for name, module in BY_NAME.items():
        if hasattr(module, "allocated") and module.allocated(env) is not None:
            return name, "this shell is in a job of it"
    if (on := config.site.get("on")) is not None:
        return _known(on, f"on = {on!r} in the site file"), "the site file says so"
    return "local", "nothing else was asked for"


def _known(on: str, typed: str) -> str:
    name = mpi.installed() if on == "mpi" else on
    if name not in BY_NAME:
        raise ConfigError(f"{typed}: there is no scheduler {name}; choose {', '.join((*BY_NAME, 'mpi'))}")
    return name


def _settings(config: RunConfig, name: str, why: str) -> dict[str, Any]:
    """Those that this scheduler knows: what was given, then the site's. Raises ConfigError for one that was given in vain."""
    known = BY_NAME[name].OPTIONS
    given = {key: getattr(config, key) for key in (*SCHEDULERS, "gpus") if key != "on"}
    given = {key: value for key, value in given.items() if is_given(value)}
    if config.node_counts() == (1, 1):  # as torchrun is told where there is but one
        given = {key: value for key, value in given.items() if key in known or key not in ("nodes", "node_rank", "master_addr")}
    if name == "local" and "nodes" in given:
        raise ConfigError(
            f"--nodes {given['nodes']}: nothing says where the other nodes are; type -H HOST1,HOST2 to reach them by ssh, "
            "--on slurm for its queue, or on each of them --node-rank (0, 1, ...) and --master-addr HOST1"
        )
    for key, value in given.items():
        if key not in known:
            others = [other for other, module in BY_NAME.items() if key in module.OPTIONS]
            typed = option(key) if value is True else f"{option(key)} {', '.join(value) if isinstance(value, tuple) else value}"
            do = "does" if len(others) == 1 else "do"
            cure = f"{' and '.join(others)} {do}: type --on {others[0]}, or " if others else ""
            raise ConfigError(f"{typed}: {name} ({why}) knows no {option(key)}; {cure}leave it out")
    return {**{key: value for key, value in config.site.items() if key in known}, **given}


def _within(module: ModuleType, settings: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """Without what is asked of a queue: the nodes are there already."""
    vain = [option(key) for key in settings if key not in module.WITHIN and is_given(getattr(config, key))]
    if vain:
        verb = "is" if len(vain) == 1 else "are"
        say(f"warning: this shell is in a job already: nothing is queued, and {', '.join(vain)} {verb} without effect")
    return {"within": True, **{key: value for key, value in settings.items() if key in module.WITHIN}}


def _hosts(settings: Mapping[str, Any], module: ModuleType) -> tuple[Host, ...]:
    readers: dict[str, Callable[[str], tuple[Host, ...]]] = {}
    if "hosts" in settings:
        readers = {"hosts": module.parse_hosts}
    elif "hostfile" in settings:
        readers = {"hostfile": module.read_hostfile}
    return next((read(settings[key]) for key, read in readers.items()), ())


def _nodes(settings: Mapping[str, Any], hosts: tuple[Host, ...], allocated: int | None) -> tuple[int, int]:
    """(fewest, most): as asked for, or as many as there are."""
    there = len(hosts) or allocated
    counts = RunConfig(argv=("counted",), nodes=settings["nodes"]).node_counts() if "nodes" in settings else None
    if counts is None:
        return there or 1, there or 1
    least, most = counts
    if there is not None and most > there:
        what = "hosts named" if hosts else "nodes in this job"
        raise ConfigError(f"--nodes {settings['nodes']}, and there are {there} {what}; leave --nodes out for all of them")
    return least, most


def _nothing(env: Mapping[str, str]) -> None:
    return None
