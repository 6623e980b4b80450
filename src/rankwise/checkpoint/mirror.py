"""A second home for checkpoints, on whatever fsspec reaches (s3://, gs://, sftp://, a path), as a machine may not come back.

    mirror = Mirror("s3://bucket/run-7")
    mirror.offer(checkpoint, gone=["step-00000100"])    # copies in a thread; what has gone here goes there once that is done
    mirror.wait()                                       # at the end, and when the machine is to be given back
    mirror.names();  mirror.fetch("step-00000400", folder)

Object stores rename nothing: a checkpoint is there once its manifest is, which is written last and holds the sums of all files.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import uuid
from collections.abc import Collection
from pathlib import Path

from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.folders import is_name, order, put
from rankwise.dist import log
from rankwise.errors import CheckpointError
from rankwise.host.stores import file_system, told

_PATIENCE_S = 2.0
"""From then on it is said what is waited for."""


class Mirror:
    """`url`: a folder of its own for the checkpoints of one run. Raises ConfigError where nothing here speaks its protocol."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, root = file_system(self.url, f"mirror={self.url!r}")
        self._root = root.rstrip("/")
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._offered: Path | None = None
        self._gone: set[str] = set()
        self._failed: Path | None = None

    # --- copying there

    def offer(self, checkpoint: Path, gone: Collection[str] = ()) -> None:
        """Copy it in a thread, after the one that is under way; of several that wait only the newest is copied.

        Only after it is there, those named in `gone` are removed there. A failure is a warning; the next one may succeed.
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
            if checkpoint.exists():  # else it was pruned meanwhile, and there is a newer one
                self._failed = checkpoint
                log.warn(f"{checkpoint.name} was not copied to {self.url}: {told(error)}; the next checkpoint is tried again")
            return
        self._failed = None
        with self._lock:
            gone, self._gone = self._gone - {checkpoint.name}, set()
        for name in gone:
            with contextlib.suppress(Exception):  # it stays there: no harm but to the bill
                self._remove(name)

    def _copy(self, checkpoint: Path) -> None:
        there = f"{self._root}/{checkpoint.name}"
        self._fs.makedirs(there, exist_ok=True)
        files = [path for path in sorted(checkpoint.iterdir()) if path.name != manifests.NAME]
        for path in [*files, checkpoint / manifests.NAME]:
            self._fs.put_file(str(path), f"{there}/{path.name}")

    def _remove(self, name: str) -> None:
        there = f"{self._root}/{name}"
        if self._fs.exists(there):
            self._fs.rm_file(f"{there}/{manifests.NAME}")  # from now on it is none
            self._fs.rm(there, recursive=True)

    def wait(self) -> None:
        """Until what was offered last is there; one that failed is tried once more. A failure is a warning."""
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

    # --- coming from there

    def names(self) -> list[str]:
        """Of the checkpoints there, the oldest first. Not verified. Raises CheckpointError where the store cannot be read."""
        try:
            self._fs.invalidate_cache()
            found = [path.split("/")[-2] for path in self._fs.glob(f"{self._root}/step-*/{manifests.NAME}")]
        except Exception as error:
            raise CheckpointError(f"{self.url} cannot be read: {told(error)}") from None
        return sorted(filter(is_name, found), key=lambda name: order(Path(name)))

    def fetch(self, name: str, folder: Path) -> Path:
        """Bring a checkpoint into `folder`, verified, in place of one of that name. Raises CheckpointError; then nothing is
        changed here."""
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
