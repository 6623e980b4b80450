"""Writes that survive a power cut.

os.rename(temporary, final)
fsync(final.parent)                # a name is its folder's
"""

from __future__ import annotations

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Of a file or a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
