"""Which scheduler starts the agents, why, and which settings are options of that scheduler.

choice = choose(config, os.environ);  print(choice.name, choice.why)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rankwise import schedulers
from rankwise.errors import ConfigError
from rankwise.host.text import listed
from rankwise.launch.outcome import say
from rankwise.run.config import RunConfig
from rankwise.run.options import is_given
from rankwise.run.plan import Host
from rankwise.schedulers import LOCAL, Foreground, Jobs
from rankwise.schedulers.options import counts

_IN_PLAN = ("gpus", "hosts", "hostfile", "nodes", "node_rank", "master_addr")
"""These settings have their own fields in the Plan; the others are the scheduler's `job`."""


@dataclass(frozen=True)
class Choice:
    """A scheduler, and what it was asked for."""

    queue: Jobs
    why: str
    """In a few words, for a person."""

    attached: bool
    """Whether the agents run below this process; otherwise a job is queued."""

    nodes: int
    min_nodes: int
    hosts: tuple[Host, ...]
    node_rank: int
    master_addr: str
    gpus: str | None
    """The numbers of the GPUs to use; None for all."""

    job: dict[str, Any]
    joined: bool = False
    """Whether the scheduler has started this process and others like it already: each starts only the agent below it."""

    word: str = "node"
    """The word for what has one agent each: node or task."""

    @property
    def starter(self) -> Jobs:
        """The scheduler whose text is run: the local one if only the agent on this host is left to start."""
        return LOCAL if self.joined else self.queue

    @property
    def starts_agents(self) -> bool:
        """Whether another launcher (srun, mpirun) is between this process and the agents."""
        return bool(self.starter.stop_signals)

    @property
    def name(self) -> str:
        return self.queue.name

    @property
    def is_here(self) -> bool:
        """Whether only this machine is used: its devices can then be counted now."""
        return self.queue.this_machine


def choose(config: RunConfig, env: Mapping[str, str]) -> Choice:
    """Raises ConfigError for an unknown scheduler, and for a setting that the scheduler does not know."""
    queue, why = _queue(config, env)
    job = _job(config, queue, why)
    attached = queue.attached(env)
    if attached and not isinstance(queue, Foreground):
        job = _within(queue, job, config)
    queue.check(job)
    hosts = queue.named_hosts(job)
    least, most = _nodes(job, hosts, queue.allocated(env) if attached else None)
    return Choice(
        queue=queue,
        why=why,
        attached=attached,
        nodes=most,
        min_nodes=least,
        hosts=hosts,
        node_rank=job.get("node_rank", -1),
        master_addr=job.get("master_addr", ""),
        gpus=job.get("gpus"),
        job={key: value for key, value in job.items() if key not in _IN_PLAN},
    )


def _queue(config: RunConfig, env: Mapping[str, str]) -> tuple[Jobs, str]:
    """(the scheduler, why): --on first, then what the other options imply, then the job that this shell is in, then the site
    file."""
    if config.on is not None:
        return _named(config.on, f"--on {config.on}"), "--on"
    queues = schedulers.queues().values()
    for queue in queues:
        if (why := queue.claims(config.job)) is not None:
            return queue, why
    for queue in queues:
        if queue.allocated(env) is not None:
            return queue, "this shell is in one of its jobs"
    if (on := config.site.get("on")) is not None:
        return _named(on, f"on = {on!r} in the site file"), "the site file says so"
    return schedulers.LOCAL, "no other scheduler was chosen"


def _named(on: str, typed: str) -> Jobs:
    name = schedulers.ALIASES[on]() if on in schedulers.ALIASES else on
    queue = schedulers.queue(name)
    if queue is None:
        names = (*schedulers.queues(), *schedulers.ALIASES)
        near = get_close_matches(name, names, n=1)
        cure = f"did you mean {near[0]}?" if near else f"choose {', '.join(names)}"
        raise ConfigError(f"{typed}: there is no scheduler {name}; {cure}")
    return queue


def _job(config: RunConfig, queue: Jobs, why: str) -> dict[str, Any]:
    """The scheduler's options: those given, then those of the site file. Raises ConfigError for an option that it does not
    know."""
    known = {option.name for option in queue.options}
    options = schedulers.options()
    given = dict(config.job)
    if counts(given.get("nodes", "")) == (1, 1):  # what people type for torchrun on one machine
        given = {key: value for key, value in given.items() if key in known or key not in ("nodes", "node_rank", "master_addr")}
    for key, value in given.items():
        if key not in known:
            option = options[key]
            if key in queue.cures:
                raise ConfigError(f"{option.shown(value)}: {queue.cures[key]}")
            others = options.known_to(key)
            those = f"{listed(others, last=' and ')} {'has' if len(others) == 1 else 'have'}"
            raise ConfigError(
                f"{option.shown(value)}: {queue.name} ({why}) has no option {option.typed}; {those}: "
                f"use --on {others[0]}, or leave {option.typed} out"
            )
    return {**{key: value for key, value in config.site.items() if key in known and is_given(value)}, **given}


def _within(queue: Jobs, job: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """The options without those of a queue: inside a job, the nodes are allocated already."""
    keeps = [option.name for option in queue.options if option.within]
    vain = [option.typed for option in queue.options if option.name in config.job and option.name not in keeps]
    if vain:
        verb = "has" if len(vain) == 1 else "have"
        say(f"warning: this shell is in a job already: nothing is queued, and {', '.join(vain)} {verb} no effect")
    return {"within": True, **{key: value for key, value in job.items() if key in keeps}}


def _nodes(job: Mapping[str, Any], hosts: tuple[Host, ...], allocated: int | None) -> tuple[int, int]:
    """(fewest, most) nodes: as requested, or as many as there are."""
    there = len(hosts) or allocated
    if "nodes" not in job:
        return there or 1, there or 1
    least, most = counts(job["nodes"])
    if there is not None and most > there:
        what = "hosts named" if hosts else "nodes in this job"
        raise ConfigError(f"--nodes {job['nodes']}, but there are {there} {what}; leave --nodes out to use all of them")
    return least, most
