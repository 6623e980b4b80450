"""Hosts in network namespaces, reached by the real ssh: what arrives there, and what ssh reports if it cannot connect."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster_runs import with_configuration
from clusters import HOSTS, STATE, Ended, Start, hosts

from rankwise.schedulers.ssh import Ssh

ssh = Ssh()

__all__ = ["hosts"]  # a fixture

pytestmark = pytest.mark.cluster

HOSTILE = ["a  b", "$HOME", "`touch y`", ";touch y", "it's", 'a "b"', "*", "\\", "a\nb", "é", "", "-v", "--", "~"]


def refused(host: str, done: Ended) -> str:
    """The line that we print about ssh's error."""
    line = ssh.refusal(host, done.stderr)
    assert done.returncode == 255
    assert line is not None, done.stderr
    assert "\n" not in line
    return line


@pytest.mark.parametrize("host", ["node1", "node2", "root@node2"])
def test_a_command_arrives_on_each_host_word_by_word_and_its_exit_status_comes_back(hosts: Start, host: str) -> None:
    source = "import os, sys; print(os.uname().nodename, sys.argv[1:]); sys.exit(7)"
    done = hosts(*ssh.reach(host, [sys.executable, "-c", source, *HOSTILE]))
    assert done.stdout == f"{host.removeprefix('root@')} {HOSTILE}\n"
    assert (done.returncode, done.stderr) == (7, "")
    assert ssh.refusal(host, done.stderr) is None
    assert not Path("y").exists()
    assert not Path("/root/y").exists()


def test_the_commands_stdin_and_stdout_are_those_of_ssh_byte_by_byte(hosts: Start) -> None:
    sent = bytes(range(256)) * 1000
    done = subprocess.run(ssh.reach("node1", ["cat"]), input=sent, capture_output=True, timeout=60)
    assert done.stdout == sent


def test_a_host_of_another_name_than_its_known_key_has_is_refused_with_what_to_type(hosts: Start) -> None:
    line = refused("10.88.0.1", hosts(*ssh.reach("10.88.0.1", ["true"])))
    assert line.startswith("the key of 10.88.0.1 is not known here; type: ssh 10.88.0.1 true")


def test_a_host_with_another_key_than_the_known_one_is_refused(hosts: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    key = Path(f"{STATE}/ssh/id.pub").read_text().split()
    Path("known").write_text(f"node1 {key[0]} {key[1]}\n")
    with_configuration(monkeypatch, f"Host node1\n  UserKnownHostsFile {Path('known').absolute()}")
    line = refused("node1", hosts(*ssh.reach("node1", ["true"])))
    assert line.startswith("the key of node1 has changed")
    assert line.endswith("ssh-keygen -R node1; ssh node1 true")


def test_a_host_that_refuses_the_login_says_how_to_give_it_a_key(hosts: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with_configuration(monkeypatch, f"Host node1\n  UserKnownHostsFile {STATE}/ssh/known_hosts\n  PubkeyAuthentication no")
    line = refused("node1", hosts(*ssh.reach("node1", ["true"])))
    assert line == "node1 refuses the login: none of your keys is accepted there; type: ssh-copy-id node1"


def test_a_port_where_nobody_listens_is_named(hosts: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with_configuration(monkeypatch, "Host node1\n  Port 2222")
    line = refused("node1", hosts(*ssh.reach("node1", ["true"])))
    assert line.startswith("node1 refuses the connection: no ssh server listens on its port 2222")


def test_a_name_that_nobody_knows_is_named(hosts: Start) -> None:
    line = refused("nosuch", hosts(*ssh.reach("nosuch", ["true"])))
    assert line.startswith("there is no host nosuch (")
    assert line.endswith("to try: getent hosts nosuch")


def test_a_host_that_is_not_there_is_no_host_to_wait_for(hosts: Start) -> None:
    line = refused("10.88.0.77", hosts(*ssh.reach("10.88.0.77", ["true"])))
    assert line.startswith("10.88.0.77 cannot be reached (No route to host)")


def test_a_host_that_goes_down_ends_the_command(hosts: Start) -> None:
    with subprocess.Popen(
        ssh.reach("node2", ["sh", "-c", "echo there; exec sleep 600"]), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as reached:  # fmt: skip
        assert reached.stdout is not None
        assert reached.stdout.readline() == "there\n"
        try:
            subprocess.run([HOSTS / "host-ctl", "crash", "node2"], check=True)
            _, said = reached.communicate(timeout=60)
        finally:
            reached.kill()
            subprocess.run([HOSTS / "hosts-up", "2"], check=True, capture_output=True)
    line = "node2 closed the connection: the host, or its ssh server, went down; to try: ssh node2 true"
    assert (reached.returncode, ssh.refusal("node2", said)) == (255, line), said
