"""Settings that only some schedulers have: each is declared once, for the command line, the files and the errors.

PARTITION = Option("partition", "Where the job waits for nodes.", metavar="NAME", spellings=("--partition", "-p"))
options = Options([Knows("slurm", "Slurm", "rankwise", (PARTITION, NODES)), Knows("ssh", "", "rankwise", (NODES,))])
options.checked({"nodes": 2})      # {"nodes": "2"}; ConfigError for an invalid value
options.known_to("nodes")          # ["slurm", "ssh"]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankwise.errors import ConfigError
from rankwise.run.kinds import kind_of_type

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class Option:
    """One setting of a scheduler. Schedulers that share an option share the object."""

    name: str
    """The name of the setting, in a run's `job` and in files (where `-` may replace `_`)."""

    help: str
    """A sentence for `rankwise run --help`."""

    kind: type = str
    """str, int, bool (a switch), Path (made absolute in a run's `job`), or list: words, repeatable on the command line, a tuple
    in a run's `job`."""

    metavar: str = ""
    """A word for the value: NAME. If it has a comma (A,B), a file may have a list instead of the text `a,b`."""

    spellings: tuple[str, ...] = ()
    """The spellings on the command line; `--name` if empty. Errors use the first; long ones are valid names in files too."""

    check: Callable[[Any], str | None] | None = None
    """What to give instead of this value: "a number of at least 1"; None if the value is valid."""

    instead_of: str = ""
    """The name of an option for the same thing: giving both is an error."""

    within: bool = False
    """Whether it also applies inside an allocation, where no job is queued."""

    site: bool = True
    """Whether a site file may contain it; otherwise it belongs to one run."""

    heading: str = ""
    """Its heading in `--help`; if empty, the title of the scheduler that declares it."""

    @property
    def typed(self) -> str:
        """As the user types it: `--partition`."""
        return self.words[0]

    @property
    def unset(self) -> Any:
        """Its value if it is not given."""
        return () if self.kind is list else False if self.kind is bool else None

    @property
    def words(self) -> tuple[str, ...]:
        """All its spellings."""
        return self.spellings or (f"--{self.name.replace('_', '-')}",)

    def shown(self, value: Any) -> str:
        """The option with its value, as a person would type it."""
        if value is True:
            return self.typed
        return f"{self.typed} {', '.join(map(str, value)) if isinstance(value, tuple) else value}"

    def checked(self, value: Any) -> Any:
        """The value as a run's `job` has it. Raises ConfigError for an invalid value, and for text that is empty or not on one
        line."""
        value = self._read(value)
        if value is None:
            return None
        expected = kind_of_type(tuple if self.kind is list else str if self.kind is Path else self.kind)
        if not isinstance(value, expected.types) or (isinstance(value, bool) and self.kind is not bool):
            raise ConfigError(f"{self.typed} {value!r}: it must be {expected.words}")
        for text in value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ():
            if not isinstance(text, str):
                raise ConfigError(f"{self.typed}: {text!r} is not text; put it in quotes")
            if not text.strip():
                raise ConfigError(f"{self.typed} {text!r} is empty; give a value, or leave it out")
            if _CONTROL.search(text.replace("\t", " ")):
                raise ConfigError(f"{self.typed} {text!r}: give it on one line")
        if self.check is not None and (instead := self.check(value)) is not None:
            raise ConfigError(f"{self.shown(value)}: give {instead}")
        return str(Path(str(value)).absolute()) if self.kind is Path else value

    def _read(self, value: Any) -> Any:
        """Convert what a file may contain instead: a number for text, a list for `a,b`, or one word for a list."""
        if self.kind is list:
            return tuple(value) if isinstance(value, list | tuple) else value if value is None else (value,)
        if self.kind is str and type(value) is int:
            return str(value)
        if self.kind is str and isinstance(value, list) and "," in self.metavar:
            return ",".join(map(str, value))
        return value


@dataclass(frozen=True)
class Knows:
    """A scheduler and the options that it knows."""

    scheduler: str
    title: str
    package: str
    """The package that provides it: `rankwise`, or another distribution."""

    options: tuple[Option, ...]


class Options(Mapping[str, Option]):
    """The options of all schedulers, by name, in the order of `--help`."""

    def __init__(self, schedulers: Sequence[Knows], first: Sequence[Option] = ()) -> None:
        """`first`: options that `--help` lists before all others. Raises ConfigError if two options share a spelling."""
        self._by_name: dict[str, Option] = {option.name: option for option in first}
        self._known_to: dict[str, list[str]] = {}
        self._headings: dict[str, str] = {}
        self._setting: dict[str, str] = {}
        taken: dict[str, tuple[Option, Knows]] = {}
        for each in schedulers:
            for option in each.options:
                for word in {*option.words, option.name}:
                    other, before = taken.setdefault(word, (option, each))
                    if other != option:
                        raise ConfigError(
                            f"{word} is an option of both {before.scheduler} (package {before.package}) and {each.scheduler} "
                            f"(package {each.package}); uninstall one of the two packages"
                        )
                self._by_name.setdefault(option.name, option)
                self._known_to.setdefault(option.name, []).append(each.scheduler)
                self._headings.setdefault(option.name, option.heading or each.title or each.scheduler)
                for word in (option.name, *(word.removeprefix("--") for word in option.words if word.startswith("--"))):
                    self._setting[word.replace("-", "_")] = option.name

    def __getitem__(self, name: str) -> Option:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values as a run's `job` has them. Raises ConfigError for an invalid value, and for two options that exclude each
        other."""
        found = {name: self[name].checked(value) for name, value in given.items()}
        for name, value in found.items():
            other = self[name].instead_of
            if is_given(value) and is_given(found.get(other)):
                raise ConfigError(f"{self[other].shown(found[other])} and {self[name].shown(value)}: give one of the two")
        return found

    def known_to(self, name: str) -> list[str]:
        """The schedulers that know this option."""
        return self._known_to[name]

    def heading(self, name: str) -> str:
        """The option's heading in `--help`."""
        return self._headings[name]

    def named(self, word: str) -> str | None:
        """The option with this name in a file, or with this long spelling without its dashes; None if there is none."""
        return self._setting.get(word.replace("-", "_"))


def is_given(value: Any) -> bool:
    """Whether a setting was given a value: 0 is one."""
    return value is not None and value is not False and value != ()


def from_one(value: int) -> str | None:
    """A check for whole numbers of at least 1."""
    return None if value >= 1 else "a number of at least 1"


def matching(pattern: str, words: str) -> Callable[[str], str | None]:
    """Returns a check for text that matches `pattern`. `words`: the pattern in words, for the error."""
    return lambda value: None if re.fullmatch(pattern, value) else words
