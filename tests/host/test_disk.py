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


@pytest.mark.parametrize("why", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_space_that_a_system_cannot_reserve_is_no_error_and_a_full_disk_is(
    why: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "file").open("wb") as file:
        disk.reserve(file.fileno(), 0)
        disk.reserve(file.fileno(), 4096)
        assert (tmp_path / "file").stat().st_size == 4096
        for number in (why, errno.ENOSPC):

            def refuse(*_: int, number: int = number) -> None:
                raise OSError(number, os.strerror(number))

            monkeypatch.setattr(os, "posix_fallocate", refuse)
            if number == why:
                disk.reserve(file.fileno(), 8192)
        with pytest.raises(OSError, match="No space left on device"):
            disk.reserve(file.fileno(), 8192)
