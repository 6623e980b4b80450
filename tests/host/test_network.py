"""Addresses, names and interfaces of this host."""

from __future__ import annotations

import errno
import os
import platform
import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from launched import with_name_servers

from rankwise.errors import ConfigError
from rankwise.host import network


@pytest.fixture
def two_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """eth0 has 10.0.0.1, ib0 10.9.0.1; this host's own name is 127.0.1.1, and `first-ib` is 10.9.0.1."""
    entries = {name: [SimpleNamespace(family=socket.AF_INET, address=a)] for name, a in
               (("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("ib0", "10.9.0.1"))}  # fmt: skip
    names = {platform.node(): "127.0.1.1", "first-ib": "10.9.0.1", "other": "10.0.0.2"}

    def resolve(name: str, *_: object, **__: object) -> list[tuple]:
        if name not in names:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (names[name], 0))]

    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: dict.fromkeys(entries, SimpleNamespace(isup=True)))
    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.parametrize(
    ("address", "interface"),
    [("10.9.0.1", "ib0"), ("first-ib", "ib0"), (platform.node(), "eth0"), ("other", None), ("no", None), ("10.0.0.2", None)],
)  # fmt: skip
def test_the_interface_of_an_address_or_a_name_of_this_host_is_one_by_which_others_reach_it(
    two_interfaces: None, address: str, interface: str | None
) -> None:
    assert network.interface_of(address) == interface


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1", True), ("127.0.1.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("node1", False)],
)
def test_a_name_is_no_address_of_loopback_but_its_own(address: str, loopback: bool) -> None:
    assert network.is_loopback(address) is loopback


def test_the_interface_towards_a_host_is_that_of_the_route_and_for_itself_one_of_its_own(
    two_interfaces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Probe:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...
        def connect(self, address: tuple[str, int]) -> None:
            self.to = address[0]

        def getsockname(self) -> tuple[str, int]:
            return ({"10.0.0.2": "10.0.0.1", "10.9.0.1": "10.9.0.1"}.get(self.to, self.to), 1)

    monkeypatch.setattr(socket, "socket", Probe)
    found = {
        name: network.interface_towards(name) for name in ("other", "first-ib", platform.node(), "localhost", "127.0.0.1", "no")
    }
    assert found == {
        "other": "eth0",
        "first-ib": "ib0",
        platform.node(): "eth0",
        "localhost": None,
        "127.0.0.1": None,
        "no": None,
    }


def test_this_host_goes_by_its_names_and_addresses(two_interfaces: None) -> None:
    assert [network.is_here(name) for name in (platform.node(), "localhost", "first-ib")] == [True] * 3
    assert [network.is_here(name) for name in ("other", "nowhere")] == [False] * 2


@pytest.mark.parametrize(
    ("host", "one_host", "address"),
    [
        ("10.9.0.1", False, "10.9.0.1"), ("127.0.0.1", True, "127.0.0.1"), ("127.0.0.1", False, None),
        ("10.0.0.2", False, None),
        ("first-ib", False, "10.9.0.1"), (platform.node(), False, None), (platform.node(), True, "127.0.1.1"),
        ("other", True, None), ("no", False, None),
    ],
)  # fmt: skip
def test_an_address_or_a_name_is_listened_at_alone_where_it_means_one_place_to_all(
    two_interfaces: None, host: str, one_host: bool, address: str | None
) -> None:
    assert network.own_address(host, one_host) == address


def test_a_listener_at_one_address_is_at_no_other() -> None:
    with network.listen_at("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


ASKS = """
import ctypes, socket, struct
from rankwise.errors import ConfigError
from rankwise.host import network

sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sink.bind(("127.0.0.1", 0))
sink.setblocking(False)
libc = ctypes.CDLL(None)
libc.__res_state.restype = ctypes.c_void_p
libc.__res_init()
state = (ctypes.c_char * 36).from_address(libc.__res_state())
struct.pack_into("=iHH4s8x", state, 16, 1, socket.AF_INET, socket.htons(sink.getsockname()[1]), socket.inet_aton("127.0.0.1"))
before = bytes(state)
with network.short_lookups("node1"):
    assert bytes(state) == before
query = libc.res_query if hasattr(libc, "res_query") else ctypes.CDLL("libresolv.so.2").__res_query  # before glibc 2.34
with network.short_lookups("127.0.0.1"):
    assert query(b"1.0.0.127.in-addr.arpa", 1, 12, ctypes.create_string_buffer(512), 512) < 0
assert bytes(state) == before
asked = 0
try:
    while sink.recv(512):
        asked += 1
except BlockingIOError:
    print(asked, *struct.unpack_from("=ii", state))
"""


def test_a_name_server_that_does_not_answer_is_asked_once_for_a_second_while_an_address_is_connected() -> None:
    done = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, env=with_name_servers(), check=True)
    assert done.stdout.split()[0] == "1"


def test_a_loopback_interface_that_is_down_is_an_error_that_says_how_to_set_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would try to connect for half an hour."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    network.check_loopback()
    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 .* \(network is unreachable\); .*: ip link set lo up$"):
        network.check_loopback()
