"""Pickled values and exceptions for another process of the same user, in files that only this user can read.

data = dumps(value);  write(path, data);  data = take(path)
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import stat
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from rankwise.errors import RunDirError
from rankwise.host.network import refresh
from rankwise.run.directory import write_bytes

Packed = tuple[bytes | None, str]
"""An exception for another process: its pickle, or None if unpickling would not restore it; its traceback."""


def pack_error(error: BaseException, dumps: Callable[[Any], bytes] = pickle.dumps) -> Packed:
    text = "".join(traceback.format_exception(error))
    try:
        pickled = dumps(error)
        back = pickle.loads(pickled)
        back.add_note("")  # fails for a frozen exception
        same = type(back) is type(error) and str(back) == str(error)
    except BaseException:  # a user's class may raise anything here
        same = False
    return (pickled if same else None), text


def unpack_error(packed: Packed, where: str, otherwise: type[Exception]) -> BaseException:
    """The exception, with the traceback that it had in the other process as a note; if it could not be pickled, `otherwise`
    with that text."""
    pickled, text = packed
    if pickled is not None:
        with contextlib.suppress(BaseException):
            error: BaseException = pickle.loads(pickled)
            error.add_note(f"raised {where}:\n{text}")
            return error
    return otherwise(f"raised {where}:\n{text}")


# --- for a process that runs another __main__


class NotPortableError(Exception):
    """A value cannot be pickled for another process; the text gives the reason, and what to type if that helps."""


def dumps(value: Any) -> bytes:
    """As pickle does; with cloudpickle, if installed, what pickle cannot send, or could send only as a name in `__main__`.

    Raises NotPortableError.
    """
    buffer = io.BytesIO()
    try:
        _ByName(buffer).dump(value)
    except Exception as error:  # a user's class may raise anything here
        why = f"{type(error).__name__}: {error}"
    else:
        return buffer.getvalue()
    try:
        import cloudpickle
    except ImportError:
        raise NotPortableError(f"{why}; define it in a separate module, or type: pip install 'rankwise[functions]'") from None
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise NotPortableError(f"{type(error).__name__}: {error}") from None
    return data


class _ByName(pickle.Pickler):
    """Refuses what is defined in `__main__`, which is another module in the process that reads the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in __main__ (the script, the notebook)")
        return NotImplemented


# --- files


def write(path: Path, data: bytes) -> None:
    """Only this user can read the file; it is complete or absent."""
    write_bytes(path, data, mode=0o600)


def read(path: Path) -> bytes:
    """Raises FileNotFoundError; RunDirError unless the file belongs to this user and nobody else can write it."""
    refresh(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunDirError(f"{path} cannot be read: {error.strerror}") from None
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_mode & 0o022:
            raise RunDirError(
                f"{path} (of user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}) is not loaded, because loading it "
                f"runs code: it must belong to user {os.geteuid()}, and nobody else may write to it; remove it"
            )
        return file.read()


def take(path: Path) -> bytes:
    """`read`, then delete the file."""
    data = read(path)
    path.unlink(missing_ok=True)
    return data
