"""The checkpoints in one folder, and what this process knows about each: the newest, the best, the corrupted, those to remove.

    catalog = Catalog(folder, Retention(2), None, None)
    found = catalog.find_newest({}, catalog.verify)      # (folder, manifest), or None
    gone = catalog.prune(newest)

Nothing here is collective. If there is a mirror, the main rank copies from it what is missing in the folder.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.folders import checkpoints_in, order, remove
from rankwise.checkpoint.manifest import Manifest, saved_at
from rankwise.checkpoint.mirror import Mirror
from rankwise.checkpoint.retention import Best, Retention
from rankwise.dist import comm, log
from rankwise.errors import CheckpointError, UnreadableError

Metrics = Mapping[str, float | None]


class Catalog:
    """For a rank that writes to this folder, or reads it for its node."""

    def __init__(self, folder: Path, retention: Retention, best: Best | None, mirror: Mirror | None) -> None:
        self.folder = folder
        self._retention = retention
        self._best = best
        self._mirror = mirror
        self._damaged: set[Path] = set()
        self._whole: set[Path] = set()
        self._replaced: set[str] = set()
        self._metrics: dict[Path, tuple[tuple[int, int, int], Metrics]] = {}

    def all(self) -> list[Path]:
        """Every checkpoint's folder, the oldest first. Not verified."""
        return checkpoints_in(self.folder)

    def times_saved(self, step: int) -> int:
        """How often a step was saved: twice, if an attempt resumed from an older checkpoint. Then both exist until the first is
        removed. Raises CheckpointError if the folder cannot be read."""
        return max((time for path in self.all() for saved, time in [order(path)] if saved == step), default=0)

    def mark_whole(self, folder: Path) -> None:
        """Remember as intact: this process has written it, or has read all of it."""
        self._whole.add(folder)
        self._damaged.discard(folder)

    def prune(self, newest: Path) -> list[str]:
        """Keep the last few up to `newest`, the best, the young, and those of named steps. Corrupted ones do not count, and are
        removed when a newer one is intact. Those after `newest` were not loaded, so they are corrupted or could not be read.
        Returns the names of those that were removed."""
        best, unread = self._search_best()
        older = [path for path in self.all() if order(path) < order(newest)]
        again = [path for path in older if order(path)[0] == order(newest)[0] or path in self._damaged]
        now = time.time()
        ages = {path: now - _saved_at(path, now) for path in older if path not in again}
        gone = [old for old in [*again, *self._retention.find_gone({**ages, newest: 0.0})] if old not in {best, *unread}]
        for old in gone:
            remove(old)
        return [old.name for old in gone]

    # --- the newest

    def find_newest(self, damaged: dict[Path, str], look: Callable[[Path], Manifest]) -> tuple[Path, Manifest] | None:
        """The newest that is not in `damaged`; `look` reads it, and those that are corrupted or cannot be read are added to
        `damaged`, unless the mirror has an intact copy. None if there is no checkpoint.

        Another process may save and prune at the same time. Raises CheckpointError if all checkpoints are corrupted.
        """
        while left := [path for path in self.all() if path not in damaged]:
            folder = left[-1]
            try:
                return folder, look(folder)
            except CheckpointError as error:
                # If it is missing, its writer has saved a newer one: look again.
                if folder.exists() and not self._replace(folder.name):
                    damaged[folder] = str(error)
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is intact ({next(iter(damaged.values()))}); "
                "start a new run with --fresh or --name NAME"
            )
        return None

    def verify(self, folder: Path) -> Manifest:
        """Read every byte. If the checkpoint is corrupted, report and remember this."""
        manifest = self._look_at(folder, manifests.verify)
        self._whole.add(folder)
        return manifest

    def glance(self, folder: Path) -> Manifest:
        """Check the manifest, and the lengths of the files."""
        return self._look_at(folder, manifests.glance)

    def check_to_load(self, folder: Path, may_be_new: Collection[str]) -> Manifest:
        """As `glance`; as `verify`, if a part in `may_be_new` is missing in an older checkpoint: after a load that failed, the
        part would not start from scratch there."""
        manifest = self.glance(folder)
        new = {name for name in may_be_new if manifest.has(name)}
        older = [path for path in self.all() if order(path) < order(folder)] if new else []
        return self.verify(folder) if any(_lacks(path, new) for path in older) else manifest

    def _look_at(self, folder: Path, look: Callable[[Path], Manifest]) -> Manifest:
        try:
            return look(folder)
        except CheckpointError as error:
            self._pass_over(folder, error)
            raise

    def _pass_over(self, folder: Path, error: CheckpointError) -> bool:
        """Report it, and remember it if it is corrupted: one that only cannot be read may be the best. False if it is missing
        instead: the process that writes here has removed it."""
        if not folder.exists():
            return False
        if not isinstance(error, UnreadableError):
            self._damaged.add(folder)
        self._whole.discard(folder)
        log.warn(f"skipped a checkpoint: {error}", force=not comm.is_main())
        return True

    def give_up(self, folder: Path, error: CheckpointError, damaged: dict[Path, str]) -> None:
        """Called when a rank has read other bytes than were written, or none. The mirror may have an intact copy."""
        if self._pass_over(folder, error) and not self._replace(folder.name):
            damaged[folder] = str(error)

    # --- the best

    def find_best(self) -> Path | None:
        """Reads the checkpoints that this process has neither written nor read before."""
        return self._search_best()[0]

    def _search_best(self) -> tuple[Path | None, list[Path]]:
        """(the best, those that cannot be read and may be better)."""
        if self._best is None:
            return None, []
        measured: dict[Path, Metrics] = {}
        unread: list[Path] = []
        # If a step was saved twice with equal metrics, use the last one, from which runs resume.
        for folder in sorted(self.all(), key=lambda path: (order(path)[0], -order(path)[1])):
            try:
                measured[folder] = self._metrics_of(folder)
            except UnreadableError:
                unread.append(folder)
            except CheckpointError:  # corrupted
                pass
        self._metrics = {folder: kept for folder, kept in self._metrics.items() if folder in measured}
        for folder in self._best.order(measured):
            if folder in self._damaged:
                continue
            try:
                if folder not in self._whole:
                    self.verify(folder)
                return folder, unread
            except UnreadableError:
                unread.append(folder)
            except CheckpointError:
                pass
        return None, unread

    def _metrics_of(self, folder: Path) -> Metrics:
        """Reads a manifest once, unless its file changes: with hundreds of checkpoints to look through, each save and each
        evaluation would take seconds. Raises CheckpointError as `Manifest.read`."""
        file = None
        with contextlib.suppress(OSError):  # `read` has the words for it
            found = (folder / manifests.NAME).stat()
            file = found.st_ino, found.st_mtime_ns, found.st_size
        if file is not None and folder in self._metrics and self._metrics[folder][0] == file:
            return self._metrics[folder][1]
        metrics = Manifest.read(folder).metrics
        if file is not None:
            self._metrics[folder] = file, metrics
        return metrics

    def is_before_all(self, best: Best, rank: float) -> bool:
        """Whether a checkpoint with this `rank` (Best.rank) would be the best."""
        folder = self.find_best()
        known = best.rank(self._metrics_of(folder)) if folder is not None else None
        return known is None or rank < known

    # --- the mirror

    def bring(self) -> None:
        """Copy the newest checkpoint from the mirror, if it is newer than those here, and the best one, if it is not here.
        Raises CheckpointError if the mirror cannot be read and no checkpoint is here: the run must not start from scratch
        without notice."""
        if self._mirror is None:
            return
        here = self.all()
        try:
            names = self._mirror.names()
        except CheckpointError as error:
            if not here:
                raise
            log.warn(f"{error}; using the local checkpoints")
            return
        for name in reversed(names):
            if (here and order(Path(name)) <= order(here[-1])) or self._replace(name):
                break
        if self._best is not None:
            self._bring_best(self._best, self._mirror, names)

    def _bring_best(self, best: Best, mirror: Mirror, names: list[str]) -> None:
        """Without it, a worse checkpoint would become the best."""
        here = {path.name for path in self.all()}
        measured = {}
        for name in sorted({*here, *names}, key=lambda name: order(Path(name))):
            try:
                manifest = Manifest.read(self.folder / name) if name in here else mirror.read_manifest(name)
            except CheckpointError as error:
                if name not in here:
                    log.warn(f"skipped a checkpoint: {error}")
            else:
                measured[name] = manifest.metrics
        for name in best.order(measured):
            if name in here or self._replace(name):
                break

    def _replace(self, name: str) -> bool:
        """Copy it from the mirror, at most once: if the copy cannot be read either, another one would not help."""
        if self._mirror is None or not comm.is_main() or name in self._replaced:
            return False
        try:
            self._damaged.discard(self._mirror.fetch(name, self.folder))
        except CheckpointError as error:
            log.warn(f"skipped a checkpoint: {error}")
            return False
        self._replaced.add(name)
        log.say(f"{name} was copied from {self._mirror.url}")
        return True


def _lacks(folder: Path, parts: Collection[str]) -> bool:
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:  # then it is not loaded either
        return False
    return not all(map(manifest.has, parts))


def _saved_at(path: Path, otherwise: float) -> float:
    try:
        return saved_at(path)
    except OSError:  # another process has removed it
        return otherwise
