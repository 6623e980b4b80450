"""Writes that survive a power cut.

os.rename(temporary, final)
fsync(final.parent)                # the folder holds the new name
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""The disk is full, or the quota of this user is used up."""


def fsync(path: Path) -> None:
    """Write a file or a folder to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
