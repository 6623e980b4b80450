"""What a user may set for one `rankwise run`: a frozen dataclass, checked when it is made.

config = RunConfig(argv=("train.py", "--lr", "1e-3"), nproc="2")
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankwise.errors import ConfigError


@dataclass(frozen=True)
class RunConfig:
    """One run as it was asked for; the Plan made of it holds what was found."""

    argv: tuple[str, ...]
    """The script and its own arguments, untouched."""

    nproc: str = "auto"
    """Ranks on this machine: a number, or `auto` for one a GPU, or a physical core where there is no GPU."""

    name: str | None = None
    """Name of the run; the script's stem when None."""

    run_dir: str | None = None
    """Where the run writes; ./runs/<name> when None."""

    fresh: bool = False
    """Move an older run of the same name aside and start from nothing, instead of going on with it."""

    grace_s: float = 120.0
    """How long ranks may take to stop when asked, before they are killed."""

    def __post_init__(self) -> None:
        if not self.argv:
            raise ConfigError("nothing to run; type: rankwise run script.py [its arguments]")
        if self.nproc != "auto" and not (self.nproc.isdecimal() and int(self.nproc) > 0):
            raise ConfigError(f"--nproc {self.nproc}: give a number of ranks from 1 up, or auto")
        if self.name is not None and (not self.name or "/" in self.name or self.name in (".", "..")):
            raise ConfigError(f"--name {self.name!r}: a name is one folder; for another place type --run-dir PATH")
        if not self.grace_s > 0:
            raise ConfigError(f"--grace {self.grace_s:g}: give the seconds that ranks may take to stop, above 0")

    @property
    def path(self) -> Path:
        """The run directory, absolute."""
        if self.run_dir is not None:
            return Path(self.run_dir).absolute()
        return default_run_dir(self.argv[0], self.name)


def default_run_dir(script: str, name: str | None = None) -> Path:
    """./runs/<name>, absolute; the name of a run is its script's stem unless it is given."""
    return Path("runs", name or Path(script).stem or "run").absolute()
