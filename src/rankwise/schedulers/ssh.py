"""Hosts that the user lists, reached over ssh: no scheduler, the head starts the other agents.

    rankwise run -H host1:2,host2:2 train.py        rankwise run --hostfile hosts.txt train.py

It uses the user's ssh client, with their configuration, keys and agent. Host keys are checked as that configuration requires.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from rankwise.run.plan import Host, Plan
from rankwise.schedulers.foreground import Foreground
from rankwise.schedulers.host_names import NamesHosts
from rankwise.schedulers.options import HOSTFILE, HOSTS, NODES
from rankwise.schedulers.protocols import Hosts

# BatchMode: a prompt that nobody sees would block forever. ControlMaster=no: an open master connection is used, but none is
# opened that would outlive the run. The others turn off what a configuration adds for interactive use (forwarding, commands).
_CLIENT = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
    "-o", "ForwardAgent=no", "-o", "ForwardX11=no", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none",
    "-o", "ControlMaster=no", "-o", "LogLevel=INFO",
)  # fmt: skip

_CONNECT = r"^ssh: connect to host \S+ port (?P<port>\S+): "

_LAST_WORDS = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the key of {host} has changed: the host was reinstalled, or somebody intercepts the connection; "
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
        "{host} closed the connection: the host, or its ssh server, went down; to try: ssh {host} true",
    ),
    (
        r"^(?:kex_exchange_identification: |Connection (?:closed|reset) by |banner exchange: )",
        "{host} closed the connection before the login; its ssh server may be busy (MaxStartups); to try: ssh {host} true",
    ),
)


class Ssh(NamesHosts, Foreground, Hosts):
    name = "ssh"
    options = (NODES, *NamesHosts.options)

    def claims(self, asked: Mapping[str, Any]) -> str | None:
        given = next((option for option in (HOSTS, HOSTFILE) if option.name in asked), None)
        return f"{given.typed} names hosts" if given is not None else None

    def hosts(self, plan: Plan, env: Mapping[str, str]) -> tuple[Host, ...]:
        """The hosts as the user wrote them."""
        return plan.hosts

    def reach(self, host: str, command: list[str]) -> list[str]:
        """The words arrive unchanged: ssh joins them with blanks, and a login shell parses the line, so they are quoted."""
        return [*_CLIENT, "--", host, shlex.join(command)]

    def refusal(self, host: str, words: str) -> str | None:
        """Why ssh could not connect, in one line with what to type; None if the output has no error of ssh.

        `words`: what it printed on stderr. Its status shows nothing: it is 255 also if a signal has killed the command.
        """
        for pattern, meaning in _LAST_WORDS:
            if match := re.search(pattern, words, re.MULTILINE):
                return meaning.format(host=host, name=host.rpartition("@")[2], **match.groupdict())
        return None
