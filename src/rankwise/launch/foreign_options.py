"""Options of other launchers on the command line of rankwise: what to type instead.

found = translated(["-np", "4", "-x", "PATH", "python", "train.py"], ours={"--nproc": True})
found.theirs, found.words        # ("-np 4", "-x PATH", "python"), ("--nproc", "4", "train.py")
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankwise.errors import ConfigError
from rankwise.host.terminal import typed
from rankwise.schedulers.spellings import COMMANDS, MODULES, SETS_VARIABLES, SPELLINGS

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_HOSTS = ("-H", "--host", "--hosts", "--hostfile")
_NODES = ("-N", "--nodes", "--nnodes", "--num-machines")


@dataclass(frozen=True)
class Translated:
    """A command line with words that belong to another launcher."""

    theirs: tuple[str, ...]
    words: tuple[str, ...]
    """The complete command line, with the other launcher's words replaced."""

    variables: tuple[str, ...] = ()
    """What the other launcher would set in the environment of the ranks, for a shell: `NCCL_DEBUG=INFO`."""


def refuse(words: Sequence[str], ours: Mapping[str, bool]) -> None:
    """Raises ConfigError, with the whole command to type, if a word is an option of another launcher."""
    found = translated(words, ours)
    if found is not None and (unknown := _unknown(found.words, ours)):
        raise ConfigError(
            f"{', '.join(found.theirs)}: part of a command for another launcher, whose option {unknown} has no counterpart "
            f"here; remove this option, or choose one of: {typed('run', '--help')}"
        )
    if found is not None:
        meant = " ".join([*found.variables, typed("run", *found.words)])
        is_python = all(map(_PYTHON.fullmatch, found.theirs))
        what = "rankwise run starts Python itself" if is_python else "part of a command for another launcher"
        raise ConfigError(f"{', '.join(found.theirs)}: {what}; type: {meant}")


def translated(words: Sequence[str], ours: Mapping[str, bool]) -> Translated | None:
    """None if no word belongs to another launcher, or if an option is unknown. `ours`: each option, and whether a value
    follows."""
    nodes = _nodes(words)
    theirs: list[str] = []
    typed: list[str] = []
    variables: list[str] = []
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] != "--":
        if words[position] == "-m" and words[position + 1 : position + 2] and words[position + 1] in MODULES:
            break
        name, glued, value = words[position].partition("=")
        plain = _plain(name)
        count, text = SPELLINGS.get(plain, (0, ""))
        if name in ours or (name[:2] in ours and not name.startswith("--") and plain not in SPELLINGS):
            count = 1 if ours.get(name, False) and not glued else 0
            typed += words[position : position + 1 + count]
        elif plain in SPELLINGS and len(words) > position + (0 if glued else count):
            count = 0 if glued else count
            theirs.append(shlex.join(words[position : position + 1 + count]))
            values = [value] if glued else words[position + 1 : position + 1 + count]
            typed += _filled(text, values, nodes)
            if plain in SETS_VARIABLES and "=" in (set_to := SETS_VARIABLES[plain].format(*values)):
                variables.append(_assignment(set_to))
        else:
            return None
        position += 1 + count
    launcher, script = _peeled(words[position:])
    if launcher:
        theirs.append(shlex.join(launcher))
        if (rest := translated(script, ours)) is not None:
            theirs, script, variables = [*theirs, *rest.theirs], list(rest.words), [*variables, *rest.variables]
    return Translated(tuple(theirs), (*typed, *script), tuple(variables)) if theirs else None


def _plain(name: str) -> str:
    """As SPELLINGS has it: torchrun and Accelerate take `_` for `-`."""
    return name[:2] + name[2:].replace("_", "-")


def _unknown(words: Sequence[str], ours: Mapping[str, bool]) -> str | None:
    """The first option before the script that neither `rankwise run` nor SPELLINGS has."""
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] not in ("--", "-m"):
        name, glued, _ = words[position].partition("=")
        plain = _plain(name)
        values = SPELLINGS[plain][0] if plain in SPELLINGS else int(ours.get(name, False))
        if plain not in SPELLINGS and name not in ours and (name.startswith("--") or name[:2] not in ours):
            return name
        position += 1 if glued else 1 + values
    return None


def _assignment(word: str) -> str:
    name, _, value = word.partition("=")
    return f"{name}={shlex.quote(value)}"


def _peeled(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the first words of another launcher's command, the rest). An interpreter that has options is kept, after a `--`."""
    line = list(words[1:] if words[:1] == ["--"] else words)
    python = 1 if line and _PYTHON.fullmatch(line[0]) else 0
    if line[python : python + 1] == ["-m"] and line[python + 1 : python + 2] and line[python + 1] in MODULES:
        return line[: python + 2], line[python + 2 :]
    if line and line[0] in COMMANDS:
        return line[:1], line[1:]
    if line[:2] == ["accelerate", "launch"]:
        return line[:2], line[2:]
    if python and len(line) > 1 and words[0] != "--":
        plain = not line[1].startswith("-") or line[1] == "-m"
        return line[:1], line[1:] if plain else ["--", *line]
    return [], list(words)


def _nodes(words: Sequence[str]) -> int | None:
    """How many nodes the command names; None if hosts are listed, each with its number of ranks."""
    nodes = 1
    before_script = itertools.takewhile(lambda word: not word.endswith(".py"), words)
    for word, after in itertools.pairwise([*before_script, ""]):
        name, glued, value = word.partition("=")
        if name in _HOSTS:
            return None
        given = value if glued else after
        if _plain(name) in _NODES and given.isdecimal() and int(given) > 0:
            nodes = int(given)
    return nodes


def _filled(text: str, values: Sequence[str], nodes: int | None) -> list[str]:
    value = values[0] if values else ""
    host, _, port = value.rpartition(":")
    each = value
    if "{each}" in text and nodes != 1 and value.isdecimal():
        if nodes is None or int(value) % nodes:
            return []  # the hosts' own numbers hold, or no number fits every node
        each = str(int(value) // nodes)
    host, port, gres = host or port, port if host else "29500", value.removeprefix("gpu:")
    return [word.format(*values, each=each, host=host, port=port, gres=gres) for word in text.split()]
