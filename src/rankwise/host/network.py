"""Facts about this host's network, and the proof that two ends know the same secret.

own_addresses()              # at which other hosts may reach this one
proof(secret, "door", nonce) # only those who know the secret can compute it
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import ipaddress
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path

from rankwise.errors import ConfigError
from rankwise.host import processes


def home() -> str:
    """An identifier of this host's network: processes with the same one reach each other over loopback. A container may have
    its own."""
    return f"{platform.node()} {processes.boot_id()} {inode('/proc/self/ns/net')}"


def inode(path: str) -> int:
    """The inode of a file, which identifies a namespace; 0 if it cannot be read."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def check_loopback() -> None:
    """Raises ConfigError if processes of this host cannot reach each other at 127.0.0.1. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))
    except OSError as error:
        raise ConfigError(
            f"the ranks cannot connect to each other: 127.0.0.1 of this machine or container does not answer "
            f"({str(error.strerror).lower()}); give --nproc 1, or as root, type: ip link set lo up"
        ) from None


def listen(loopback: bool, port: int = 0) -> socket.socket:
    """Listen on `port` (0: the kernel chooses one); on all interfaces, or with `loopback` only on 127.0.0.1."""
    if loopback:
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    with contextlib.suppress(OSError):  # this host has no IPv6
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def listen_at(address: str, port: int = 0) -> socket.socket:
    """Listen only at this address of this host."""
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=1024)


def own_address(host: str, one_host: bool) -> str | None:
    """The address of this host that `host`, a name or an address, stands for.

    None if it is not an address of this host, or if other hosts may resolve it differently: a name may have several addresses,
    and without `one_host` a name that is 127.0.1.1 here is another address there.
    """
    found = {host} if _is_address(host) else _addresses_of(host)
    if one_host:
        return next((a for a in sorted(found, key=lambda a: ":" in a) if is_loopback(a) or a in own_addresses()), None)
    own = [a for a in own_addresses() if a in found]
    return own[0] if len(own) == 1 and len(found) == 1 else None


def own_addresses() -> list[str]:
    """The addresses at which other hosts may reach this one, that of the default route first. Does not resolve this host's
    name, which /etc/hosts may set to 127.0.1.1."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = [
        entry.address.partition("%")[0]
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    found = [a for a in found if not is_loopback(a) and not ipaddress.ip_address(a).is_link_local]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # a network reserved for documentation; nothing is sent
        found.sort(key=lambda address: address != probe.getsockname()[0])
    return found


def interface_of(address: str) -> str | None:
    """The network interface that has this address; for a name of this host, one at which others reach it."""
    import psutil

    if not _is_address(address):
        own, named = own_addresses(), _addresses_of(address)
        here = own[:1] if is_here(address) else []  # /etc/hosts may have its own name as 127.0.1.1
        address = next(iter([a for a in own if a in named] or here), "")
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def interface_towards(host: str) -> str | None:
    """The interface over which this host reaches `host`; if `host` is this one, one at which others reach it; None if
    unknown."""
    if is_loopback(host):
        return None
    with contextlib.suppress(OSError):  # an unknown name
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # nothing is sent
                own = plain(str(probe.getsockname()[0]))
                if not is_loopback(own):
                    return interface_of(own)
    return interface_of(host)


def plain(address: str) -> str:
    """An address without decoration: IPv4 without the ::ffff: of an IPv6 socket, IPv6 without its interface."""
    return address.removeprefix("::ffff:") if "." in address else address.partition("%")[0]


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address. For a name: whether it is loopback on every host."""
    return ipaddress.ip_address(address).is_loopback if _is_address(address) else address == "localhost"


def _addresses_of(name: str) -> set[str]:
    """Empty for an unknown name, or one that only the configuration of ssh knows."""
    try:
        return {plain(str(entry[4][0])) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class _Resolver(ctypes.Structure):
    """How this thread asks name servers: the start of glibc's `_res` (resolv.h)."""

    _fields_ = (("retrans", ctypes.c_int), ("retry", ctypes.c_int), ("options", ctypes.c_ulong))


_RES_INIT = 1


@contextlib.contextmanager
def short_lookups(host: str) -> Iterator[None]:
    """While this thread connects to `host`, it waits one second at most for each name server. Without glibc, and if `host` is a
    name, which must be found: no effect.

    torch's store asks for the name of each address, only to log it. If the name server does not answer, glibc waits 10 seconds
    each time: a start on one machine took 21 s instead of 1.3 s.
    """
    libc = ctypes.CDLL(None)
    if not _is_address(host) or not (hasattr(libc, "__res_state") and hasattr(libc, "__res_init")):
        yield
        return
    libc.__res_state.restype = ctypes.POINTER(_Resolver)
    mine: _Resolver = libc.__res_state().contents
    if not mine.options & _RES_INIT:
        libc.__res_init()
    before = mine.retrans, mine.retry
    mine.retrans, mine.retry = min(1, mine.retrans), min(1, mine.retry)
    try:
        yield
    finally:
        mine.retrans, mine.retry = before


def is_here(name: str) -> bool:
    """Whether this host has that name or address."""
    if name in ("localhost", platform.node(), platform.node().partition(".")[0]):
        return True
    found = _addresses_of(name)
    return any(is_loopback(address) for address in found) or not found.isdisjoint(own_addresses())


def refresh(path: Path) -> None:
    """Open the folders of `path`, so that NFS asks the server for their contents: otherwise a new file may stay unseen."""
    for folder in (path.parent.parent, path.parent):
        with contextlib.suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


def proof(secret: str, *words: str) -> str:
    return hmac.new(secret.encode(), "\0".join(words).encode(), "sha256").hexdigest()


def is_proof(said: object, secret: str, *words: str) -> bool:
    """Whether `said`, from the other end, is the `proof` of these words. Takes constant time."""
    return hmac.compare_digest(str(said), proof(secret, *words))
