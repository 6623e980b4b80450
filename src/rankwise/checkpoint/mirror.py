"""Copies of checkpoints at a URL of fsspec (s3://, gs://, sftp://, a path), in case the machine is lost.

    mirror = Mirror("s3://bucket/run-7")
    mirror.offer(checkpoint, gone=["step-00000100"])    # copies in a thread; then removes `gone` from the mirror
    mirror.wait()                                       # at the end, and before the machine is given back
    mirror.names();  mirror.fetch("step-00000400", folder)

Object stores cannot rename. So the manifest, which has the checksums of all files, is written last: without it, a folder is not
a checkpoint.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import uuid
from collections.abc import Collection
from pathlib import Path

from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.folders import is_name, order, put
from rankwise.checkpoint.manifest import Manifest
from rankwise.dist import log
from rankwise.errors import CheckpointError
from rankwise.host.stores import file_system, told

_PATIENCE_S = 2.0
"""After this time, a line reports what the program waits for."""


class Mirror:
    """`url`: a folder for the checkpoints of one run. Raises ConfigError if no installed package knows its protocol."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, root = file_system(self.url, f"mirror={self.url!r}")
        self._root = root.rstrip("/")
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._offered: Path | None = None
        self._gone: set[str] = set()
        self._failed: Path | None = None

    # --- copying to the mirror

    def offer(self, checkpoint: Path, gone: Collection[str] = ()) -> None:
        """Copy it in a thread, after the current copy; if several wait, only the newest is copied.

        After the copy, those named in `gone` are removed from the mirror. A failure is a warning; the next copy may succeed.
        """
        with self._lock:
            self._offered = checkpoint
            self._gone.update(gone)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rankwise-mirror")
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                checkpoint, self._offered = self._offered, None
                if checkpoint is None:
                    self._thread = None
                    return
            self._push(checkpoint)

    def _push(self, checkpoint: Path) -> None:
        try:
            self._copy(checkpoint)
        except Exception as error:  # the clients of stores raise many types
            self._failed = None
            if checkpoint.exists():  # otherwise it was pruned in the meantime, and there is a newer one
                self._failed = checkpoint
                log.warn(
                    f"{checkpoint.name} was not copied to {self.url}: {told(error)}; "
                    "rankwise tries again at the next checkpoint"
                )
            return
        self._failed = None
        with self._lock:
            gone, self._gone = self._gone - {checkpoint.name}, set()
        for name in gone:
            with contextlib.suppress(Exception):  # it remains in the mirror, which only costs money
                self._remove(name)

    def _copy(self, checkpoint: Path) -> None:
        there = f"{self._root}/{checkpoint.name}"
        self._fs.makedirs(there, exist_ok=True)
        files = [path for path in sorted(checkpoint.iterdir()) if path.name != manifests.NAME]
        for path in [*files, checkpoint / manifests.NAME]:
            self._fs.put_file(str(path), f"{there}/{path.name}")

    def _remove(self, name: str) -> None:
        there = f"{self._root}/{name}"
        manifest = f"{there}/{manifests.NAME}"
        # Not fs.rm: it takes a path with [, * or ? as a pattern, which the folder of another run may match. The manifest first:
        # from then on it is not a checkpoint.
        for path in sorted(self._paths_in(there), key=lambda path: path != manifest):
            self._fs.rm_file(path)
        with contextlib.suppress(FileNotFoundError):  # a store without folders
            self._fs.rmdir(there)

    def wait(self) -> None:
        """Wait until the last offered checkpoint is copied; if it failed, try once more. A failure is a warning."""
        failed = self._joined()
        if failed is not None and failed.exists():
            self.offer(failed)
            self._joined()

    def _joined(self) -> Path | None:
        if (thread := self._thread) is not None:
            thread.join(_PATIENCE_S)
            if thread.is_alive():
                log.say(f"waiting until the last checkpoint is copied to {self.url}")
                thread.join()
        return self._failed

    # --- copying from the mirror

    def names(self) -> list[str]:
        """The names of the checkpoints in the mirror, the oldest first. Not verified. Raises CheckpointError if they cannot be
        read."""
        try:
            found = [path for path in self._paths_in(self._root) if is_name(Path(path).name)]
            complete = [Path(path).name for path in found if f"{path}/{manifests.NAME}" in self._paths_in(path)]
        except Exception as error:
            raise CheckpointError(f"{self.url} cannot be read: {told(error)}") from None
        return sorted(complete, key=lambda name: order(Path(name)))

    def _paths_in(self, folder: str) -> list[str]:
        """Empty if there is no such folder. Not `glob`, which takes [, * and ? in the name of the folder as a pattern, and
        not `exists`, which hides the errors of a store."""
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return [path.rstrip("/") for path in self._fs.ls(folder, detail=False)]
        return []

    def read_manifest(self, name: str) -> Manifest:
        """The manifest of a checkpoint in the mirror. Raises CheckpointError."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                self._fs.get_file(f"{self._root}/{name}/{manifests.NAME}", f"{folder}/{manifests.NAME}")
                return Manifest.read(Path(folder))
            except CheckpointError as error:
                raise CheckpointError(f"{name} in {self.url}: {str(error).replace(folder, name)}") from None
            except Exception as error:
                raise CheckpointError(f"{name} cannot be copied from {self.url}: {told(error)}") from None

    def fetch(self, name: str, folder: Path) -> Path:
        """Copy a checkpoint into `folder`, verify it, and replace one of the same name. If this raises CheckpointError, nothing
        in `folder` has changed."""
        temporary = folder / f"tmp.{uuid.uuid4().hex}"
        try:
            temporary.mkdir(parents=True)
            for path in self._fs.ls(f"{self._root}/{name}", detail=False):
                self._fs.get_file(path, str(temporary / path.rsplit("/", 1)[-1]))
            manifests.verify(temporary)
            put(temporary, folder / name)
        except CheckpointError as error:
            raise CheckpointError(f"{name} in {self.url}: {str(error).replace(str(temporary), name)}") from None
        except Exception as error:
            raise CheckpointError(f"{name} cannot be copied from {self.url}: {told(error)}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return folder / name
