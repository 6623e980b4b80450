"""Disks: writes that survive a power cut, and what is there.

os.rename(temporary, final)
fsync(final.parent)                # the folder holds the new name
reserve(file.fileno(), 2**20)
is_folder(Path("runs/of-others"))  # False if this user may not look into it
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from rankwise.errors import ConfigError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""The disk is full, or the quota of this user is used up."""

_NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""The answer of a file system that cannot flush a folder: shared folders of VirtualBox, some of SMB, 9p and FUSE."""

_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM)
"""The answer of a file system or a container that cannot reserve space."""


def exists(path: str | os.PathLike[str]) -> bool:
    """False also in a private folder of another user, and for a name that is too long: there `Path.exists` raises."""
    return os.path.exists(path)  # noqa: PTH110 - see above


def is_folder(path: str | os.PathLike[str]) -> bool:
    """As `exists`, for a folder: `Path.is_dir` raises, too."""
    return os.path.isdir(path)  # noqa: PTH112 - see above


def check_current_folder() -> None:
    """Raises ConfigError if the current folder was removed: relative paths mean nothing then."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the folder that you are in was removed; change to another one") from None


def reserve(fd: int, size: int) -> None:
    """Reserve `size` bytes for a file: OSError if the disk is too full, before anything is written. Where the file system or a
    container cannot reserve, this does nothing."""
    try:
        if size:
            os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise


def fsync(path: Path) -> None:
    """Write a file or a folder to disk; a folder only where its file system can do that."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FSYNC or not path.is_dir():
            raise
    finally:
        os.close(fd)
