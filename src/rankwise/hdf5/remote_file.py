"""A file at a URL that h5py reads.

    file = h5py.File(RemoteHDF5("https://host/train.h5"), "r")

h5py holds its lock while it waits for this file. A garbage collection runs in any thread, and an object of h5py that it frees
needs this lock: a thread that fetches the file would wait for a lock which is free only after this thread has fetched it. So
Python's garbage collector is off from the first read in a call of h5py until h5py's lock is free.
"""

from __future__ import annotations

import gc
import os
import threading
from importlib import import_module
from typing import Any

from rankwise.files.remote import RemoteFile


class RemoteHDF5(RemoteFile):
    """h5py alone reads it, and holds its lock at each read."""

    def readinto(self, buffer: Any) -> int:
        _collect_nothing_until_free(import_module("h5py._objects").phil)
        return super().readinto(buffer)


_is_off = False
"""Whether a thread will turn the garbage collector on again. Changed only with h5py's lock."""


def _collect_nothing_until_free(lock: Any) -> None:
    global _is_off
    if not _is_off and gc.isenabled():
        gc.disable()  # first: a collection in the new thread would wait for the lock too
        _is_off = True
        threading.Thread(target=_collect_again, args=(lock,), name="rankwise-collects-again", daemon=True).start()


def _collect_again(lock: Any) -> None:
    global _is_off
    with lock:
        gc.enable()
        _is_off = False


def _begin_in_child() -> None:
    """A forked process has no thread that waits for the lock."""
    global _is_off
    if _is_off:
        gc.enable()
        _is_off = False


os.register_at_fork(after_in_child=_begin_in_child)
