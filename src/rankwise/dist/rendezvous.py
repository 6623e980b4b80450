"""How ranks find rank 0 if the launcher gives no address: rank 0 listens, and writes its address to a file that all can read.

    with Gathering(world, start, folders) as gathering:      # rank 0
        gathering.wait(300);  meeting = gathering.release(store_port, address)
    meeting = join(world, start, folders, 300)               # the others

The file (mode 0600, complete or absent) has the addresses of rank 0, a port that the kernel chose, and a secret. Its name is
the name of the start: all ranks of the start know it, and no other running job has the same. A rank trusts a file only if the
process at its address proves that it knows the secret, so it ignores the file of an earlier job. Rank 0 removes its file at the
end.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rankwise.dist import start_file
from rankwise.dist.start_file import NotHereError
from rankwise.dist.world import World
from rankwise.errors import RunDirError, WorldError
from rankwise.host import network
from rankwise.host.text import numbered
from rankwise.ipc.address_file import ways

FOLDER = ".rankwise"
SAY_AFTER_S = 5.0
"""In the first seconds of a wait nothing is printed."""

DETAIL_AFTER_S = 60.0
"""Before this, missing ranks are probably still importing torch from a slow file system."""

_POLL_S = 0.05
_ANSWER_S = 5.0  # then the next address is tried; longer than TCP needs to send a lost packet again
_VERDICT_S = 15.0  # the others wait this much longer, because rank 0 reports which ranks are missing
_LINE_BYTES = 65536


@dataclass(frozen=True)
class Meeting:
    """What a rank knows when all ranks have connected."""

    master_addr: str
    """The address at which this rank has reached the host of rank 0."""

    master_port: int
    """The port of the store."""

    node_rank: int
    """Hosts are numbered in the order of their lowest rank."""

    interface: str | None
    """The network interface to the other hosts; None if all ranks are on one host, or the interface has no name."""


def folders(world: World, cwd: Path, home: Path | None) -> list[Path]:
    """Where the file may be: folders that all nodes share on most clusters, and on a single host the temporary folder."""
    places = [place / FOLDER for place in (cwd, home) if place is not None]
    if _on_one_host(world):
        places.append(Path(tempfile.gettempdir()) / f"{FOLDER}-{os.geteuid()}")
    return list(dict.fromkeys(places))


def say(text: str) -> None:
    print(f"rankwise: {text}", file=sys.stderr, flush=True)


class Wait:
    """When to report a wait: first in a short line, and after DETAIL_AFTER_S with all details, at growing intervals."""

    SHORT = "torch may still be loading there"

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._after_s = 0.0

    @property
    def next_s(self) -> float:
        """The time (monotonic) of the next report."""
        if not self._after_s:
            return self.began + SAY_AFTER_S
        return self.began + max(DETAIL_AFTER_S, 2 * self._after_s if self._after_s >= DETAIL_AFTER_S else 0.0)

    def due(self, now: float) -> str:
        """`short`, `whole`, or empty if nothing is to be printed."""
        if now < self.next_s:
            return ""
        self._after_s = now - self.began
        return "whole" if self._after_s >= DETAIL_AFTER_S else "short"

    def told(self, now: float, of: str) -> str:
        return f"has waited {now - self.began:.0f} s for {of}"


CURE = (
    "set MASTER_ADDR (rank 0's host) and MASTER_PORT (a free port there) before the launcher, or call "
    'rankwise.init(rdzv="HOST:PORT") with them'
)


# --- rank 0


@dataclass
class _Guest:
    """A connection. It becomes a rank when it has proved that it knows the secret."""

    conn: socket.socket
    nonce: str
    buffer: bytes = b""
    rank: int | None = None
    host: str = ""
    home: str = ""
    local: str = ""


@dataclass
class Gathering:
    """The part of rank 0: announce the address, wait for all ranks, and release them together."""

    world: World
    start: str
    folders: Sequence[Path]
    files: list[Path] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._secret = secrets.token_hex(16)
        self._guests: dict[socket.socket, _Guest] = {}
        self._refused = ""
        self._listener = network.listen(loopback=_on_one_host(self.world))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._armed = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        try:
            if self._armed:
                signal.signal(signal.SIGTERM, self._on_sigterm)
            self._publish()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _on_sigterm(self, *_: object) -> None:
        """If the job is cancelled or requeued, remove the file, and let the signal end the process as usual."""
        self.__exit__()
        os.kill(os.getpid(), signal.SIGTERM)

    def __exit__(self, *_: object) -> None:
        for path in self.files:
            start_file.remove(path, self._secret)
        if self._armed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for conn in [*self._guests, self._listener]:
            conn.close()
        self._selector.close()

    def wait(self, timeout_s: float) -> None:
        """Return when every rank is here. After `timeout_s`, all ranks raise WorldError with the ranks that are missing."""
        wait = Wait()
        deadline = wait.began + timeout_s
        while missing := self.missing():
            now = time.monotonic()
            if now >= deadline:
                raise WorldError(self._verdict(missing, timeout_s))
            if due := wait.due(now):
                whole = due == "whole" or self._refused
                why = f"{self._where()}{self._refused}" if whole else Wait.SHORT
                say(f"rank 0 {wait.told(now, self._of(missing))}; {why}")
            for key, _ in self._selector.select(min(wait.next_s, deadline) - now):
                self._accept() if key.fileobj is self._listener else self._hear(self._guests[key.fileobj])  # type: ignore[index]

    def missing(self) -> list[int]:
        """The ranks that have not connected, or have disconnected again."""
        here = {guest.rank for guest in self._guests.values()}
        return [rank for rank in range(1, self.world.world_size) if rank not in here]

    def reached_at(self) -> str | None:
        """The address of this host at which all ranks have reached it: loopback if all are on this host; None if the ranks have
        used different addresses."""
        outside = {
            guest.local for guest in self._guests.values() if guest.rank is not None and not network.is_loopback(guest.local)
        }
        return "127.0.0.1" if not outside else next(iter(outside)) if len(outside) == 1 else None

    def release(self, port: int, address: str | None = None) -> Meeting:
        """Tell every rank that the store listens at `port` of `address`. If `address` is None, each rank uses the address to
        which it has connected."""
        ranks = {guest.rank: guest for guest in self._guests.values() if guest.rank is not None}
        homes = list(dict.fromkeys([network.home(), *(ranks[rank].home for rank in sorted(ranks))]))
        outside = next((g.local for g in ranks.values() if not network.is_loopback(g.local)), None)
        interface = network.interface_of(outside) if outside is not None else None
        for guest in ranks.values():
            go = {
                "port": port,
                "node_rank": homes.index(guest.home),
                "hosts": len(homes),
                "interface": interface,
                "address": address,
            }
            _send(guest.conn, {"go": go})
        return Meeting(address or "127.0.0.1", port, 0, interface if len(homes) > 1 else None)

    def _publish(self) -> None:
        addresses = ["127.0.0.1"] if _on_one_host(self.world) else network.own_addresses()
        port = self._listener.getsockname()[1]
        record = {
            "addresses": addresses, "port": port, "secret": self._secret, "home": network.home(), "host": platform.node(),
            "pid": os.getpid(), "processes": network.inode("/proc/self/ns/pid"),
        }  # fmt: skip
        problems = []
        for folder in self.folders:
            try:
                self.files.append(start_file.write(folder / self.start, record))
            except (OSError, RunDirError) as error:
                problems.append(str(error))
            if self.files and _on_one_host(self.world):
                break  # on one host, one folder that can be written is enough
        if not self.files:
            raise WorldError(f"rank 0 cannot write a file with its address: {'; '.join(problems)}; {CURE}")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            conn, _ = self._listener.accept()
            conn.setblocking(False)
            guest = _Guest(conn, secrets.token_hex(16), local=network.plain(conn.getsockname()[0]))
            self._guests[conn] = guest
            self._selector.register(conn, selectors.EVENT_READ)
            _send(conn, {"challenge": guest.nonce})

    def _hear(self, guest: _Guest) -> None:
        try:
            data = guest.conn.recv(_LINE_BYTES)
            guest.buffer += data
            if not data or len(guest.buffer) > _LINE_BYTES:
                raise OSError("it left")
            if guest.rank is None and b"\n" in guest.buffer:
                self._admit(guest, json.loads(guest.buffer))
        except (OSError, ValueError, KeyError, TypeError):  # it has disconnected, or is not one of our ranks
            self._drop(guest)

    def _admit(self, guest: _Guest, told: dict[str, Any]) -> None:
        rank, size = int(told["rank"]), int(told["world_size"])
        if not network.is_proof(told["proof"], self._secret, self.start, guest.nonce, str(rank)):
            raise ValueError("it does not know the secret")
        answer = {"proof": network.proof(self._secret, self.start, str(told["nonce"]))}
        place = f"process {told['pid']} on {told['host']}"
        other = next((g for g in self._guests.values() if g.rank == rank), None)
        refusal = None
        if size != self.world.world_size or not 0 < rank < size:
            refusal = (
                f"{place} is rank {rank} of {size}, but rank 0 on {platform.node()} is one of {self.world.world_size} ranks"
            )
        elif other is not None:
            refusal = (
                f"{place} is rank {rank}, and so is a process on {other.host}: the script was started twice with the same id"
            )
        if refusal is not None:
            self._refused = f"; refused: {refusal}"
            _send(guest.conn, {**answer, "refused": f"{refusal}; start the script once per job step, or {CURE}"})
            raise ValueError(refusal)
        guest.host, guest.home, guest.rank = str(told["host"]), str(told["home"]), rank
        _send(guest.conn, answer)

    def _drop(self, guest: _Guest) -> None:
        if guest.rank is not None:
            self._refused = f"; rank {guest.rank} on {guest.host} connected and then disconnected"
        self._selector.unregister(guest.conn)
        del self._guests[guest.conn]
        guest.conn.close()

    def _of(self, missing: Sequence[int]) -> str:
        return f"{numbered('rank', missing, ranges=True)} of {self.world.world_size} ({self.world.source})"

    def _where(self) -> str:
        port = self._listener.getsockname()[1]
        return f"rank 0 listens on {platform.node()}, port {port}, as is written in {' and '.join(map(str, self.files))}"

    def _verdict(self, missing: Sequence[int], timeout_s: float) -> str:
        text = (
            f"{self._of(missing)} did not connect to rank 0 within {timeout_s:g} s; {self._where()}{self._refused}; if all "
            f"ranks have started, a node does not see this folder, or cannot reach {platform.node()}: {CURE}"
        )
        for guest in self._guests.values():
            if guest.rank is not None:
                with contextlib.suppress(OSError):
                    _send(guest.conn, {"refused": text})
        return text


# --- the other ranks


def join(world: World, start: str, folders: Sequence[Path], timeout_s: float) -> Meeting:
    """Find rank 0 and wait until all ranks have connected. Raises WorldError with the places that were searched if rank 0 is
    not found in time, and WorldError with rank 0's message if other ranks are missing."""
    wait = Wait()
    deadline = wait.began + timeout_s
    while True:
        why = []
        for folder in folders:
            try:
                meeting = _knock(folder / start, world, start, deadline)
            except NotHereError as reason:
                why.append(str(reason))
            else:
                return meeting
        now = time.monotonic()
        looked = f"{'; '.join(why)} (as seen on {platform.node()})"
        if now >= deadline:
            raise WorldError(
                f"rank {world.rank} of {world.world_size} ({world.source}) has not found rank 0 within {timeout_s:g} s: "
                f"{looked}; start in a folder that all nodes share under one path, or {CURE}"
            )
        _say_as_one_of(world, wait, now, "rank 0", looked)
        time.sleep(_POLL_S)


def reach(world: World, address: str, port: int, timeout_s: float) -> None:
    """Return when something listens at the given address. Raises WorldError if nothing does in time."""
    wait = Wait()
    while True:
        try:
            socket.create_connection((address, port), timeout=_ANSWER_S).close()
        except OSError as error:
            why = str(error.strerror or error).lower()
        else:
            return
        now = time.monotonic()
        where = f"rank 0 at {address}, port {port} ({world.origin.get('master_addr')})"
        text = f"{where}: {why} (from {platform.node()})"
        if now >= wait.began + timeout_s:
            raise WorldError(
                f"rank {world.rank} of {world.world_size} ({world.source}) has not reached {text} within {timeout_s:g} s; "
                "the address must be that of rank 0's host, and the port must be free there and open to the other hosts"
            )
        _say_as_one_of(world, wait, now, where, f"{why} (from {platform.node()})")
        time.sleep(_POLL_S)


def _say_as_one_of(world: World, wait: Wait, now: float, of: str, why: str) -> None:
    """Report the wait for rank 0: at first only on rank 1, later on the first rank of each node."""
    due = wait.due(now)
    if due == "short" and world.rank == 1:
        say(f"rank {world.rank} {wait.told(now, of)}; {Wait.SHORT}")
    elif due == "whole" and (world.rank == 1 or world.local_rank == 0):
        say(f"rank {world.rank} {wait.told(now, of)}: {why}")


def _knock(path: Path, world: World, start: str, deadline: float) -> Meeting:
    record = start_file.read(path)
    try:
        addresses, port, secret = ways(record), int(record["port"]), str(record["secret"])
    except (KeyError, TypeError, ValueError):
        raise NotHereError(f"{path} was not written by rankwise") from None
    why = "no address"
    for address in dict.fromkeys(addresses):
        with contextlib.closing(_Connection(address)) as caller:
            try:
                caller.prove(port, secret, start, world)
            except (OSError, ValueError, KeyError, TypeError) as error:
                text = getattr(error, "strerror", None) or str(error)
                why = f"at {address}, port {port}: {text.lower()}"
                continue
            try:
                return caller.let_go(max(deadline - time.monotonic(), 0) + _VERDICT_S, network.home() == record.get("home"))
            except OSError:
                why = f"rank 0 on {record.get('host')} answered and then disconnected"
    raise NotHereError(f"no rank 0 answers at the address in {path} ({why})")


class _Connection:
    """The connection of this rank to rank 0, at one of its addresses."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._conn: socket.socket | None = None
        self._buffer = b""

    def prove(self, port: int, secret: str, start: str, world: World) -> None:
        """Raises OSError or ValueError unless the process there knows the secret, WorldError if it refuses this rank."""
        self._conn = socket.create_connection((self._address, port), timeout=_ANSWER_S)
        nonce = secrets.token_hex(16)
        proof = network.proof(secret, start, str(self._receive(_ANSWER_S)["challenge"]), str(world.rank))
        me = {
            "rank": world.rank,
            "world_size": world.world_size,
            "host": platform.node(),
            "home": network.home(),
            "pid": os.getpid(),
        }
        _send(self._conn, {**me, "home": network.home(), "nonce": nonce, "proof": proof})
        answer = self._receive(_ANSWER_S)
        if not network.is_proof(answer["proof"], secret, start, nonce):
            raise ValueError("another program answers there")
        if "refused" in answer:
            raise WorldError(str(answer["refused"]))

    def let_go(self, timeout_s: float, same_host: bool) -> Meeting:
        """Wait until all ranks have connected. Raises OSError if rank 0 exits first, WorldError with its message if it gives
        up."""
        assert self._conn is not None
        told = self._receive(timeout_s)
        if "refused" in told:
            raise WorldError(str(told["refused"]))
        go = told["go"]
        own = network.interface_of(network.plain(self._conn.getsockname()[0])) if not same_host else go["interface"]
        return Meeting(go["address"] or self._address, int(go["port"]), int(go["node_rank"]), own if go["hosts"] > 1 else None)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._conn is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._conn.settimeout(max(deadline - time.monotonic(), 0.001))
            data = self._conn.recv(_LINE_BYTES)
            if not data or len(self._buffer) > _LINE_BYTES:
                raise OSError("it hung up")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("another program answers there")
        return message

    def close(self) -> None:
        if self._conn is not None:
            self._conn.close()


def _send(conn: socket.socket, message: dict[str, Any]) -> None:
    conn.sendall(json.dumps(message).encode() + b"\n")


def _on_one_host(world: World) -> bool:
    return world.local_world_size == world.world_size
