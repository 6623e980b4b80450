"""The checkpoints of one run: complete or absent, verified when loaded. If the newest is corrupted, the one before is used.

    checkpoints = Checkpoints()
    step = checkpoints.resume({"model": model, "optimizer": optimizer, "loader": loader})     # 0 if there is none
    checkpoints.save({"model": model, ...}, step=400)

rankwise keeps the last few, and the best by a metric, if you name one:

    checkpoints = Checkpoints(keep_last=2, keep_best="eval_accuracy", larger_is_better=True)
    checkpoints.save(parts, step=400, metrics={"eval_accuracy": 0.93});  checkpoints.best()

    checkpoints/step-00000400/{manifest.json, model.pt, optimizer.pt, ..., rng.pt}

One file for each Stateful object, written by the main rank; `torch.load(weights_only=True)` reads it. With `sharded=True` each
rank writes a share (sharding.py).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rankwise import errors
from rankwise.checkpoint import divided_parts, from_scratch, own_states, resume, sharding
from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.background import Background, Snapshot
from rankwise.checkpoint.catalog import Catalog
from rankwise.checkpoint.folders import order, remove
from rankwise.checkpoint.manifest import Manifest
from rankwise.checkpoint.mirror import Mirror
from rankwise.checkpoint.replicate import group_by_folder
from rankwise.checkpoint.retention import Best, Retention, finite
from rankwise.checkpoint.writer import CheckpointWriter, Others, await_folder, collect_states, write_share
from rankwise.dist import comm, log, seed
from rankwise.dist.guards import agreed, run_on_firsts, run_on_main, settle
from rankwise.dist.world import checkpoint_scope as scope_of
from rankwise.errors import CheckpointError, ConfigError, DamagedError, UnreadableError
from rankwise.host.arguments import (
    ANYTHING,
    FLAG,
    FROM_ONE,
    FROM_ZERO,
    MAPPING,
    NOT_NEGATIVE,
    PATH,
    SECONDS,
    STEPS,
    TEXT,
    Argument,
    one_of,
    takes,
)
from rankwise.run.lease import Fence
from rankwise.training.open_run import run_path
from rankwise.training.state import Stateful

_PARTS = Argument(
    lambda value: isinstance(value, Mapping), 'the parts by their names: {"model": model, "optimizer": optimizer}'
)


class Checkpoints:
    """Saves checkpoints in `folder`, and loads them. By default: in the run directory, or without a launcher in ./runs/SCRIPT.

    The Trainer saves every `every_s` seconds, `every_steps` steps and `every_epochs` epochs, and at the steps `at_steps`, which
    are never removed. It keeps the last `keep_last`, and those younger than `keep_younger_than_s`. `keep_best`: the name of a
    metric (`eval_loss`); the checkpoint with the lowest value is kept too, or with the highest if `larger_is_better`, which you
    must give unless the metric is a loss. Corrupted checkpoints are removed when a newer one is intact.

    `background`: `save` copies the state and returns, and a thread of the main rank writes the copy while training continues. A
    program that exits earlier finishes the write first; if the write fails, the exit status is 1, with the reason. `wait` waits
    for it. Only one save runs at a time, and it uses as much host memory as the state.

    `sharded`: each rank copies and writes a share of the modules and optimizers, which must be the same on all ranks. This is
    for large states. All ranks must share the folder. Such a checkpoint can be loaded on any number of ranks, sharded or not.

    `scope`: with `main` the main rank writes; with `node` the first rank of each node writes too, for nodes with their own
    disks; None uses `rankwise run --checkpoint-scope`. The newest checkpoint that any node has is loaded; nodes that do not see
    it get a copy through the process group. `mirror`: a URL for fsspec. Checkpoints are copied to it in the background, and
    copied back if the mirror has a newer one or the only intact one. A failure of the mirror is a warning.

    Only one run at a time writes to a folder. Nothing is opened before the first use, so you can create this before `init`.
    """

    @takes(
        folder=PATH.or_none, every_s=NOT_NEGATIVE.or_none, every_steps=FROM_ONE.or_none, every_epochs=FROM_ONE.or_none,
        at_steps=STEPS, keep_last=FROM_ONE, keep_best=TEXT.or_none, larger_is_better=FLAG.or_none,
        keep_younger_than_s=SECONDS.or_none, background=FLAG, sharded=FLAG, scope=one_of("main", "node").or_none,
        mirror=TEXT.or_none, moved={"keep_steps": "it is now at_steps=[...]"},
    )  # fmt: skip
    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        every_s: float | None = 300.0,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        at_steps: Collection[int] = (),
        keep_last: int = 2,
        keep_best: str | None = None,
        larger_is_better: bool | None = None,
        keep_younger_than_s: float | None = None,
        background: bool = True,
        sharded: bool = False,
        scope: str | None = None,
        mirror: str | None = None,
    ) -> None:
        self.every_s, self.every_steps, self.every_epochs = every_s, every_steps, every_epochs
        self.at_steps, self.keep_best, self.is_background = frozenset(at_steps), keep_best, background
        self._given_folder = Path(folder).absolute() if folder is not None else None
        self._given_scope, self._sharded = scope, sharded
        _check_scope(scope, sharded)
        self._best = Best.of(keep_best, larger_is_better)
        self._mirror = Mirror(mirror) if mirror is not None else None
        self._retention = Retention(keep_last, keep_younger_than_s or 0.0, self.at_steps)
        self._groups: list[list[int]] | None = None  # scope node: for each writer, all its ranks
        self._snapshot = Snapshot() if background else None
        self._background = Background()
        self._last: Path | None = None  # the last save that was started; it may still run
        self._others: Others | None = None  # the ranks that the main rank's writer waits for
        self._ends_with: int | None = None  # the process that finishes its write when it exits
        self._is_reported = self._has_saved = False
        self.wait_s = 0.0
        """Seconds that training has waited for saves so far."""

        self.fence: Fence | None = None
        """Checked on the main rank before a checkpoint gets its name: a run that another run has replaced must not save."""

    @property
    def triggers(self) -> dict[str, Any]:
        """When the Trainer saves, as arguments of `rankwise.every`: only those that were given."""
        given = {"seconds": self.every_s, "steps": self.every_steps, "epochs": self.every_epochs}
        return {name: value for name, value in given.items() if value is not None}

    # --- the folder, known at the first use

    @functools.cached_property
    def folder(self) -> Path:
        return self._given_folder or run_path(comm.world(), None) / "checkpoints"

    @property
    def has_folder(self) -> bool:
        """Whether the script has given a folder."""
        return self._given_folder is not None

    @functools.cached_property
    def _scope(self) -> str:
        scope = self._given_scope or scope_of(comm.world())
        _check_scope(scope, self._sharded)
        return scope

    @functools.cached_property
    def _catalog(self) -> Catalog:
        return Catalog(self.folder, self._retention, self._best, self._mirror)

    @functools.cached_property
    def _writer(self) -> CheckpointWriter:
        return CheckpointWriter(self.folder)

    # --- saving

    @takes(parts=_PARTS, step=FROM_ZERO, info=MAPPING.or_none, metrics=MAPPING.or_none)
    def save(
        self,
        parts: Mapping[str, Stateful],
        step: int,
        info: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Collective. Write all parts and the random state of every rank; returns the folder of the checkpoint.

        `metrics`: measured with the parts as they are now, for `keep_best`. Raises CheckpointError on every rank if the
        checkpoint cannot be written; then nothing incomplete is left, and older checkpoints remain. With `background` the
        folder is not complete yet, and an error is that of the previous save (as from `wait`): then this save is not started.
        """
        resume.check_parts(parts)
        own_states.warn_of_left_out(parts)
        began = time.perf_counter()
        try:
            with own_states.averaged(parts):
                folder, own_bytes = self._save(parts, step, info, metrics)
        finally:
            self.wait_s += time.perf_counter() - began
        if not self._has_saved:
            self._has_saved = True
            own_states.say_size(own_bytes, time.perf_counter() - began)
        return folder

    def _save(
        self, parts: Mapping[str, Stateful], step: int, info: Mapping[str, Any] | None, metrics: Mapping[str, float] | None
    ) -> tuple[Path, int]:
        """Collective. (the folder, the bytes of the own states of all ranks)."""
        firsts = [ranks[0] for ranks in self._writers()]
        parts = divided_parts.whole_parts(parts, firsts, self._sharded)
        own = own_states.collect(parts)
        with agreed():
            saved = self._times_saved(step) if comm.rank() in firsts else 0
        mine = (seed.rng_state(), saved, own_states.bytes_of(own))
        streams, times, sizes = zip(*comm.all_gather_object(mine), strict=True)
        every = {resume.RNG: {str(rank): stream for rank, stream in enumerate(streams)}}
        apart = [size for size in sizes if size is not None]
        files_apart: dict[str, Any] = {}
        if apart:
            files_apart = own_states.of_rank(comm.rank(), own) if self._sharded else own_states.gather(own, firsts)
        version = manifests.VERSION_WITH_RANKS if apart else manifests.VERSION
        final = self.folder / (f"step-{step:08d}" + (f"-{max(times) + 1}" if max(times) else ""))

        def record() -> Manifest:
            return Manifest(
                version, step, comm.world_size(), torch.__version__, {}, manifests.take_info(info or {}),
                finite(metrics or {}), asdict(self._best) if self._best is not None else {},
            )  # fmt: skip

        if self._sharded:
            return self._begin(parts, final, record, every, files_apart), sum(apart)
        return run_on_firsts(self._writers(), lambda: self._begin(parts, final, record, every, files_apart)), sum(apart)

    def _times_saved(self, step: int) -> int:
        """How often this step was saved, including the save that still runs."""
        under_way = order(self._last) if self._last is not None and self._background.is_at_work else (-1, 0)
        return max(self._catalog.times_saved(step), under_way[1] if under_way[0] == step else 0)

    def _begin(
        self,
        parts: Mapping[str, Stateful],
        final: Path,
        record: Callable[[], Manifest],
        every: Mapping[str, Any],
        apart: Mapping[str, Any],
    ) -> Path:
        """Collective among the ranks that write one checkpoint: each starts to write its share. A rank that writes for other
        ranks runs this in a guard, alone, and its share is everything. `apart`: what this rank writes in any case."""
        self._conclude()
        self._last = final
        rank, ranks = (0, 1) if comm.is_alone() else (comm.rank(), comm.world_size())
        with agreed():
            manifest = record()
            states = collect_states(parts) | dict(every)
            shares = sharding.divide(parts, states, ranks)
        if len(set(comm.all_gather_object(sharding.digest_tensors(shares, states)))) > 1:
            log.warning_once("sharded=True has no effect: the tensors differ between ranks, so rank 0 writes them all")
            shares = {}
        # With several ranks, the first creates the folder here, so that the others find it; a single rank does it later.
        temporary = run_on_main(self._writer.make_folder, [final]) if ranks > 1 else None
        try:
            with agreed():
                if temporary is not None:
                    await_folder(temporary, rank)
                share = sharding.take_share(rank, shares, states) | dict(apart)
                copied = self._copy(share)
        except BaseException:
            if temporary is not None and rank == 0:  # no rank writes yet
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._others = Others(temporary, ranks) if temporary is not None and rank == 0 else None
        write = functools.partial(self._write, final, share if copied is None else copied, manifest, temporary, rank)
        if copied is None and temporary is None:
            write()
        else:  # with other ranks in a thread: to wait here for their shares would block the ranks
            self._background.start(write)
            self._is_reported = False
            self._end_with_it()
        if not comm.all_agree(copied is not None):
            self._conclude()
        return final

    def _end_with_it(self) -> None:
        """If a save fails after the last line of the script, the exit status must show this."""
        if self._ends_with is None:
            self._ends_with = os.getpid()
            atexit.register(self._say_at_end)

    def _end_without_it(self) -> None:
        """The process no longer keeps this object, and the copy of the state in it, until its end."""
        atexit.unregister(self._say_at_end)
        self._ends_with = None

    def _say_at_end(self) -> None:
        if self._ends_with != os.getpid() or self._is_reported:
            return
        if (error := self.close()) is not None:
            errors.end_process(error)

    def _copy(self, states: dict[str, Any]) -> dict[str, Any] | None:
        """A copy of the states; None if training must wait for the write itself."""
        if self._snapshot is None:
            return None
        try:
            return self._snapshot.take(states)
        except (RuntimeError, MemoryError) as error:  # RuntimeError: torch's form of a MemoryError
            log.warning_once(f"each save waits for the disk: its state cannot be copied ({' '.join(str(error).split())[:200]})")
            return None

    def wait(self) -> None:
        """Collective. Wait until the last save is complete. If it failed, raise its error on every rank, once: CheckpointError
        if it could not be written. Does nothing without `background` or `mirror`."""
        if self._snapshot is None and self._mirror is None:
            return
        began = time.perf_counter()
        try:
            self._conclude(mirrored=True)
            self._end_without_it()
        finally:
            self.wait_s += time.perf_counter() - began

    def _conclude(self, mirrored: bool = False) -> None:
        """Collective among the ranks that write. Wait for the current write, or raise its error on all. `mirrored`: also wait
        for the mirror."""
        self._meet()
        try:
            run_on_firsts(self._writers(), lambda: self._end(mirrored))
        finally:
            if self._sharded and not comm.is_main():
                with contextlib.suppress(BaseException):  # the main rank reports it
                    self._background.wait()

    def _end(self, mirrored: bool) -> None:
        try:
            self._background.wait()
        except BaseException:
            if self._sharded:  # a share may have been written after the main rank has removed the folder
                self._writer.remove_leftovers()
            raise
        if mirrored and self._mirror is not None and comm.is_main():
            self._mirror.wait()

    def _writers(self) -> list[list[int]]:
        """Collective at the first call. The groups of ranks; the first rank of each group writes."""
        if comm.is_alone():
            return [[comm.rank()]]
        if self._scope == "main":
            return [list(range(comm.world_size()))]
        if self._groups is None:
            self._groups = group_by_folder(self.folder)
            if len(self._groups) == 1 and len(comm.nodes()) > 1:
                log.say(f"scope='node' has no effect: all nodes share {self.folder}, and rank 0 writes there")
        return self._groups

    def _meet(self) -> None:
        """Collective if sharded. Returns when the other ranks have written. If one has failed, the main rank's writer stops
        waiting."""
        if not self._sharded or comm.is_alone():
            return
        if not comm.is_main():
            self._background.join()
        error = None if comm.is_main() or self._background.error is None else str(self._background.error)
        told = comm.all_gather_object(error, comm.patient())
        first = next((text for text in told if text is not None), None)
        if first is not None and self._others is not None:
            self._others.cancel(CheckpointError(first))

    @property
    def failure(self) -> BaseException | None:
        """On the main rank, the error of the current save, as soon as it has failed. All ranks get it from `wait` or `save`."""
        return self._background.error

    def close(self) -> BaseException | None:
        """Wait for this rank's own write. Returns an error that is not yet reported, so that the caller reports it. For a loop
        that was interrupted."""
        if self._others is not None:
            self._others.hurry()
        self._background.join()
        if self._mirror is not None and comm.is_main():
            self._mirror.wait()
        self._is_reported = True
        self._end_without_it()
        if self._snapshot is not None:
            self._snapshot = Snapshot()  # frees the memory of the copy
        return self._background.error

    def _write(self, final: Path, states: Mapping[str, Any], record: Manifest, temporary: Path | None, rank: int) -> None:
        """May run in a thread; nothing here is collective."""
        if self._snapshot is not None:
            self._snapshot.wait()
        if temporary is not None and rank > 0:
            write_share(final, states, temporary, rank)
            return
        self._writer.write(final, states, record, self._others, self.fence)
        self._catalog.mark_whole(final)
        gone = self._catalog.prune(final)
        self._writer.warn_of_little_space(final, self._retention.last - len(self._catalog.all()))
        if self._mirror is not None and comm.is_main():
            self._mirror.offer(final, gone)

    # --- finding

    def all(self) -> list[Path]:
        """Every checkpoint's folder, the oldest first. Not verified."""
        return self._catalog.all()

    def find_latest(self) -> tuple[Path, Manifest] | None:
        """The newest intact checkpoint here; each corrupted one is reported. None if there is no checkpoint.

        Another process may save and prune at the same time. Raises CheckpointError if all checkpoints are corrupted.
        """
        self._background.join()
        return self._catalog.find_newest({}, self._catalog.verify)

    # --- the best

    def best(self) -> Path | None:
        """The folder of the best intact checkpoint by `keep_best`, the earliest of equal ones; None if none has this metric.

        Reads the checkpoints that this process has neither written nor read before. Not collective: each rank uses what it
        sees.
        """
        if self._best is None:
            raise ConfigError("best() needs a metric: Checkpoints(keep_best='eval_loss')")
        self._background.join()
        return self._catalog.find_best()

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Collective. Whether a checkpoint with these metrics, the same on all ranks, would be the best so far.

        Raises ConfigError if `keep_best` is not among them. Without `keep_best`, always False.
        """
        if self._best is None:
            return False
        self._best.check(metrics)
        rank = self._best.rank(metrics)
        self._meet()
        return rank is not None and run_on_main(self._is_before, [self._best, rank])

    def _is_before(self, best: Best, rank: float) -> bool:
        self._background.join()
        return self._catalog.is_before_all(best, rank)

    def start_from_scratch(self) -> None:
        """Collective. Move the checkpoints of an older run to FOLDER/old-1. Raises ConfigError if the mirror has any."""
        from_scratch.start(self.folder, self._mirror, self._writers())

    # --- loading

    @takes(parts=_PARTS, may_be_new=ANYTHING, moved={"may_begin_anew": "it is now may_be_new=[...]"})
    def resume(self, parts: Mapping[str, Stateful], may_be_new: Collection[str] = ()) -> int:
        """Collective. Like `load_latest`, and prints from which step the run resumes. Returns this step; 0 if there is no
        checkpoint."""
        manifest = self.load_latest(parts, may_be_new)
        if manifest is None:
            return 0
        log.say(f"resuming from step {manifest.step}")
        return manifest.step

    def load_latest(self, parts: Mapping[str, Stateful], may_be_new: Collection[str] = ()) -> Manifest | None:
        """Collective. Load the newest intact checkpoint into `parts` on every rank; returns its manifest, or None if there is
        none.

        All ranks load the same one, the newest that any node has. They verify it while they read it into the tensors of
        `parts`. If any rank finds a corrupted byte, all ranks load the checkpoint before. Raises CheckpointError if no
        checkpoint is intact, and ConfigError if the parts are not those that were saved; do not train with the parts after
        that. Parts named in `may_be_new` may be missing in the checkpoint; then a line is printed.
        """
        resume.check_parts(parts)
        with agreed():
            resume.check_states(parts)
        self._meet()
        from_scratch.begin(self.folder, self._mirror, self._writers)
        self._background.join()
        damaged: dict[Path, str] = {}  # on the first rank of each node
        failures: Counter[Path] = Counter()
        while (found := resume.choose(self._catalog, damaged, may_be_new)) is not None:
            folder, manifest, is_copy = found
            there = {name: part for name, part in parts.items() if name not in may_be_new or manifest.has(name)}
            own = resume.load(folder, manifest, there)
            try:
                settle(own, comm.patient())  # no rank may be left waiting in a collective
            except (DamagedError, UnreadableError) as error:  # the same on all ranks, which all try the next one
                failures[folder] += 1
                if resume.is_damaged_here(isinstance(own, DamagedError | UnreadableError) or failures[folder] > 1):
                    self._catalog.give_up(folder, error, damaged)
            except (ConfigError, CheckpointError):
                if run_on_main(folder.exists):
                    raise
            else:
                self._catalog.mark_whole(folder)
                for name in parts.keys() - there.keys():
                    log.say(f"the checkpoint has no {name}: {name} starts from scratch")
                if is_copy and self._scope == "main" and not comm.is_main():
                    remove(folder)
                return manifest
        return None


def _check_scope(scope: str | None, sharded: bool) -> None:
    if sharded and scope == "node":
        raise ConfigError(
            "Checkpoints(sharded=True) needs a folder that all nodes share, and scope='node' says that they share none; "
            "remove one of them (the scope may come from --checkpoint-scope)"
        )
