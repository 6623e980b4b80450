"""How agents communicate: JSON lines over a connection on which both ends have proved that they belong to the same run.

    door = Door(secret, loopback=False);  door.publish(path, run_id, start)    # the head
    for link, hello in door.callers(): ...
    link, _, _ = knock(addresses, port, secret, {"node": 1})           # another agent, or a command
    link.send({"facts": ...});  for message in link.receive(): ...

A link never waits: it keeps what cannot be written yet, and returns only messages that have arrived. No code is sent over it.
With ssh and qrsh, the link is the stdin and stdout of the command that they start. Otherwise the other agents connect to the
head, whose address, port and secret are in a file in the run directory that only its user can read.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankwise.host import network
from rankwise.ipc import address_file

BEAT_S = 1.0
LOST_S = 15.0
"""An agent that has sent nothing for this time is lost: a host without power or network causes no TCP error."""

_SUSPENDED_S = 5.0  # an agent that has not looked for this time may have been suspended, together with the others

FULL_BYTES = 1 << 20
"""With more unsent bytes, a link takes no output of ranks: the logs are files and can wait."""

_LINE_BYTES = 64 << 20
_ANSWER_S = 5.0

Message = dict[str, Any]


class Link:
    """One end of a connection. `closed`: why the other end is gone; None while it is there. `after`: the beginning of the first
    message; what comes before it is passed over, as a shell that ssh starts may print something (an `echo` in ~/.bashrc)."""

    def __init__(self, reader: int, writer: int, own: Sequence[socket.socket] = (), after: bytes = b"") -> None:
        self._reader = reader
        self._writer = writer
        self._own = own  # kept alive: these sockets own the descriptors
        self._after = after
        self._inbox = b""
        self._unread: list[Message] = []
        self._outbox = b""
        self.closed: str | None = None
        self.heard = self._looked = time.monotonic()
        self._spoke = 0.0
        for fd in (reader, writer):
            os.set_blocking(fd, False)

    @classmethod
    def over(cls, connection: socket.socket) -> Link:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(connection.fileno(), connection.fileno(), [connection])

    def fileno(self) -> int:
        """The descriptor to wait on for messages."""
        return self._reader

    def send(self, message: Message) -> None:
        self._outbox += json.dumps(message).encode() + b"\n"
        self._spoke = time.monotonic()
        self.flush()

    def flush(self) -> None:
        """Write what can be written without waiting."""
        while self._outbox and self.closed is None:
            try:
                self._outbox = self._outbox[os.write(self._writer, self._outbox) :]
            except BlockingIOError:
                return
            except OSError as error:
                self.close(f"its connection broke ({str(error.strerror).lower()})")

    @property
    def full(self) -> bool:
        return len(self._outbox) > FULL_BYTES

    def drain(self, bound_s: float) -> None:
        """Wait until everything is written, at most `bound_s`."""
        deadline = time.monotonic() + bound_s
        while self._outbox and self.closed is None and time.monotonic() < deadline:
            self.flush()
            time.sleep(0.002)

    def beat(self) -> None:
        """Send a heartbeat, if nothing else was sent for a while."""
        if time.monotonic() - self._spoke > BEAT_S:
            self.send({})
        else:
            self.flush()

    def receive(self) -> list[Message]:
        """The messages that have arrived since the last call. Closes the link if the other end is dead or silent."""
        while self.closed is None:
            try:
                data = os.read(self._reader, 1 << 16)
            except BlockingIOError:
                break
            except OSError as error:
                self.close(f"its connection broke ({str(error.strerror).lower()})")
                break
            if not data:
                self.close("its connection closed")
            self._inbox += data
            self.heard = time.monotonic()
        now = time.monotonic()
        if now - self._looked > _SUSPENDED_S:
            self.heard = now
        self._looked = now
        if self.closed is None and now - self.heard > LOST_S:
            self.close(f"no message came from it for {LOST_S:g} s")
        *lines, self._inbox = self._inbox.split(b"\n")
        if len(self._inbox) > _LINE_BYTES:
            self.close("its message is too long")
        messages, self._unread = self._unread, []
        for line in lines:
            if self._after:
                if (begin := line.find(self._after)) < 0:
                    continue
                line, self._after = line[begin:], b""
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict):
                if message:
                    messages.append(message)
            else:
                self.close(f"its message cannot be read: {line[:80].decode(errors='replace')}")
        return messages

    def unread(self, messages: list[Message]) -> None:
        """Put messages back: the next `receive` returns them again."""
        self._unread = messages

    def close(self, why: str) -> None:
        if self.closed is None:
            self.closed = why
            for connection in self._own:
                connection.close()


# --- the head listens


class Door:
    """The port to which other agents connect. Callers that do not know the secret are refused."""

    def __init__(self, secret: str, port: int = 0, loopback: bool = False) -> None:
        """`port` 0: the kernel chooses one. Raises OSError if the port is taken."""
        self.secret = secret
        self._listener = network.listen(loopback, port)
        self._listener.setblocking(False)
        self._coming: list[tuple[Link, str, float, str]] = []
        self._file: Path | None = None
        self.port: int = self._listener.getsockname()[1]
        self.addresses = ["127.0.0.1"] if loopback else network.own_addresses()
        self.seen_at: str | None = None
        """An address of this host, not loopback, at which a caller has connected."""

    def fileno(self) -> int:
        return self._listener.fileno()

    @property
    def coming(self) -> list[Link]:
        """The callers that have not proved yet who they are."""
        return [link for link, *_ in self._coming]

    def publish(self, path: Path, run_id: str, start: str) -> None:
        """Write the address of the door into a file. `start`: an identifier that all agents of this start share."""
        record = {
            "run_id": run_id, "start": start, "addresses": self.addresses, "port": self.port, "secret": self.secret,
            "home": network.home(),
        }  # fmt: skip
        address_file.write(path, record)
        self._file = path

    def callers(self) -> list[tuple[Link, Message]]:
        """The connections that have proved since the last call that they belong to this run, with their first message. Never
        waits."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            link, nonce = Link.over(connection), secrets.token_hex(16)
            here = network.plain(connection.getsockname()[0])
            self._coming.append((link, nonce, time.monotonic() + _ANSWER_S, here))
            link.send({"challenge": nonce})
        admitted, waiting = [], []
        for link, nonce, deadline, here in self._coming:
            said = link.receive()
            if said and self._knows(said[0], nonce):
                link.send({"proof": network.proof(self.secret, "door", str(said[0].get("nonce")))})
                if not network.is_loopback(here):
                    self.seen_at = here
                admitted.append((link, said[0]))
            elif said or link.closed is not None or time.monotonic() > deadline:
                link.close("it does not have the secret of this run")
            else:
                waiting.append((link, nonce, deadline, here))
        self._coming = waiting
        return admitted

    def _knows(self, said: Message, nonce: str) -> bool:
        return network.is_proof(said.get("proof"), self.secret, "caller", nonce)

    def close(self) -> None:
        if self._file is not None:
            address_file.remove(self._file, self.secret)
        for link, *_ in self._coming:
            link.close("the port was closed")
        self._listener.close()


# --- the others call


class NobodyThere(Exception):  # noqa: N818  # not an error: the caller tries again
    """No door of this run was found at these addresses, or not yet."""


def read_door(path: Path) -> Mapping[str, Any]:
    """The record that `publish` wrote. Raises NobodyThere while there is no readable one."""
    try:
        record = address_file.read(path)
        return {key: record[key] for key in ("run_id", "start", "addresses", "port", "secret", "home")}
    except address_file.OtherUserError:
        raise NobodyThere(f"{path} belongs to another user") from None
    except OSError as error:
        raise NobodyThere(f"{path}: {str(error.strerror).lower()}") from None
    except (ValueError, KeyError, TypeError):
        raise NobodyThere(f"{path} was not written by rankwise") from None


def knock(
    addresses: Sequence[str], port: int, secret: str, hello: Message, answer_s: float = _ANSWER_S
) -> tuple[Link, str, str]:
    """Connect to a door: (link, the address that answered, this host's own address on that route). Tries one address after the
    other; adds the address that answered to `hello`, as "route".

    Raises NobodyThere with the reason for each address.
    """
    problems = []
    for address in dict.fromkeys(addresses):
        try:
            connection = socket.create_connection((address, port), timeout=answer_s)
        except OSError as error:
            problems.append(f"{address}, port {port}: {str(error.strerror or error).lower()}")
            continue
        own = network.plain(connection.getsockname()[0])
        link = Link.over(connection)
        if _is_proved(link, secret, {**hello, "route": address}, answer_s):
            return link, address, own
        link.close("it does not have the secret of this run")
        problems.append(f"{address}, port {port}: another program answers there, or another run")
    raise NobodyThere("; ".join(problems) or "no address")


def _is_proved(link: Link, secret: str, hello: Message, answer_s: float) -> bool:
    """Prove to the door that we know the secret, and check that it does too."""
    challenge = _next(link, answer_s)
    nonce = secrets.token_hex(16)
    link.send({**hello, "nonce": nonce, "proof": network.proof(secret, "caller", str(challenge.get("challenge")))})
    return network.is_proof(_next(link, answer_s).get("proof"), secret, "door", nonce)


def _next(link: Link, bound_s: float) -> Message:
    """The next message, or an empty one if none comes in time."""
    deadline = time.monotonic() + bound_s
    while time.monotonic() < deadline and link.closed is None:
        if said := link.receive():
            link.unread(said[1:])
            return said[0]
        time.sleep(0.002)
    return {}
