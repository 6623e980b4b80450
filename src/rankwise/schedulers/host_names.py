"""The hosts that a user lists, on the command line or in a file, and how many ranks each has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rankwise.errors import ConfigError
from rankwise.run.options import Option
from rankwise.run.plan import Host
from rankwise.schedulers.options import HOSTFILE, HOSTS
from rankwise.schedulers.protocols import Jobs

_EXAMPLE = "for example -H host1:2,host2:2"
_NAME = r"(?:[A-Za-z0-9_.][A-Za-z0-9_.-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"


class NamesHosts(Jobs):
    """A scheduler for which the user may list the hosts."""

    options: ClassVar[tuple[Option, ...]] = (HOSTS, HOSTFILE)

    def named_hosts(self, job: Mapping[str, Any]) -> tuple[Host, ...]:
        if HOSTS.name in job:
            return parse_hosts(job[HOSTS.name])
        return read_hostfile(job[HOSTFILE.name]) if HOSTFILE.name in job else ()


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of `-H h1:2,h2`. A host without a number gets one rank per device. Raises ConfigError."""
    called = f"-H {text if text and text.isprintable() else repr(text)}"
    entries = [entry.strip() for entry in text.split(",")]
    if not any(entries):
        raise ConfigError(f"{called}: no host is named; {_EXAMPLE}")
    if not all(entries):
        raise ConfigError(f"{called}: a host is missing next to a comma; {_EXAMPLE}")
    return _distinct([(_host(entry, called), called) for entry in entries])


def read_hostfile(path: str) -> tuple[Host, ...]:
    """One host per line: `host slots=2`, `host:2` or `host`; a # begins a comment. Raises ConfigError."""
    called = f"--hostfile {path}"
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{called}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{called}: not a text file; write one host per line: host slots=2") from None
    found = []
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].split():
            found.append((_line(words, f"{called}, line {number}"), f"{called}, line {number}"))
    if not found:
        raise ConfigError(f"{called}: the file names no host; write one host per line: host slots=2")
    return _distinct(found)


def _line(words: list[str], called: str) -> Host:
    """A line as in Open MPI's hostfile: `host slots=2 max_slots=4`. max_slots is ignored: there are never more ranks than
    slots."""
    host = _host(words[0], called)
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key not in ("slots", "max_slots", "max-slots") or not value:
            raise ConfigError(f"{called}: {word!r} is not understood; write `host slots=2`, `host:2` or `host`")
        if key == "slots":
            if host.slots:
                raise ConfigError(f"{called}: {words[0]!r} and {word!r} both give a number of slots; leave one of them out")
            host = Host(host.name, _slots(value, word, called))
    return host


def _host(entry: str, called: str) -> Host:
    """`name`, `name:2`, `user@name:2`, `[fd88::1]:2`."""
    match = re.fullmatch(rf"({_NAME})(?::([^:\]]*))?", entry)
    if match is None:
        if entry.count(":") > 1 and re.fullmatch(r"[0-9A-Fa-f:.]+", entry):
            raise ConfigError(f"{called}: {entry!r}: an IPv6 address goes in brackets: [{entry}] or [{entry}]:2")
        raise ConfigError(f"{called}: {entry!r} is not the name of a host; {_EXAMPLE}")
    name = match[1].replace("[", "").replace("]", "")
    return Host(name, 0 if match[2] is None else _slots(match[2], entry, called))


def _slots(text: str, entry: str, called: str) -> int:
    if not (re.fullmatch(r"[0-9]{1,6}", text) and int(text) > 0):
        raise ConfigError(f"{called}: {entry!r}: give the slots of a host as a number of at least 1, one slot for each rank")
    return int(text)


def _distinct(found: list[tuple[Host, str]]) -> tuple[Host, ...]:
    """The hosts. Raises ConfigError if one is listed twice: two agents on one host would both use all its devices."""
    seen = set()
    for host, called in found:
        name = host.name.rpartition("@")[2].lower()
        if name in seen:
            raise ConfigError(f"{called}: {host.name} is named twice; name it once, with all its slots: {host.name}:2")
        seen.add(name)
    return tuple(host for host, _ in found)
