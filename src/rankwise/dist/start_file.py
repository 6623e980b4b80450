"""The file through which the ranks of one start find rank 0: its name, its folder, and removing the files of killed ranks.

path = write(folder / file_name(start), record);  read(path);  remove(path, secret)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankwise.errors import RunDirError
from rankwise.host import network, processes
from rankwise.ipc import address_file

_LEFT_BEHIND_S = 86400.0  # a file this old is from a rank 0 that was killed before it could remove the file


class NotHereError(Exception):
    """Rank 0 cannot be found through this file, or not yet."""


def file_name(start: str) -> str:
    """`start` as a file name: without path separators, and not too long."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", start).lstrip(".")
    return name if len(name) <= 100 and name == start else f"{name[:80]}-{hashlib.sha256(start.encode()).hexdigest()[:12]}"


def write(path: Path, record: Mapping[str, Any]) -> Path:
    """Returns `path`. Raises OSError or RunDirError if the folder cannot be created or written."""
    for attempt in range(3):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            _clear_away(path.parent)
            address_file.write(path, record)
            break
        except (OSError, RunDirError):
            if path.parent.exists() or attempt == 2:  # another start has just removed the folder: try once more
                raise
    return path


def _clear_away(folder: Path) -> None:
    """Remove the files of killed ranks."""
    for old in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _LEFT_BEHIND_S or _is_of_a_dead_process(old):
                old.unlink()


def read(path: Path) -> dict[str, Any]:
    """Raises NotHereError if there is no such file, or it belongs to another user."""
    try:
        return address_file.read(path, os.O_NOFOLLOW)
    except address_file.OtherUserError as error:
        raise NotHereError(f"{path} belongs to user {error.owner}, and this process to user {os.geteuid()}") from None
    except OSError as error:
        raise NotHereError(f"{path}: {str(error.strerror).lower()}") from None
    except ValueError:
        raise NotHereError(f"{path} was not written by rankwise") from None


def _is_of_a_dead_process(path: Path) -> bool:
    """Whether the rank 0 that wrote this file was on this host and has exited."""
    try:
        record = read(path)
        here = (record["home"], record["processes"]) == (network.home(), network.inode("/proc/self/ns/pid"))
        return here and processes.start_time(int(record["pid"])) is None
    except (NotHereError, KeyError, TypeError, ValueError):
        return False


def remove(path: Path, secret: str) -> None:
    """Remove only our own file: a later start of the same name may have written another one. Also remove the folder if it is
    empty."""
    address_file.remove(path, secret, os.O_NOFOLLOW)
    with contextlib.suppress(OSError):
        path.parent.rmdir()
