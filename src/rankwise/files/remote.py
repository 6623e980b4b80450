"""Files by path or URL (s3://, https://, and others of fsspec); each call has a time limit.

with RemoteFile("s3://bucket/train-0.h5") as file:       # read, seek, tell, readinto
    head = file.read(8)
facts("s3://bucket/train-0.h5")                          # FileFacts(size=34500000, version="...")
expanded("s3://bucket/train-*.h5")                       # ["s3://bucket/train-0.h5", ...]

NFS and the clients of stores may wait forever. So each call runs in its own thread, and a call without an answer after
STALLED_S is an error: the process continues without this thread.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple, TypeVar

from rankwise.errors import DataError, RankwiseError
from rankwise.host.stores import file_system, told

T = TypeVar("T")

STALLED_S = 120.0
"""A call without an answer for this time, including its repetitions, has failed."""

_PAUSES_S = (1.0, 5.0)
"""Pauses before the second and the third try: a connection may break."""

_FINAL = (RankwiseError, FileNotFoundError, PermissionError, IsADirectoryError, ImportError)
"""Errors for which a second try is useless."""

_BLOCK, _BLOCKS = 1 << 18, 16
"""The smallest request in bytes, and how many such blocks are kept: HDF5 reads many small pieces close to each other."""

_VERSION = {"etag", "lastmodified", "mtime", "modified", "md5hash", "contentmd5", "digest", "generation", "created", "crc"}
"""Names that the clients of stores use for the version of a file, in lower case and without - and _."""


class FileFacts(NamedTuple):
    size: int | None
    """Bytes; None if the server does not give the size."""

    version: str
    """Changes when the file changes."""


def is_remote(path: str) -> bool:
    return "://" in path


def facts(path: str) -> FileFacts:
    """Raises DataError if the file does not exist."""
    if is_remote(path):
        return _bounded(path, lambda: _facts_there(path))
    found = _bounded(path, lambda: os.stat(path))
    return FileFacts(found.st_size, str(found.st_mtime_ns))


def _facts_there(url: str) -> FileFacts:
    fs, name = file_system(url, url)
    known = fs.info(name)
    version = {key: value for key, value in known.items() if key.lower().replace("-", "").replace("_", "") in _VERSION}
    return FileFacts(known.get("size"), repr(sorted(version.items())))


def expanded(url: str) -> list[str]:
    """The files that match a pattern with `*`, in the order of their names. A URL without `*` is returned as it is."""
    if "*" not in url:
        return [url]
    fs, name = file_system(url, url)
    first, chain, archive = url.partition("::")  # zip://*.h5::s3://bucket/x.zip: the files are in that archive
    rest = chain + archive if is_remote(first) else ""
    return sorted(fs.unstrip_protocol(found) + rest for found in _bounded(url, lambda: fs.glob(name)))


class RemoteFile(io.RawIOBase):
    """A file to read. A read returns all requested bytes, or those up to the end. Raises DataError with the name of the file if
    it cannot be read or has stalled. Use it in only one thread at a time."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._size: int | None = None
        self._file: Any = None
        self._file_system: Any = None  # that of an archive (zip://) closes it when it is dropped
        self._file_at = self._at = 0
        self._given_up: DataError | None = None
        self._block = functools.lru_cache(_BLOCKS)(self._read_block)
        self._call(lambda: self._piece(0, 0))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._size is not None

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if self._size is None:
            raise DataError(
                f"{self._path}: its server cannot send a part of the file; give cache=FOLDER, a folder of this machine for a "
                "copy"
            )
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        to = memoryview(buffer).cast("B")
        wanted = len(to) if self._size is None else max(min(len(to), self._size - self._at), 0)
        if wanted < _BLOCK and self._size is not None:
            found = b"".join(self._block(n) for n in range(self._at // _BLOCK, -(-(self._at + wanted) // _BLOCK)))
            found = found[self._at % _BLOCK :][:wanted]
        else:
            found = self._read_at(self._at, wanted)
        to[: len(found)] = found
        self._at += len(found)
        return len(found)

    def close(self) -> None:
        self._block.cache_clear()
        if self._given_up is None:  # otherwise it might block here too
            self._drop()
        super().close()

    def _read_block(self, number: int) -> bytes:
        start = number * _BLOCK
        return self._read_at(start, min(_BLOCK, (self._size or 0) - start))

    def _read_at(self, at: int, wanted: int) -> bytes:
        found: bytes = self._call(lambda: self._piece(at, wanted))
        if self._size is not None and len(found) < wanted:
            raise DataError(
                f"{self._path} ends after {at + len(found)} of {self._size} bytes: it was shortened after it was opened"
            )
        return found

    def _call(self, work: Callable[[], T]) -> T:
        if self._given_up is not None:
            raise self._given_up  # its thread may still use the file
        try:
            return _bounded(self._path, work)
        except DataError as error:
            self._given_up = error
            raise

    # --- in the thread of a call

    def _open(self) -> None:
        self._file_at = 0
        if not is_remote(self._path):
            self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115 - it stays open as long as this object
            self._size = os.fstat(self._file.fileno()).st_size
            return
        fs, name = file_system(self._path, self._path)
        self._file_system = fs
        self._file = fs.open(name, "rb", block_size=_BLOCK, cache_type="none")
        self._size = getattr(self._file, "size", None) if self._file.seekable() else None
        if self._size:
            try:
                self._file_at = self._file.seek(self._size - 1)
                self._file_at += len(self._file.read(1))
            except ValueError:  # HTTP: this server does not send parts of a file
                self._file, self._file_at, self._size = fs.open(name, "rb", block_size=0), 0, None

    def _drop(self) -> None:
        if self._file is not None:
            with contextlib.suppress(Exception):
                self._file.close()
        self._file = None

    def _piece(self, at: int, wanted: int) -> bytes:
        found = bytearray()
        try:
            if self._file is None:
                self._open()
            if self._file_at != at:
                self._file.seek(at)
            while len(found) < wanted and (piece := self._file.read(wanted - len(found))):
                found += piece
        except Exception as error:  # the clients of stores raise many types
            self._drop()
            if self._size is None and at > 0:
                raise DataError(
                    f"the connection to {self._path} broke after {at} bytes or more: {told(error)}; start again"
                ) from None
            raise
        self._file_at = at + len(found)
        return bytes(found)


def _bounded(path: str, work: Callable[[], T]) -> T:
    """The result of `work`, which runs in its own thread, up to three times. Raises DataError with `path` for an error or a
    stall."""
    answer: Future[T] = Future()

    def call() -> None:
        for pause_s in (*_PAUSES_S, None):
            try:
                answer.set_result(work())
                return
            except Exception as error:  # the clients of stores raise many types
                if pause_s is None or isinstance(error, _FINAL):
                    answer.set_exception(error)
                    return
                time.sleep(pause_s)

    threading.Thread(target=call, name="rankwise-remote-file", daemon=True).start()
    if not wait([answer], STALLED_S).done:
        raise DataError(
            f"{path} has stalled: nothing came from it for {STALLED_S:.0f} s; check its server, the network and the mount, "
            "and start again"
        )
    try:
        return answer.result()
    except RankwiseError:
        raise
    except FileNotFoundError as error:
        why = f" ({told(error.__cause__)})" if isinstance(error.__cause__, Exception) else ""
        raise DataError(f"{path}: there is no such file{why}") from None
    except Exception as error:
        raise DataError(f"{path} cannot be read: {told(error)}") from None
