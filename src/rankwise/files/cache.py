"""Copies of remote or slow files on a local disk: each is made once, kept while it is used, and removed when space is needed.

    cache = FileCache("/scratch/me")
    cache.paths(["s3://bucket/train-0.h5", "/nfs/train-1.h5"])    # ["/scratch/me/rankwise-1000/train-0-5f1c...h5", ...]

If several processes need a file, one copies it and the others wait. They use kernel locks (flock), which end with their
process. An incomplete copy has another name, so a copy is complete or absent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from rankwise.dist import log
from rankwise.errors import ConfigError, DataError
from rankwise.files.remote import FileFacts, RemoteFile, facts, is_remote
from rankwise.host import machine
from rankwise.host.arguments import PATH, SEQUENCE, Argument, takes
from rankwise.host.disk import fsync, reserve
from rankwise.host.patience import Patience
from rankwise.host.text import count, size

_SOURCES = Argument(
    lambda value: SEQUENCE.accepts(value) and all(map(PATH.accepts, value)), 'paths or URLs in a list: ["s3://bucket/x.h5"]'
)

_PIECE = 8 << 20
_POLL_S = 0.1
_SAY_AFTER_S, _SAY_EVERY_S = 10.0, 60.0

_UNUSED_S = 30 * 24 * 3600.0
"""A copy that was not used for this time is removed when another is made."""

_FREE, _FREE_BYTES = 0.05, 10 << 30
"""This share of the disk stays free, but at most this many bytes."""

_COPY = re.compile(r".*-[0-9a-f]{16}(\.[^/]*)?")  # other files there were not made by rankwise
_PART = ".part"  # after the name of an incomplete copy


class FileCache:
    """Copies of one user in a folder of this machine. If the size or time of a file changes, it gets a new copy.

    A copy in use is never removed. When a new copy is made, those that were not used for 30 days are removed, and then those
    used longest ago, until there is space, with 5 % of the disk left free (at most 10 GiB).
    """

    @takes(folder=PATH)
    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._given = os.fspath(folder)
        if is_remote(self._given):
            raise ConfigError(
                f"cache={self._given!r} is a URL, but copies need a folder of this machine; give a path like '/scratch/me'"
            )
        self._folder = Path(folder).absolute() / f"rankwise-{os.getuid()}"
        self._used: dict[Path, _Use] = {}
        self._sources: dict[Path, str] = {}

    @takes(sources=_SOURCES)
    def paths(self, sources: Sequence[str | os.PathLike[str]]) -> list[str]:
        """The paths of the copies, in this order. They stay as long as this object exists, in this process and in those that it
        is sent to.

        If a source cannot be copied, it is used directly, and a warning says why: training continues without a cache. Raises
        DataError for a source that cannot be read.
        """
        given = [os.fspath(source) for source in sources]
        known = {source: facts(source) for source in given}
        machine.allow_open_files(len(self._used) + len(known) + machine.OTHER_FILES)  # each copy stays open, with its lock
        copies: dict[str, str] = {}
        why = None
        for wait in (False, True):  # first those that no other process is copying
            for source in (source for source in known if source not in copies):
                try:
                    copy = self._copy_of(source, known[source], wait)
                except OSError as error:
                    why = error.strerror or str(error)
                    if wait:
                        continue
                    break
                if copy is not None:
                    copies[source] = str(copy)
        if left := [source for source in known if source not in copies]:
            log.say_per_node(
                f"warning: cache={self._given!r}: {why}; {count(len(left), 'file')} of {len(known)} are read without a copy: "
                f"{left[0]}{', ...' if len(left) > 1 else ''}"
            )
        return [copies.get(source, source) for source in given]

    def source_of(self, path: str) -> str | None:
        """The source of this copy; None if it is no copy of this object."""
        return self._sources.get(Path(path))

    def sources_in(self, text: str) -> str:
        """`text`, with the source instead of the path of each copy."""
        for path, source in self._sources.items():
            text = text.replace(str(path), source)
        return text

    def _copy_of(self, source: str, known: FileFacts, wait: bool) -> Path | None:
        """None if another process is copying it and `wait` is False. Raises OSError if a copy is not possible."""
        self._check_folder()
        path = self._folder / _name(source, known)
        patience = Patience(math.inf, _SAY_AFTER_S, _SAY_EVERY_S)
        while True:
            if (use := _use(path, known.size)) is not None:
                self._used[path], self._sources[path] = use, source
                return path
            with _alone(path.with_name(path.name + _PART), os.O_CREAT) as part:
                if part is not None:
                    with contextlib.suppress(FileExistsError):
                        self._make(path, part, source, known)
                    continue
            if not wait:
                return None
            if patience.due():
                log.say_per_node(f"waiting for another process to copy {source} to {path} ({patience.waited_s:.0f} s so far)")
            time.sleep(_POLL_S)

    def _make(self, path: Path, part: int, source: str, known: FileFacts) -> None:
        """Copy into the open file `part`, and rename it. Raises FileExistsError if another process has made the copy."""
        unfinished = path.with_name(path.name + _PART)
        try:
            if path.exists():
                raise FileExistsError
            self._make_room(known.size or 0)
            os.ftruncate(part, 0)
            reserve(part, known.size or 0)
            _copy(source, known, part, path)
            if facts(source) != known:
                raise DataError(f"{source} changed while it was copied: wait until it is complete, and start again")
            os.rename(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        with contextlib.suppress(OSError):
            fsync(self._folder)

    # --- the folder

    def _check_folder(self) -> None:
        """Raises OSError if another user could put a file there, which we would train on."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise OSError(errno.EPERM, f"{self._folder} must be your own folder, which only you can write to")

    def _make_room(self, needed: int) -> None:
        copies = []
        for path in self._folder.iterdir():
            if _COPY.fullmatch(path.name.removesuffix(_PART)):
                with contextlib.suppress(FileNotFoundError):
                    copies.append((path.stat().st_mtime, path))
        for used, path in sorted(copies):
            if path.name.endswith(_PART) or used < time.time() - _UNUSED_S or self._missing(needed) > 0:
                _remove(path)
        if (missing := self._missing(needed)) > 0:
            raise OSError(errno.ENOSPC, f"the copy needs {size(needed)}, and the disk must have {size(missing)} more free")

    def _missing(self, needed: int) -> int:
        """The bytes that must be removed before `needed` bytes can be written."""
        disk = os.statvfs(self._folder)
        left_alone = min(int(disk.f_blocks * disk.f_frsize * _FREE), _FREE_BYTES)
        return needed + left_alone - disk.f_bavail * disk.f_frsize

    # --- sent to another process

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_used": list(self._used)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _used={})
        for path in state["_used"]:
            with contextlib.suppress(OSError):
                if (use := _use(path, None)) is not None:
                    self._used[path] = use


class _Use:
    """A file that is open with a shared lock, so that no process removes it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __del__(self) -> None:
        os.close(self._fd)


def _use(path: Path, expected: int | None) -> _Use | None:
    """None if there is no file of `expected` bytes, or it is being removed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    use = _Use(fd)
    if not _locked(fd, fcntl.LOCK_SH) or not _is_still(fd, path):
        return None
    if expected is not None and os.fstat(fd).st_size != expected:
        del use
        if not _remove(path):
            raise OSError(errno.EBUSY, f"{path} is incomplete, and another process uses it")
        return None
    with contextlib.suppress(OSError):
        os.utime(fd)
    return use


@contextlib.contextmanager
def _alone(path: Path, flags: int = 0) -> Iterator[int | None]:
    """The file, open for writing, with an exclusive lock; None if another process has a lock, or the file is removed."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        yield fd if _locked(fd, fcntl.LOCK_EX) and _is_still(fd, path) else None
    finally:
        os.close(fd)


def _remove(path: Path) -> bool:
    """Remove the file if no process uses it; whether it is gone."""
    with contextlib.suppress(OSError), _alone(path) as fd:
        if fd is not None:
            path.unlink()
    return not path.exists()


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise OSError(error.errno, f"its file system has no locks ({os.strerror(error.errno or 0)})") from None
    return True


def _is_still(fd: int, path: Path) -> bool:
    """Whether `path` is still this file: another process may have removed it before we had the lock."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _name(source: str, known: FileFacts) -> str:
    """`train-0-5f1c0a9b3d2e4f60.h5`."""
    where = source if is_remote(source) else os.path.abspath(source)
    key = hashlib.sha256(repr((where, known)).encode(errors="surrogateescape")).hexdigest()[:16]
    found = PurePosixPath(re.sub(r"[^\w.-]", "_", source.split("?")[0].rsplit("/", 1)[-1]))
    return f"{found.stem[:80]}-{key}{found.suffix[:20]}"


def _copy(source: str, known: FileFacts, fd: int, path: Path) -> None:
    patience = Patience(math.inf, _SAY_AFTER_S, _SAY_EVERY_S)
    done = 0
    with RemoteFile(source) as file:
        while piece := file.read(_PIECE):
            view = memoryview(piece)
            while view:
                view = view[os.write(fd, view) :]
            done += len(piece)
            if patience.due():
                of = f" of {size(known.size)}" if known.size is not None else ""
                log.say_per_node(f"copied {size(done)}{of} of {source} to {path} ({size(int(done / patience.waited_s))}/s)")
    os.fsync(fd)
