"""Facts about this host's network, and the proof that two ends know one secret.

own_addresses()              # those by which other hosts may reach this one
proof(secret, "door", nonce) # what only those who know the secret can say of a nonce
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import platform
import socket
from pathlib import Path

from rankwise.host import processes


def home() -> str:
    """This host's network: processes with the same one reach each other by loopback. A container may have its own."""
    return f"{platform.node()} {processes.boot_id()} {inode('/proc/self/ns/net')}"


def inode(path: str) -> int:
    """Names a namespace; 0 where it cannot be read."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def listen(loopback: bool, port: int = 0) -> socket.socket:
    """On `port`, or on one that the kernel chooses; on all interfaces only where other hosts must come in."""
    if loopback:
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    with contextlib.suppress(OSError):  # no IPv6 here
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def listen_at(address: str, port: int = 0) -> socket.socket:
    """At one address of this host alone."""
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=1024)


def own_address(host: str, one_host: bool) -> str | None:
    """The address of this host that `host`, a name or an address, means to whoever calls it by that.

    None where it is another's, and where others may take it for another one: a name may have several, and where not `one_host`
    one that is 127.0.1.1 here is something else there.
    """
    found = {host} if _is_address(host) else _addresses_of(host)
    if one_host:
        return next((a for a in sorted(found, key=lambda a: ":" in a) if is_loopback(a) or a in own_addresses()), None)
    own = [a for a in own_addresses() if a in found]
    return own[0] if len(own) == 1 and len(found) == 1 else None


def own_addresses() -> list[str]:
    """Those by which other hosts may reach this one, that of the default route first. Names are not asked: /etc/hosts may
    have this host's own name at 127.0.1.1."""
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
        probe.connect(("192.0.2.1", 9))  # documentation's own network; nothing is sent
        found.sort(key=lambda address: address != probe.getsockname()[0])
    return found


def interface_of(address: str) -> str | None:
    """The network interface that has this address, or one by which others reach this host if it is a name of its own."""
    import psutil

    if not _is_address(address):
        own, named = own_addresses(), _addresses_of(address)
        here = own[:1] if is_here(address) else []  # its own name may be 127.0.1.1 there
        address = next(iter([a for a in own if a in named] or here), "")
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def interface_towards(host: str) -> str | None:
    """The interface by which this host reaches that one, or others reach it where it is that one; None where neither."""
    if is_loopback(host):
        return None
    with contextlib.suppress(OSError):  # a name that is known nowhere
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # nothing is sent
                own = plain(str(probe.getsockname()[0]))
                if not is_loopback(own):
                    return interface_of(own)
    return interface_of(host)


def plain(address: str) -> str:
    """An IPv4 address as itself where an IPv6 socket shows it as ::ffff:10.0.0.1."""
    return address.removeprefix("::ffff:") if "." in address else address.partition("%")[0]


def is_loopback(address: str) -> bool:
    """Of a name, whether it is that of no address but loopback's on every host."""
    return ipaddress.ip_address(address).is_loopback if _is_address(address) else address == "localhost"


def _addresses_of(name: str) -> set[str]:
    """Empty for a name that is known nowhere, or to ssh's own configuration alone."""
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


def is_here(name: str) -> bool:
    """Whether this host goes by that name, or has that address."""
    if name in ("localhost", platform.node(), platform.node().partition(".")[0]):
        return True
    found = _addresses_of(name)
    return any(is_loopback(address) for address in found) or not found.isdisjoint(own_addresses())


def refresh(path: Path) -> None:
    """NFS asks the server again what is in a folder when the folder is opened: without it a new file may stay unseen."""
    for folder in (path.parent.parent, path.parent):
        with contextlib.suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


def proof(secret: str, *words: str) -> str:
    return hmac.new(secret.encode(), "\0".join(words).encode(), "sha256").hexdigest()


def is_proof(said: object, secret: str, *words: str) -> bool:
    """Whether what the other end has said is what `proof` makes of these. The time it takes shows nothing of that."""
    return hmac.compare_digest(str(said), proof(secret, *words))
