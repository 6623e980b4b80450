"""Settings that only some schedulers have: each is declared once, and the command line, the files and the errors use that.

PARTITION = Option("partition", "Where the job waits for nodes.", metavar="NAME", spellings=("--partition", "-p"))
options = Options([Knows("slurm", "Slurm", "rankwise", (PARTITION, NODES)), Knows("ssh", "", "rankwise", (NODES,))])
options.checked({"nodes": 2})      # {"nodes": "2"}; ConfigError for what it cannot be
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
    """One setting of a scheduler. Those that several of them know are one object."""

    name: str
    """Of the setting: in a run's `job`, and in files, where `-` is as good as `_`."""

    help: str
    """A sentence for `rankwise run --help`."""

    kind: type = str
    """str, int, bool (a switch), Path (absolute in a run's `job`, from where it was typed), or list: words, repeatable on the
    command line, a tuple of them in a run's `job`."""

    metavar: str = ""
    """A word for the value: NAME. A list in a file is as good as the text `a,b` where this has a comma: A,B."""

    spellings: tuple[str, ...] = ()
    """On the command line, `--name` when empty. Errors name it by the first; each long one is its name in files too."""

    check: Callable[[Any], str | None] | None = None
    """What to give instead of this value: "a number from 1 up"; None where the value can be."""

    instead_of: str = ""
    """The option that says the same in another way: both together are an error."""

    within: bool = False
    """It means something within an allocation too, where nothing is asked of a queue."""

    site: bool = True
    """A site file may hold it; else it belongs to one run."""

    heading: str = ""
    """Under which it is in `--help`; the title of the scheduler that declares it when empty."""

    @property
    def typed(self) -> str:
        """As it is typed: `--partition`."""
        return self.words[0]

    @property
    def unset(self) -> Any:
        """Its value when it is not given."""
        return () if self.kind is list else False if self.kind is bool else None

    @property
    def words(self) -> tuple[str, ...]:
        """Every spelling of it."""
        return self.spellings or (f"--{self.name.replace('_', '-')}",)

    def shown(self, value: Any) -> str:
        """With its value, as a person would type it."""
        if value is True:
            return self.typed
        return f"{self.typed} {', '.join(map(str, value)) if isinstance(value, tuple) else value}"

    def checked(self, value: Any) -> Any:
        """The value as a run's `job` has it. Raises ConfigError for what it cannot be, and for text that is not of one line."""
        value = self._read(value)
        if value is None:
            return None
        expected = kind_of_type(tuple if self.kind is list else str if self.kind is Path else self.kind)
        if not isinstance(value, expected.types) or (isinstance(value, bool) and self.kind is not bool):
            raise ConfigError(f"{self.typed} {value!r}: it must be {expected.words}")
        for text in value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ():
            if not isinstance(text, str):
                raise ConfigError(f"{self.typed}: {text!r} is not text; put it in quotes")
            if not text.strip() or _CONTROL.search(text.replace("\t", " ")):
                raise ConfigError(f"{self.typed} {text!r}: give it on one line")
        if self.check is not None and (instead := self.check(value)) is not None:
            raise ConfigError(f"{self.shown(value)}: give {instead}")
        return str(Path(str(value)).absolute()) if self.kind is Path else value

    def _read(self, value: Any) -> Any:
        """What a file may hold in its place: a number for its text, a list, or one word of a list."""
        if self.kind is list:
            return tuple(value) if isinstance(value, list | tuple) else value if value is None else (value,)
        if self.kind is str and type(value) is int:
            return str(value)
        if self.kind is str and isinstance(value, list) and "," in self.metavar:
            return ",".join(map(str, value))
        return value


@dataclass(frozen=True)
class Knows:
    """A scheduler, as far as options go."""

    scheduler: str
    title: str
    package: str
    """Whose it is: `rankwise`, or another distribution."""

    options: tuple[Option, ...]


class Options(Mapping[str, Option]):
    """The options of all schedulers, by their names; in the order of `--help`."""

    def __init__(self, schedulers: Sequence[Knows], first: Sequence[Option] = ()) -> None:
        """`first`: those that `--help` has before all others. Raises ConfigError where two have a word in common."""
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
        """The values as a run's `job` has them. Raises ConfigError for what one of them cannot be, and for two of which
        each excludes the other."""
        found = {name: self[name].checked(value) for name, value in given.items()}
        for name, value in found.items():
            other = self[name].instead_of
            if is_given(value) and is_given(found.get(other)):
                raise ConfigError(f"{self[other].shown(found[other])} and {self[name].shown(value)}: give one of the two")
        return found

    def known_to(self, name: str) -> list[str]:
        """The schedulers that know it."""
        return self._known_to[name]

    def heading(self, name: str) -> str:
        """Under which `--help` has it."""
        return self._headings[name]

    def named(self, word: str) -> str | None:
        """The option that is meant by a name in a file, or by a long spelling without its dashes; None for none."""
        return self._setting.get(word.replace("-", "_"))


def is_given(value: Any) -> bool:
    """Whether a setting says anything: 0 does."""
    return value is not None and value is not False and value != ()


def from_one(value: int) -> str | None:
    """A check: whole numbers from 1 up."""
    return None if value >= 1 else "a number from 1 up"


def matching(pattern: str, words: str) -> Callable[[str], str | None]:
    """A check: text of this form, in words for a person."""
    return lambda value: None if re.fullmatch(pattern, value) else words
