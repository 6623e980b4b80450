"""What a user may set for one `rankwise run`: a frozen dataclass <- defaults < site files < run file < command line.

options = schedulers.options()
layers = [*site_settings(os.environ, options), read_file("run.toml", options), {"argv": ("train.py", "--lr", "1e-3")}]
config = RunConfig.of(options, *layers)
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

from rankwise.errors import ConfigError
from rankwise.host.terminal import typed
from rankwise.host.text import seconds_of
from rankwise.run.kinds import SEVERAL, TABLE, fits, kind_of
from rankwise.run.options import Options, is_given

WORKER = "rankwise.functions.worker"
"""The module that ranks run instead of a script to call a function; the function's name follows, for people."""


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class RunConfig:
    """The settings of one run, as the user gave them; the Plan made from them also has what rankwise found out."""

    argv: tuple[str, ...] = field(metadata=SEVERAL)
    """The script, module or command, and its own arguments, unchanged."""

    module: bool = False
    """argv[0] is the name of a module, as with `python -m`."""

    command: bool = False
    """argv is any command (it followed a `--`)."""

    nproc: str = "auto"
    """Ranks on this machine: a number, or `auto` for one per GPU, or one per physical core if there is no GPU."""

    name: str | None = None
    """Name of the run; by default that of the script, without `.py`."""

    run_dir: str | None = None
    """Where the run writes; by default ./runs/<name>."""

    fresh: bool = False
    """Rename the folder of an older run of this name and start from scratch, instead of resuming it."""

    master_port: int = 0
    """The port at which the ranks meet; 0 is a free one."""

    allow_independent: bool = False
    """Start even if this is one of several tasks of another launcher; each task is then a separate run."""

    join_timeout_s: float = 300.0
    """How long to wait for the other nodes."""

    node_wait_s: float = 30.0
    """How long to wait for a missing node if fewer nodes are enough (--nodes MIN:MAX)."""

    max_restarts: int = 0
    """How often to restart all ranks after a failure."""

    stop_after: str | None = None
    """Save and stop all ranks after their current step, when the run has taken this long: `90m`, `12h`."""

    checkpoint_scope: str = "main"
    """Who writes a Trainer's checkpoints: `main`, rank 0, or `node`, one rank per node if the nodes share no disk."""

    sync: str | None = None
    """How the ranks are synchronised if the script does not set it: `local-sgd:16`; None for the exact gradient."""

    grace_s: float = 120.0
    """How long ranks may take to stop when asked, before they are killed."""

    stall_warn_s: float = 120.0
    """After how long without progress to report which rank blocks the others; 0 is never."""

    check_collectives: bool = False
    """Compare the collectives of all ranks (operation, shape, dtype, call site); the first difference stops the run."""

    start_method: str = "fork"
    """`fork` from a warm process, or `spawn`: each rank is a new process."""

    tee: str = "main"
    """Whose output is shown: `main` (rank 0) or `all`, each line with its rank."""

    on: str | None = None
    """What starts the agents: the name of a scheduler; None: rankwise finds out."""

    job: Mapping[str, Any] = field(default_factory=dict, metadata=TABLE)
    """The options of the scheduler: settings that only some schedulers have, by their names."""

    dry_run: bool = False
    """Write the run directory, print the job's script, start nothing."""

    wait: bool = False
    """Follow a queued job until it has finished."""

    site: Mapping[str, Any] = field(default_factory=dict, metadata=TABLE)
    """Defaults of a site file for `on` and `job`; a scheduler uses those that it has."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not fits(value, each):
                raise ConfigError(f"{option(each.name)} {value!r}: it must be {kind_of(each).words}")
        if not self.argv:
            raise ConfigError("nothing to run; type: rankwise run script.py [its arguments]")
        if self.nproc != "auto" and not (re.fullmatch("[0-9]{1,6}", self.nproc) and int(self.nproc) > 0):
            cure = "; auto is one per GPU, or one per core if there is none" if self.nproc in ("gpu", "cpu") else ""
            raise ConfigError(f"--nproc {self.nproc}: give a number of ranks, at least 1, or auto{cure}")
        if self.name is not None and (not self.name or "/" in self.name or self.name in (".", "..")):
            raise ConfigError(
                f"--name {self.name!r}: give the name of one folder, without /; for another place use --run-dir PATH"
            )
        if self.run_dir == "":
            raise ConfigError("--run-dir '': give the folder that the run may write in, for example --run-dir runs/first")
        for name in ("name", "run_dir"):
            if _CONTROL.search(getattr(self, name) or ""):
                raise ConfigError(f"{option(name)} {getattr(self, name)!r}: a newline or control character; remove it")
        for name in ("join_timeout_s", "node_wait_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{option(name)} {getattr(self, name):g}: give a number of seconds, 0 or more")
        if self.stop_after is not None and not seconds_of(self.stop_after):
            raise ConfigError(f"--stop-after {self.stop_after}: give a number above 0 and a unit: 90s, 30m, 12h, 2d")
        if not 0 < self.grace_s < math.inf:
            raise ConfigError(f"--grace {self.grace_s:g}: give a number of seconds above 0, within which ranks must stop")
        if not 0 <= self.master_port < 65536:
            raise ConfigError(f"--master-port {self.master_port}: a port is a number from 1 to 65535; or leave the option out")
        if not 0 <= self.stall_warn_s < math.inf:
            raise ConfigError(f"--stall-warn {self.stall_warn_s:g}: give a number of seconds, or 0 for never")
        if self.max_restarts < 0:
            raise ConfigError(f"--max-restarts {self.max_restarts}: give the maximum number of restarts, 0 or more")
        for name, value, choices in (
            ("start-method", self.start_method, ("fork", "spawn")),
            ("tee", self.tee, ("main", "all")),
            ("checkpoint-scope", self.checkpoint_scope, ("main", "node")),
        ):
            if value not in choices:
                raise ConfigError(f"--{name} {value}: choose {' or '.join(choices)}")
        if self.wait and self.dry_run:
            raise ConfigError("--wait and --dry-run: a dry run starts nothing, so leave --wait out")

    @classmethod
    def of(cls, options: Options, *layers: Mapping[str, Any]) -> Self:
        """Later layers override earlier ones; a setting that is not a field goes into `job`. Raises ConfigError for an invalid
        value."""
        given = {name: value for layer in layers for name, value in layer.items()}
        job = options.checked({name: value for name, value in given.items() if name in options})
        if "site" in given:  # `false` or an empty list of a later layer replaces a default, and is not in `job`
            given["site"] = {name: value for name, value in given["site"].items() if name not in job}
        if given.get("dry_run") and not any(layer.get("dry_run") and layer.get("wait") for layer in layers):
            given.pop("wait", None)  # a default of a file, for runs that start something
        return cls(**{name: value for name, value in given.items() if name not in options}, job=_given(job))

    def record(self, options: Options) -> dict[str, Any]:
        """The content of config.json: each setting by its name, also those that are not set."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "job"}
        return own | {name: self.job.get(name, option.unset) for name, option in options.items()}

    @property
    def words(self) -> tuple[str, ...]:
        """What to run, and its arguments: `argv`, with `-m` before a module."""
        return ("-m", *self.argv) if self.module else self.argv

    def path(self, name: str) -> Path:
        """The run directory, absolute; `name` is that of the run if none was given."""
        return Path(self.run_dir).absolute() if self.run_dir is not None else default_run_dir(self.name or name)


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if is_given(value)}


_SPELLED = {
    "grace_s": "--grace",
    "stall_warn_s": "--stall-warn",
    "join_timeout_s": "--join-timeout",
    "node_wait_s": "--node-wait",
}


def option(name: str) -> str:
    """A setting as the user types it: `--max-restarts`."""
    return _SPELLED.get(name, f"--{name.replace('_', '-')}")


def misplaced(words: Sequence[str], options: Options) -> tuple[list[str], list[str]]:
    """(rankwise options among a script's arguments, each with its value; the other arguments)."""
    ours: list[str] = []
    rest = list(words)
    position = 0
    while position < len(rest) and rest[position] != "--":
        name, glued, _ = rest[position].partition("=")
        setting = _setting(name.removeprefix("--"), options) if name.startswith("--") else ""
        if setting not in _OWN and setting not in options:
            position += 1
            continue
        several = not _is_switch(setting, options) and not glued and position + 1 < len(rest)
        ours += rest[position : position + 1 + several]
        del rest[position : position + 1 + several]
    return ours, rest


_SITE_FILE = "rankwise.toml"


def default_run_dir(name: str) -> Path:
    """./runs/<name>, absolute."""
    return Path("runs", name or "run").absolute()


_OWN = [each.name for each in fields(RunConfig) if each.name not in ("argv", "module", "command", "job", "site")]
"""The settings that a file may contain besides the options of schedulers: everything except what to run."""

_OF_ONE_RUN = ("name", "run_dir", "fresh", "dry_run")
"""The settings that a site file may not contain: all runs would share them."""


def _is_switch(setting: str, options: Options) -> bool:
    """Whether the setting takes no value."""
    return options[setting].kind is bool if setting in options else isinstance(getattr(RunConfig, setting), bool)


def site_settings(env: Mapping[str, str], options: Options, system: Path = Path("/etc")) -> list[dict[str, Any]]:
    """The settings of the system's and of the user's `rankwise.toml`, if they exist: the defaults of a cluster.

    /etc/rankwise.toml, then rankwise.toml in $XDG_CONFIG_HOME (~/.config if it is not set), which overrides it. Options that
    only some schedulers know are separate, in `site`: they apply if one of these schedulers is used.
    """
    user = Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME", "/"), ".config"))
    layers: list[dict[str, Any]] = []
    site: dict[str, Any] = {}
    for path in (system / _SITE_FILE, user / _SITE_FILE):
        if not os.path.isfile(path):  # noqa: PTH113  # Path.is_file raises an error where a folder may not be entered
            continue
        settings = _read(path, str(path), options)
        for name in settings:
            if name in _OF_ONE_RUN or (name in options and not options[name].site):
                raise ConfigError(f"{path}: {name.replace('_', '-')} belongs to one run; give it on the command line")
        site = {**site, **{name: settings.pop(name) for name in ("on", *options) if name in settings}}
        layers.append({**settings, "site": site} if site else settings)
    return layers


def read_file(path: str, options: Options) -> dict[str, Any]:
    """The settings of a TOML file: `nproc = 4`, `fresh = true`, ... Raises ConfigError, which names the line with the error."""
    return _read(Path(path), f"--config {path}", options)


def _read(path: Path, called: str, options: Options) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        found = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{called}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        said, line = str(error), re.search(r" \(at line (\d+), column (\d+)\)$", str(error))
        at, said = (f":{line[1]}:{line[2]}", said[: line.start()]) if line is not None else ("", said)
        raise ConfigError(f"{called}{at}: not valid TOML: {said}") from None
    settings: dict[str, Any] = {}
    for word, value in found.items():
        name, at = _setting(word, options), f"{called}{_line_of(word, text)}"
        if name not in _OWN and name not in options:
            raise ConfigError(f"{at}: {word} is not a setting of a run; {_instead(word, value, options)}")
        value = str(value) if name == "nproc" and type(value) is int else value  # a number is accepted, and its text
        _checked({name: value}, at, options)
        if name in settings:
            other = next(each for each in found if _setting(each, options) == name)
            raise ConfigError(f"{at}: {other} and {word} are the same setting; give one of the two")
        settings[name] = value
    config = _checked(settings, called, options)
    return {name: config.job.get(name, value) for name, value in settings.items()}


def _checked(settings: Mapping[str, Any], at: str, options: Options) -> RunConfig:
    try:
        return RunConfig.of(options, {"argv": ("checked",)}, settings)
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}") from None


def _line_of(word: str, text: str) -> str:
    """`:3`, the line that sets this word; empty if it is written in an unusual way."""
    found = re.search(rf"^[ \t]*(?:\[[ \t]*)?[\"']?{re.escape(word)}[\"']?[ \t]*[=.\]]", text, re.MULTILINE)
    return f":{text.count(chr(10), 0, found.start()) + 1}" if found is not None else ""


def _instead(word: str, value: object, options: Options) -> str:
    """What to write instead of a setting that does not exist."""
    if isinstance(value, dict):
        return f"write the settings at the top of the file, without [{word}]"
    near = get_close_matches(word.replace("_", "-"), [option(each)[2:] for each in (*_OWN, *options)], n=1)
    return f"did you mean {near[0]}?" if near else f"they are named like the options; type: {typed('run', '--help')}"


def _setting(name: str, options: Options) -> str:
    """The name of a setting, spelled as on the command line (`max-restarts`, `grace`, `nnodes`) or not (`max_restarts`,
    `grace_s`)."""
    plain = name.replace("-", "_")
    if (option := options.named(plain)) is not None:
        return option
    plain = "nproc" if plain == "nproc_per_node" else plain
    return f"{plain}_s" if f"{plain}_s" in _OWN else plain
