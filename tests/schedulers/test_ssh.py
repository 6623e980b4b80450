"""Hosts that the user lists: how they are written, how ssh is called, and what its last line means."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from plans import HOSTILE, TWO_HOSTS, plan

from rankwise.errors import ConfigError
from rankwise.run.plan import Host
from rankwise.schedulers import host_names
from rankwise.schedulers.local import ThisMachine
from rankwise.schedulers.ssh import Ssh

local = ThisMachine()
ssh = Ssh()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("host1:2,host2:4", (Host("host1", 2), Host("host2", 4))),
        (" host1 , host2:1 ", (Host("host1", 0), Host("host2", 1))),
        ("me@node-1.example.org:2", (Host("me@node-1.example.org", 2),)),
        ("10.0.0.1:2", (Host("10.0.0.1", 2),)),
        ("[fd88::1]:2,[fe80::1%eth0],me@[::1]:3", (Host("fd88::1", 2), Host("fe80::1%eth0", 0), Host("me@::1", 3))),
    ],
)
def test_hosts_are_read_as_they_are_written(text: str, hosts: tuple[Host, ...]) -> None:
    assert host_names.parse_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"no host is named; for example -H host1:2,host2:2"),
        (" , ", "no host is named"),
        ("h1,,h2", "a host is missing next to a comma"),
        ("h1:", "'h1:': give the slots of a host as a number of at least 1"),
        ("h1:0", "'h1:0': give the slots"),
        ("h1:-1", "'h1:-1': give the slots"),
        ("h1:²", "'h1:²': give the slots"),
        ("h1:2:3", "'h1:2:3' is not the name of a host"),
        ("-oProxyCommand=touch", "is not the name of a host"),
        ("me@-oProxyCommand=touch", "is not the name of a host"),
        ("h;touch", "is not the name of a host"),
        ("h1 h2", "is not the name of a host"),
        ("h1\nh2", "is not the name of a host"),
        ("fd88::1", r"an IPv6 address goes in brackets: \[fd88::1\] or \[fd88::1\]:2"),
        ("h1:2,h2,H1", "H1 is named twice; name it once, with all its slots"),
        ("h1:2,me@h1:2", "me@h1 is named twice"),
    ],
)
def test_hosts_that_cannot_be_meant_are_an_error_that_says_how_to_write_them(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^-H .*{said}"):
        host_names.parse_hosts(text)


def test_a_hostfile_has_open_mpis_lines_ours_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\n\nhost1 slots=2   # big\nhost2:3\n\thost3\r\nhost4 slots=2 max_slots=4\n[fd88::1] slots=1\n")
    expected = (Host("host1", 2), Host("host2", 3), Host("host3", 0), Host("host4", 2), Host("fd88::1", 1))
    assert host_names.read_hostfile(str(path)) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ": the file names no host; write one host per line: host slots=2"),
        ("# nothing\n", ": the file names no host"),
        ("a\nb slot=2\n", ", line 2: 'slot=2' is not understood; write `host slots=2`"),
        ("a slots=\n", ", line 1: 'slots=' is not understood"),
        ("a slots=two\n", ", line 1: 'slots=two': give the slots of a host as a number"),
        ("a:2 slots=3\n", ", line 1: 'a:2' and 'slots=3' both give a number of slots"),
        ("a\nb\n\na slots=2\n", ", line 4: a is named twice"),
        ("a,b\n", ", line 1: 'a,b' is not the name of a host"),
    ],
)
def test_a_hostfile_that_cannot_be_meant_is_an_error_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        host_names.read_hostfile(str(path))
    assert f"--hostfile {path}{said}" in str(raised.value)


def test_a_hostfile_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--hostfile nosuch: cannot be read: No such file or directory$"):
        host_names.read_hostfile("nosuch")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        host_names.read_hostfile(str(tmp_path / "binary"))


def test_the_heads_agent_runs_here_and_the_hosts_keep_the_users_order() -> None:
    asked = plan(hosts=TWO_HOSTS)
    assert ssh.render(asked) == local.render(asked)
    assert ssh.attached({})
    assert ssh.hosts(asked, {}) == TWO_HOSTS


def test_ssh_asks_nothing_forwards_nothing_and_takes_each_word_as_it_is() -> None:
    command = ["/usr/bin/python3", "-m", "rankwise.agent", HOSTILE, "-v"]
    words = ssh.reach("node1", command)
    assert words[:2] == ["ssh", "-T"]  # with a terminal, its line ends and its errors differ
    assert words[-3:-1] == ["--", "node1"]
    assert shlex.split(words[-1]) == command
    options = dict(word.split("=") for word in words[3:-3:2])
    assert (options["BatchMode"], options["ForwardAgent"], options["ConnectTimeout"]) == ("yes", "no", "10")
    assert not [name for name in options if "HostKey" in name or "KnownHosts" in name]  # the user's configuration decides


CHANGED = "@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n@@@\nHost key verification failed.\r\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ssh: connect to host h2 port 2222: Connection refused\r\n", "no ssh server listens on its port 2222"),
        (
            "ssh: Could not resolve hostname h2: Name or service not known\r\n",
            "no host h2 (Name or service not known); ",
        ),
        ("ssh: connect to host h2 port 22: Connection timed out\r\n", "me@h2 does not answer; is it up"),
        ("ssh: connect to host h2 port 22: No route to host\r\n", "me@h2 cannot be reached (No route to host)"),
        ("me@h2: Permission denied (publickey,password).\r\n", "none of your keys is accepted there; type: ssh-copy-id me@h2"),
        ("Host key verification failed.\r\n", "the key of me@h2 is not known here; type: ssh me@h2 true"),
        (CHANGED, "type: ssh-keygen -R h2; ssh me@h2 true"),
        ("kex_exchange_identification: read: Connection reset by peer\r\n", "me@h2 closed the connection before the login"),
        ("Timeout, server h2 not responding.\r\n", "me@h2 does not answer"),
    ],
)
def test_what_ssh_says_at_the_end_becomes_one_line_with_what_to_type(words: str, said: str) -> None:
    line = ssh.refusal("me@h2", f"a banner {{0}}\n{words}")
    assert line is not None
    assert said in line
    assert "\n" not in line


def test_the_last_words_of_the_command_itself_are_not_taken_for_sshs() -> None:
    assert ssh.refusal("h2", "Traceback (most recent call last):\nPermissionError: [Errno 13] Permission denied: 'x'\n") is None
    assert ssh.refusal("h2", "bash: line 1: /usr/bin/python3: Permission denied\n") is None
    assert ssh.refusal("h2", "ConnectionRefusedError: [Errno 111] Connection refused\n") is None
    assert ssh.refusal("h2", "") is None
