"""What a user may set for one `rankwise run`: a frozen dataclass <- defaults < site files < run file < command line.

config = RunConfig.of(*site_settings(os.environ), read_file("run.toml"), {"argv": ("train.py", "--lr", "1e-3"), "nproc": "2"})
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from rankwise.errors import ConfigError
from rankwise.host.text import seconds_of
from rankwise.run.kinds import SEVERAL, TABLE, WHOLE, fits, kind_of

WORKER = "rankwise.functions.worker"
"""The module that ranks run which run a function; its name follows, for people."""


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class RunConfig:
    """One run as it was asked for; the Plan made of it holds what was found."""

    argv: tuple[str, ...] = field(metadata=SEVERAL)
    """The script, module or command, and its own arguments, untouched."""

    module: bool = False
    """argv[0] is the name of a module, as for `python -m`."""

    command: bool = False
    """argv is any command (what followed a `--`)."""

    nproc: str = "auto"
    """Ranks on this machine: a number, or `auto` for one a GPU, or a physical core where there is no GPU."""

    gpus: str | None = None
    """The GPUs to use, by number: `0,2`; all when None."""

    name: str | None = None
    """Name of the run; the script's stem when None."""

    run_dir: str | None = None
    """Where the run writes; ./runs/<name> when None."""

    fresh: bool = False
    """Move an older run of the same name aside and start from nothing, instead of going on with it."""

    master_port: int = 0
    """The port of the ranks' rendezvous; 0 is one that is free."""

    allow_independent: bool = False
    """Start although another launcher has started several of this process, which makes several separate runs."""

    join_timeout_s: float = 300.0
    """How long the other nodes may take to come."""

    node_wait_s: float = 30.0
    """How long a missing node is waited for where the run may do with fewer (--nodes MIN:MAX)."""

    max_restarts: int = 0
    """How often all ranks are started again after a failure."""

    stop_after: str | None = None
    """Stop all ranks after the step that they are in, and save, when the run has taken so long: `90m`, `12h`."""

    checkpoint_scope: str = "main"
    """Who writes a Trainer's checkpoints: `main`, rank 0, or `node`, one rank a node, where disks are not shared."""

    grace_s: float = 120.0
    """How long ranks may take to stop when asked, before they are killed."""

    stall_warn_s: float = 120.0
    """After how long without any progress it is told which rank keeps the others waiting; 0 is never."""

    check_collectives: bool = False
    """Compare what the ranks ask of each other (operation, shape, dtype, call site); the first difference ends the run."""

    start_method: str = "fork"
    """`fork` from a warm process, or `spawn`: each rank is a process of its own."""

    tee: str = "main"
    """Whose output is shown: `main` (rank 0) or `all`, each line with its rank."""

    on: str | None = None
    """What starts the agents: a name of `schedulers.BY_NAME`, or `mpi`; None: found out."""

    hosts: str | None = None
    """The hosts, and how many ranks on each: `host1:2,host2:2`."""

    hostfile: str | None = None
    """A file of them, one a line."""

    nodes: str | None = None
    """How many nodes: `2`, or from MIN to MAX: `1:4`."""

    node_rank: int | None = field(default=None, metadata=WHOLE)
    """Which of the nodes this is, where each is started by hand."""

    master_addr: str | None = None
    """The first of these nodes."""

    gpus_per_node: str | None = None
    """GPUs of each node, a type before them if it matters: `4`, `a100:4`."""

    partition: str | None = None
    time: str | None = None
    nodelist: str | None = None
    cpus_per_task: int | None = field(default=None, metadata=WHOLE)
    """Cores of each node, for all its ranks: what Slurm calls a task is the agent of a node."""

    mem: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    array: str | None = None
    """Task numbers of a job array; each task is a run of its own."""

    dependency: str | None = None

    setup: tuple[str, ...] = ()
    """Lines of shell that the job runs on its first node before anything else: `module load cuda`."""

    sbatch_args: tuple[str, ...] = ()
    """Further options of sbatch, one each: `--exclusive`, `--comment=a b`."""

    slots: int | None = field(default=None, metadata=WHOLE)
    pe: str | None = None
    """Grid Engine's parallel environment."""

    resources: tuple[str, ...] = ()
    """Grid Engine's `-l`, one each: `h_rt=10:00:00`."""

    queue: str | None = None

    requeue: bool = False
    """Back into the queue when the time is over or another job needs the nodes, until the script has ended by itself."""

    dry_run: bool = False
    """Leave the run directory as it would be, print the job's text, start nothing."""

    wait: bool = False
    """Follow a queued job to its end."""

    site: Mapping[str, Any] = field(default_factory=dict, metadata=TABLE)
    """Defaults of a site file for what only some schedulers know (SCHEDULERS); each takes what it knows."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not fits(value, each):
                raise ConfigError(f"{option(each.name)} {value!r}: it must be {kind_of(each).words}")
        if not self.argv:
            raise ConfigError("nothing to run; type: rankwise run script.py [its arguments]")
        if self.nproc != "auto" and not (re.fullmatch("[0-9]{1,6}", self.nproc) and int(self.nproc) > 0):
            cure = "; auto is one per GPU, or one per core if there is none" if self.nproc in ("gpu", "cpu") else ""
            raise ConfigError(f"--nproc {self.nproc}: give a number of ranks from 1 up, or auto{cure}")
        if self.name is not None and (not self.name or "/" in self.name or self.name in (".", "..")):
            raise ConfigError(f"--name {self.name!r}: a name is one folder; for another place type --run-dir PATH")
        if self.run_dir == "":
            raise ConfigError("--run-dir '': give the folder that the run may write in, for example --run-dir runs/first")
        for name in ("name", "run_dir"):
            if _CONTROL.search(getattr(self, name) or ""):
                raise ConfigError(f"{option(name)} {getattr(self, name)!r}: a newline or control character; take it out")
        if self.gpus is not None:
            numbers = [n.strip() for n in self.gpus.split(",")]
            if not all(re.fullmatch("[0-9]{1,6}", n) for n in numbers) or len({int(n) for n in numbers}) < len(numbers):
                raise ConfigError(f"--gpus {self.gpus}: give the numbers of GPUs, each once, for example --gpus 0,2")
        for name in ("join_timeout_s", "node_wait_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{option(name)} {getattr(self, name):g}: give seconds, from 0 up")
        if self.stop_after is not None and not seconds_of(self.stop_after):
            raise ConfigError(f"--stop-after {self.stop_after}: give a number and a unit, above 0: 90s, 30m, 12h, 2d")
        if not 0 < self.grace_s < math.inf:
            raise ConfigError(f"--grace {self.grace_s:g}: give the seconds that ranks may take to stop, above 0")
        if not 0 <= self.master_port < 65536:
            raise ConfigError(f"--master-port {self.master_port}: a port lies between 1 and 65535; leave it out for a free one")
        if not 0 <= self.stall_warn_s < math.inf:
            raise ConfigError(f"--stall-warn {self.stall_warn_s:g}: give seconds, or 0 for never")
        if self.max_restarts < 0:
            raise ConfigError(f"--max-restarts {self.max_restarts}: give how often to start again, from 0 up")
        for name, value, choices in (
            ("start-method", self.start_method, ("fork", "spawn")),
            ("tee", self.tee, ("main", "all")),
            ("checkpoint-scope", self.checkpoint_scope, ("main", "node")),
        ):
            if value not in choices:
                raise ConfigError(f"--{name} {value}: choose {' or '.join(choices)}")
        self._check_nodes()
        self._check_job()

    def _check_nodes(self) -> None:
        if self.nodes is not None:
            _, most = _counts(self.nodes)
            if self.node_rank is not None and not 0 <= self.node_rank < most:
                raise ConfigError(f"--node-rank {self.node_rank}: of {most} nodes (--nodes {self.nodes}) it lies between 0 and "
                                  f"{most - 1}")  # fmt: skip
        elif self.node_rank is not None:
            raise ConfigError(f"--node-rank {self.node_rank}: of how many? Type --nodes N too, on each node")
        if self.hosts is not None and self.hostfile is not None:
            raise ConfigError(f"-H {self.hosts} and --hostfile {self.hostfile}: give one of the two")

    def _check_job(self) -> None:
        """Values that go into a job's text: each stays in its line."""
        for name in SCHEDULERS:
            value = getattr(self, name)
            for text in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
                if not isinstance(text, str):
                    raise ConfigError(f"{option(name)}: {text!r} is no text; put it in quotes")
                if not text.strip() or _CONTROL.search(text.replace("\t", " ")):
                    raise ConfigError(f"{option(name)} {text!r}: give words in one line")
        if self.gpus_per_node is not None and not re.fullmatch(r"([A-Za-z0-9_.-]+:)?[0-9]+", self.gpus_per_node):
            raise ConfigError(f"{option('gpus_per_node')} {self.gpus_per_node}: give a number, or a type and a number: a100:4")
        for name in ("cpus_per_task", "slots"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{option(name)} {value}: give a number from 1 up")
        if self.wait and self.dry_run:
            raise ConfigError("--wait and --dry-run: a dry run starts nothing that could be waited for; leave one out")

    @classmethod
    def of(cls, *layers: Mapping[str, Any]) -> Self:
        """Later layers win."""
        return cls(**{name: value for layer in layers for name, value in layer.items()})

    @property
    def words(self) -> tuple[str, ...]:
        """What is run, and its arguments: `argv`, with `-m` before a module."""
        return ("-m", *self.argv) if self.module else self.argv

    def node_counts(self) -> tuple[int, int] | None:
        """(fewest, most) nodes; None where that was not said."""
        return None if self.nodes is None else _counts(self.nodes)

    def path(self, name: str) -> Path:
        """The run directory, absolute; `name` is that of the run if none was given."""
        return Path(self.run_dir).absolute() if self.run_dir is not None else default_run_dir(self.name or name)


def _counts(nodes: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", nodes)
    least, most = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, 0)
    if not 0 < least <= most:
        raise ConfigError(f"--nodes {nodes}: give a number of nodes, or the fewest and the most: 1:4")
    return least, most


SCHEDULERS = (
    "on", "hosts", "hostfile", "nodes", "node_rank", "master_addr", "gpus_per_node", "partition", "time", "nodelist",
    "cpus_per_task", "mem", "account", "qos", "constraint", "array", "dependency", "setup", "sbatch_args", "slots", "pe",
    "resources", "queue", "requeue",
)  # fmt: skip
"""The settings that only some schedulers know."""

_SPELLED = {
    "hosts": "-H",
    "sbatch_args": "--sbatch-arg",
    "resources": "-l",
    "grace_s": "--grace",
    "stall_warn_s": "--stall-warn",
    "join_timeout_s": "--join-timeout",
    "node_wait_s": "--node-wait",
}


def is_given(value: Any) -> bool:
    """Whether a setting says anything: 0 does."""
    return value is not None and value is not False and value != ()


def option(name: str) -> str:
    """A setting as it is typed: `--max-restarts`."""
    return _SPELLED.get(name, f"--{name.replace('_', '-')}")


def misplaced(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(options of ours among a script's own words, each with its value; the other words)."""
    ours: list[str] = []
    rest = list(words)
    position = 0
    while position < len(rest) and rest[position] != "--":
        name, glued, _ = rest[position].partition("=")
        setting = _field(name.removeprefix("--")) if name.startswith("--") else ""
        if setting not in _SETTINGS:
            position += 1
            continue
        several = setting not in _SWITCHES and not glued and position + 1 < len(rest)
        ours += rest[position : position + 1 + several]
        del rest[position : position + 1 + several]
    return ours, rest


_SITE_FILE = "rankwise.toml"


def default_run_dir(name: str) -> Path:
    """./runs/<name>, absolute."""
    return Path("runs", name or "run").absolute()


_SETTINGS = [each.name for each in fields(RunConfig) if each.name not in ("argv", "module", "command", "site")]
"""What a file may hold: all but what is to be run."""

_SWITCHES = [each.name for each in fields(RunConfig) if isinstance(each.default, bool)]
"""Options that take no value."""


_OF_ONE_RUN = ("name", "run_dir", "fresh", "node_rank", "array", "dependency", "dry_run")
"""What a site file may not hold: all runs would share it."""


def site_settings(env: Mapping[str, str], system: Path = Path("/etc")) -> list[dict[str, Any]]:
    """The settings of the system's and of the user's `rankwise.toml`, as far as there are such: a cluster's defaults, once.

    /etc/rankwise.toml, then rankwise.toml in $XDG_CONFIG_HOME (~/.config where it is not set), which wins. What only some
    schedulers know is apart, in `site`: it holds where one of them is used.
    """
    user = Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME", "/"), ".config"))
    layers: list[dict[str, Any]] = []
    site: dict[str, Any] = {}
    for path in (system / _SITE_FILE, user / _SITE_FILE):
        if not path.is_file():
            continue
        settings = _read(path, str(path))
        for name in _OF_ONE_RUN:
            if name in settings:
                raise ConfigError(f"{path}: {name.replace('_', '-')} belongs to one run; give it on the command line")
        site = {**site, **{name: settings.pop(name) for name in SCHEDULERS if name in settings}}
        layers.append({**settings, "site": site} if site else settings)
    return layers


def read_file(path: str) -> dict[str, Any]:
    """The settings of a TOML file: `nproc = 4`, `fresh = true`, ... ConfigError says which line it fails on."""
    return _read(Path(path), f"--config {path}")


def _read(path: Path, called: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            settings = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{called}: it cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{called}: it is not TOML: {error}") from None
    settings = {_field(name): value for name, value in settings.items()}
    for name in settings:
        if name not in _SETTINGS:
            options = ", ".join(setting.removesuffix("_s").replace("_", "-") for setting in _SETTINGS)
            raise ConfigError(f"{called}: {name} is no setting of a run; the settings: {options}")
    for name in ("nproc", "nodes", "gpus_per_node", "mem", "time"):  # a number is as good as its text
        if type(settings.get(name)) is int:
            settings[name] = str(settings[name])
    for name in ("gpus", "hosts", "nodelist"):
        if isinstance(settings.get(name), list):
            settings[name] = ",".join(map(str, settings[name]))
    for name in ("setup", "sbatch_args", "resources"):
        if name in settings:
            settings[name] = tuple(settings[name]) if isinstance(settings[name], list) else (settings[name],)
    try:
        RunConfig(argv=("checked",), **settings)
    except ConfigError as error:
        raise ConfigError(f"{called}: {error}") from None
    return settings


def _field(name: str) -> str:
    """`max-restarts` and `grace`, as on the command line, or `max_restarts` and `grace_s`."""
    plain = name.replace("-", "_")
    found = _OTHER_NAMES.get(plain, plain)
    return f"{found}_s" if f"{found}_s" in _SETTINGS else found


_OTHER_NAMES = {"nnodes": "nodes", "sbatch_arg": "sbatch_args", "resource": "resources", "host": "hosts",
                "nproc_per_node": "nproc"}  # fmt: skip
