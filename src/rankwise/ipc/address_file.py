"""The file with the address at which a process listens: complete or absent, and only its user can read it.

write(path, {"addresses": door.addresses, "port": door.port, "secret": secret, "home": network.home()})
record = read(path);  ways(record);  remove(path, secret)
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankwise.host import network
from rankwise.run.directory import write_text


class OtherUserError(Exception):
    """The file belongs to another user: nothing in it is trusted."""

    def __init__(self, owner: int) -> None:
        super().__init__(owner)
        self.owner = owner


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Raises RunDirError. `record`: addresses, port, secret, home (see `network.home`), and whatever else the reader needs."""
    write_text(path, json.dumps(record), mode=0o600)


def read(path: Path, flags: int = 0) -> dict[str, Any]:
    """Raises OSError if there is no such file, OtherUserError, and ValueError if it is not such a record. `flags`: for
    `os.open`."""
    network.refresh(path)
    with open(os.open(path, os.O_RDONLY | flags), encoding="utf-8") as file:
        if (owner := os.fstat(file.fileno()).st_uid) != os.geteuid():
            raise OtherUserError(owner)
        record = json.load(file)
    if not isinstance(record, dict):
        raise ValueError("it holds no object")
    return record


def remove(path: Path, secret: str, flags: int = 0) -> None:
    """Remove the file if it has this secret: a later start may have written its own. `flags`: as for `read`."""
    with contextlib.suppress(OSError, OtherUserError, ValueError):
        if read(path, flags).get("secret") == secret:
            path.unlink()


def ways(record: Mapping[str, Any]) -> list[str]:
    """The addresses to try, in order: loopback first if the listener is on this host."""
    return [*(["127.0.0.1"] if record.get("home") == network.home() else []), *record["addresses"]]
