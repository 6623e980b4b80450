"""What a user may set for one `rankwise run`: a frozen dataclass <- defaults < site files < run file < command line.

config = RunConfig.of(*site_settings(os.environ), read_file("run.toml"), {"argv": ("train.py", "--lr", "1e-3"), "nproc": "2"})
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from rankwise.errors import ConfigError


@dataclass(frozen=True)
class RunConfig:
    """One run as it was asked for; the Plan made of it holds what was found."""

    argv: tuple[str, ...]
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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, _TYPES[str(field.type)]):
                raise ConfigError(f"{field.name} = {value!r}: it must be {_WORDS[str(field.type)]}")
        if not self.argv:
            raise ConfigError("nothing to run; type: rankwise run script.py [its arguments]")
        if self.nproc != "auto" and not (self.nproc.isdecimal() and int(self.nproc) > 0):
            raise ConfigError(f"--nproc {self.nproc}: give a number of ranks from 1 up, or auto")
        if self.name is not None and (not self.name or "/" in self.name or self.name in (".", "..")):
            raise ConfigError(f"--name {self.name!r}: a name is one folder; for another place type --run-dir PATH")
        if self.run_dir == "":
            raise ConfigError("--run-dir '': give the folder that the run may write in, for example --run-dir runs/first")
        if self.gpus is not None:
            numbers = self.gpus.split(",")
            if not all(n.strip().isdecimal() for n in numbers) or len({int(n) for n in numbers}) < len(numbers):
                raise ConfigError(f"--gpus {self.gpus}: give the numbers of GPUs, each once, for example --gpus 0,2")
        for name, value in (("join-timeout", self.join_timeout_s), ("node-wait", self.node_wait_s)):
            if not value >= 0:
                raise ConfigError(f"--{name} {value:g}: give seconds, from 0 up")
        if not self.grace_s > 0:
            raise ConfigError(f"--grace {self.grace_s:g}: give the seconds that ranks may take to stop, above 0")
        if not 0 <= self.master_port < 65536:
            raise ConfigError(f"--master-port {self.master_port}: a port lies between 1 and 65535; leave it out for a free one")
        if not self.stall_warn_s >= 0:
            raise ConfigError(f"--stall-warn {self.stall_warn_s:g}: give seconds, or 0 for never")
        if self.max_restarts < 0:
            raise ConfigError(f"--max-restarts {self.max_restarts}: give how often to start again, from 0 up")
        for name, value, choices in (
            ("start-method", self.start_method, ("fork", "spawn")),
            ("tee", self.tee, ("main", "all")),
        ):
            if value not in choices:
                raise ConfigError(f"--{name} {value}: choose {' or '.join(choices)}")

    @classmethod
    def of(cls, *layers: Mapping[str, Any]) -> Self:
        """Later layers win."""
        return cls(**{name: value for layer in layers for name, value in layer.items()})

    def path(self, name: str) -> Path:
        """The run directory, absolute; `name` is that of the run if none was given."""
        return Path(self.run_dir).absolute() if self.run_dir is not None else default_run_dir(self.name or name)


_SITE_FILE = "rankwise.toml"

_TYPES: dict[str, Any] = {
    "tuple[str, ...]": tuple,
    "bool": bool,
    "str": str,
    "str | None": (str, type(None)),
    "int": int,
    "float": (int, float),
}
_WORDS = {
    "tuple[str, ...]": "a list of words",
    "bool": "true or false",
    "str": "text in quotes",
    "str | None": "text in quotes",
    "int": "a whole number",
    "float": "a number",
}


def default_run_dir(name: str) -> Path:
    """./runs/<name>, absolute."""
    return Path("runs", name or "run").absolute()


_SETTINGS = [field.name for field in fields(RunConfig) if field.name not in ("argv", "module", "command")]
"""What a file may hold: all but what is to be run."""


_OF_ONE_RUN = ("name", "run_dir", "fresh")
"""What a site file may not hold: all runs would share it."""


def site_settings(env: Mapping[str, str], system: Path = Path("/etc")) -> list[dict[str, Any]]:
    """The settings of the system's and of the user's `rankwise.toml`, as far as there are such: a cluster's defaults, once.

    /etc/rankwise.toml, then rankwise.toml in $XDG_CONFIG_HOME (~/.config where it is not set), which wins.
    """
    user = Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME", "/"), ".config"))
    found = {path: _read(path, str(path)) for path in (system / _SITE_FILE, user / _SITE_FILE) if path.is_file()}
    for path, settings in found.items():
        for name in _OF_ONE_RUN:
            if name in settings:
                raise ConfigError(f"{path}: {name.replace('_', '-')} belongs to one run; give it on the command line")
    return list(found.values())


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
    if isinstance(settings.get("nproc"), int):
        settings["nproc"] = str(settings["nproc"])
    if isinstance(settings.get("gpus"), list):
        settings["gpus"] = ",".join(map(str, settings["gpus"]))
    try:
        RunConfig(argv=("checked",), **settings)
    except ConfigError as error:
        raise ConfigError(f"{called}: {error}") from None
    return settings


def _field(name: str) -> str:
    """`max-restarts` and `grace`, as on the command line, or `max_restarts` and `grace_s`."""
    field = name.replace("-", "_")
    return f"{field}_s" if f"{field}_s" in _SETTINGS else field
