"""Writes that survive a power cut, on file systems that offer less than others."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rankwise.host import disk


@pytest.mark.parametrize("why", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_folder_whose_file_system_cannot_flush_folders_is_no_error_and_a_file_is(
    why: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_fd: int) -> None:
        raise OSError(why, os.strerror(why))

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", refuse)
    disk.fsync(tmp_path)
    with pytest.raises(OSError, match=os.strerror(why)):
        disk.fsync(tmp_path / "file")


def test_a_folder_that_its_disk_does_not_write_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        disk.fsync(tmp_path)
