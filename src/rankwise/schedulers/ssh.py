"""Hosts that the user names, reached by their own ssh: no scheduler, the head's agent starts the others.

    rankwise run -H host1:2,host2:2 train.py        rankwise run --hostfile hosts.txt train.py

The client is the user's own, with their configuration, keys and agent; host keys are checked as that configuration says.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from rankwise.errors import ConfigError
from rankwise.run.plan import Host, Plan
from rankwise.schedulers import local

OPTIONS = ("nodes", "hosts", "hostfile")

render = local.render
submit = local.submit
state = local.state
cancel = local.cancel

_EXAMPLE = "for example -H host1:2,host2:2"
_NAME = r"(?:[A-Za-z0-9_.][A-Za-z0-9_.-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"

# BatchMode: a question that nobody sees is a hang. ControlMaster=no: an open master connection is used, but none is opened
# that would outlive the run. What a configuration adds for people at a terminal would break, or leak into, a second connection.
_CLIENT = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
    "-o", "ForwardAgent=no", "-o", "ForwardX11=no", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none",
    "-o", "ControlMaster=no", "-o", "LogLevel=INFO",
)  # fmt: skip

_CONNECT = r"^ssh: connect to host \S+ port (?P<port>\S+): "

_LAST_WORDS = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "{host} shows another key than the one that is known for it: it was set up anew, or somebody stands between; "
        "if you know why, type: ssh-keygen -R {name}; ssh {host} true",
    ),
    (
        r"^Host key verification failed",
        "the key of {host} is not known here; type: ssh {host} true (and compare the fingerprint that it shows)",
    ),
    (
        r"^\S+: Permission denied \([^)]*\)\.|Too many authentication failures",
        "{host} refuses the login: none of your keys is accepted there; type: ssh-copy-id {host}",
    ),
    (
        rf"{_CONNECT}Connection refused",
        "{host} refuses the connection: no ssh server listens on its port {port}; start one there, or give its port in "
        "~/.ssh/config; to try: ssh {host} true",
    ),
    (
        r"^ssh: Could not resolve hostname (?P<unknown>\S+): (?P<why>.*\S)",
        "there is no host {unknown} ({why}); correct the name in -H or the hostfile; to try: getent hosts {unknown}",
    ),
    (
        rf"{_CONNECT}(?:Connection|Operation) timed out|^Timeout, server \S+ not responding",
        "{host} does not answer; is it up, and may this machine reach it? To try: ssh {host} true",
    ),
    (
        rf"{_CONNECT}(?P<why>No route to host|Network is unreachable|Host is down)",
        "{host} cannot be reached ({why}); is it up, and may this machine reach it? To try: ssh {host} true",
    ),
    (
        r"^Connection to \S+ closed by remote host|^client_loop: send disconnect: |^Read from remote host .*: Connection reset",
        "{host} ended the connection: it, or its ssh server, went down; to try: ssh {host} true",
    ),
    (
        r"^(?:kex_exchange_identification: |Connection (?:closed|reset) by |banner exchange: )",
        "{host} ended the connection before the login; its ssh server may be busy (MaxStartups); to try: ssh {host} true",
    ),
)


def attached(env: Mapping[str, str]) -> bool:
    """Always: the head's agent runs below the launcher."""
    return True


def hosts(plan: Plan, env: Mapping[str, str]) -> tuple[Host, ...]:
    """As the user wrote them."""
    return plan.hosts


def reach(host: str, command: list[str]) -> list[str]:
    """The words arrive there as they are: ssh joins them with blanks, and a login shell reads the line."""
    return [*_CLIENT, "--", host, shlex.join(command)]


def parse_hosts(text: str) -> tuple[Host, ...]:
    """`h1:2,h2` of -H. A host without a number has as many ranks as it has devices. Raises ConfigError."""
    called = f"-H {text if text and text.isprintable() else repr(text)}"
    entries = [entry.strip() for entry in text.split(",")]
    if not any(entries):
        raise ConfigError(f"{called}: no host is named; {_EXAMPLE}")
    if not all(entries):
        raise ConfigError(f"{called}: a host is missing beside a comma; {_EXAMPLE}")
    return _distinct([(_host(entry, called), called) for entry in entries])


def read_hostfile(path: str) -> tuple[Host, ...]:
    """One host a line: `host slots=2`, `host:2` or `host`; what follows a # is a comment. Raises ConfigError."""
    called = f"--hostfile {path}"
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{called}: it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{called}: it is no text; write one host a line: host slots=2") from None
    found = []
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].split():
            found.append((_line(words, f"{called}, line {number}"), f"{called}, line {number}"))
    if not found:
        raise ConfigError(f"{called}: no host is named there; write one a line: host slots=2")
    return _distinct(found)


def _line(words: list[str], called: str) -> Host:
    """As in Open MPI's hostfile: `host slots=2 max_slots=4`. More ranks than slots there never are: max_slots says nothing."""
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
        raise ConfigError(f"{called}: {entry!r} is no name of a host; {_EXAMPLE}")
    name = match[1].replace("[", "").replace("]", "")
    return Host(name, 0 if match[2] is None else _slots(match[2], entry, called))


def _slots(text: str, entry: str, called: str) -> int:
    if not (re.fullmatch(r"[0-9]{1,6}", text) and int(text) > 0):
        raise ConfigError(f"{called}: {entry!r}: the slots of a host are a number from 1 up, one rank each")
    return int(text)


def _distinct(found: list[tuple[Host, str]]) -> tuple[Host, ...]:
    """Two agents on one host would count its devices twice."""
    seen = set()
    for host, called in found:
        name = host.name.rpartition("@")[2].lower()
        if name in seen:
            raise ConfigError(f"{called}: {host.name} is named twice; name it once, with all its slots: {host.name}:2")
        seen.add(name)
    return tuple(host for host, _ in found)


def refusal(host: str, words: str) -> str | None:
    """Why ssh did not get there, in one line with what to type; None where its last words are not ssh's own.

    `words` is what it printed to stderr. Its status says nothing: 255 is also that of a command that a signal has ended.
    """
    for pattern, meaning in _LAST_WORDS:
        if match := re.search(pattern, words, re.MULTILINE):
            return meaning.format(host=host, name=host.rpartition("@")[2], **match.groupdict())
    return None
