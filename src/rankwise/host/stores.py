"""Stores that fsspec can access (s3://, gs://, sftp://, https://, a path), and the errors of their clients.

fs, root = file_system("s3://bucket/run-7", "mirror='s3://bucket/run-7'")
"""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakValueDictionary

from rankwise.errors import ConfigError


def file_system(url: str, what: str) -> tuple[Any, str]:
    """(the fsspec file system, the path in it). Raises ConfigError, which begins with `what`, if no installed client supports
    the protocol."""
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f"{what} needs fsspec, which is not installed; type: pip install 'rankwise[remote]'") from None
    try:
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    except (ImportError, ValueError) as error:  # the client of that store is not installed or does not exist
        raise ConfigError(
            f"{what}: {told(error)}; give a path, or a URL such as s3://BUCKET/NAME or gs://BUCKET/NAME, "
            "and install what fsspec needs for that store (pip install s3fs, gcsfs, ...)"
        ) from None
    _made[id(fs)] = fs
    return fs, str(root)


_made: WeakValueDictionary[int, Any] = WeakValueDictionary()
_inherited: list[Any] = []


def _keep_in_child() -> None:
    """In a forked process no client of its parent is ever finalised: fsspec would ask a thread to close the connections that
    only the parent has, and wait for it for a second or more, for each client."""
    _inherited.extend(_made.values())


os.register_at_fork(after_in_child=_keep_in_child)


def told(error: Exception) -> str:
    """An error of any type, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
