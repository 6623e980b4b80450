"""The checkpoints of one run: whole or absent, verified on load, the one before used when the newest is damaged.

    checkpoints = Checkpoints(run_dir / "checkpoints")
    manifest = checkpoints.load_latest({"model": model, "optimizer": optimizer, "loader": loader})
    checkpoints.save({"model": model, ...}, step=400)

Which stay: the last few, and the best by a figure, if one is named:

    checkpoints = Checkpoints(folder, keep_last=2, keep_best="eval_accuracy", larger_is_better=True)
    checkpoints.save(parts, step=400, metrics={"eval_accuracy": 0.93});  checkpoints.best()

    checkpoints/step-00000400/{manifest.json, model.pt, optimizer.pt, ..., rng.pt}

One file for each Stateful thing, written by the main rank; `torch.load(weights_only=True)` reads it.
With `sharded=True` all ranks write, each its share (sharding.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from rankwise import comm, log, seed
from rankwise.checkpoint import loading, sharding
from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.background import Background
from rankwise.checkpoint.best import Best
from rankwise.checkpoint.folders import checkpoints_in, fsync, order, remove
from rankwise.checkpoint.manifest import Manifest, saved_at
from rankwise.checkpoint.retention import Retention
from rankwise.checkpoint.sharding import Others
from rankwise.checkpoint.snapshot import Snapshot
from rankwise.checkpoint.writing import plain, why_not, write_file
from rankwise.errors import CheckpointError, ConfigError, DamagedError
from rankwise.guards import run_on_main, settle
from rankwise.state import Stateful


class Checkpoints:
    """`keep_last`: how many stay; the newest is never deleted. `keep_best`: the name of a figure (`eval_loss`); the checkpoint
    with the least of it stays too, or that with the most if `larger_is_better`, which only a loss need not say. So do those of
    `keep_steps`, and those `keep_younger_than_s`. What is damaged goes once something newer is whole.

    `background`: `save` copies the state and returns; a thread of the main rank writes it while the loop goes on. Call `wait`
    before the end. One save at a time is under way, in host memory as large as the state.

    `sharded`: of modules and optimizers, which must be alike on all ranks, each rank copies and writes a share: for states that
    take one rank long. All ranks must see the folder. It is loaded on any number of ranks, sharded or not.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int = 2,
        keep_best: str | None = None,
        larger_is_better: bool | None = None,
        keep_steps: Collection[int] = (),
        keep_younger_than_s: float | None = None,
        background: bool = False,
        sharded: bool = False,
    ) -> None:
        self.folder = folder
        self._retention = Retention.of(keep_last, keep_younger_than_s, keep_steps)
        self._best = Best.of(keep_best, larger_is_better)
        self._damaged: set[Path] = set()  # known to the main rank, as is the next
        self._whole: set[Path] = set()
        self._durable = False
        self._snapshot = Snapshot() if background else None
        self._writer = Background()
        self._sharded = sharded
        self._others: Others | None = None  # that the main rank's writer waits for
        self.wait_s = 0.0
        """Seconds that the loop has spent in saving so far."""

    # --- saving

    def save(
        self,
        parts: Mapping[str, Stateful],
        step: int,
        info: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Collective. Write all parts and every rank's random state; returns the checkpoint's folder.

        `metrics`: figures of the parts as they are now, for `keep_best`; one of an earlier step would praise the wrong parts.
        Raises CheckpointError on every rank when it cannot be written; nothing half-written is left, older ones stay. With
        `background` it is not there yet, and what is raised is of the save before (as `wait` would): this one is not begun.
        """
        began = time.perf_counter()
        streams = {str(rank): stream for rank, stream in enumerate(comm.all_gather_object(seed.rng_state()))}

        def record() -> Manifest:
            return Manifest(
                manifests.VERSION, step, comm.world_size(), torch.__version__, {}, dict(info or {}), _finite(metrics or {}),
                asdict(self._best) if self._best is not None else {},
            )  # fmt: skip

        try:
            if self._sharded and not comm.is_alone():
                return self._save_together(parts, step, record, streams)
            return run_on_main(self._save_alone, [parts, step, record, streams])
        finally:
            self.wait_s += time.perf_counter() - began

    def _save_alone(
        self, parts: Mapping[str, Stateful], step: int, record: Callable[[], Manifest], streams: Mapping[str, Any]
    ) -> Path:
        """On the main rank."""
        self._writer.wait()
        final, manifest = self._free_name(step), record()
        states = {name: part.state_dict() for name, part in parts.items()} | {loading.RNG: streams}
        copied = self._copied(states)
        if copied is None:
            self._write_and_prune(final, states, manifest)
        else:
            self._writer.start(lambda: self._write_and_prune(final, copied, manifest))
        return final

    def _save_together(
        self, parts: Mapping[str, Stateful], step: int, record: Callable[[], Manifest], streams: Mapping[str, Any]
    ) -> Path:
        """Collective. Each rank begins to write its share of the modules and optimizers, the main rank all else too."""
        self._conclude()
        rank, ranks = comm.rank(), comm.world_size()
        with _agreed():
            manifest = record()
            states = {name: part.state_dict() for name, part in parts.items()} | {loading.RNG: streams}
            shares = sharding.divided(parts, states, ranks)
        if len(set(comm.all_gather_object(sharding.digest(shares, states)))) > 1:
            log.warning_once("the main rank writes checkpoints alone: the ranks' tensors differ in names, types or shapes")
            shares = {}
        final, temporary = run_on_main(self._begin_together, [step])
        try:
            with _agreed():
                sharding.await_folder(temporary, rank)
                share = sharding.share_of(rank, shares, states)
                copied = self._copied(share)
        except BaseException:
            if comm.is_main():  # nobody writes yet
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        taken = share if copied is None else copied
        if rank == 0:
            others = self._others = Others(temporary, ranks)
            self._writer.start(lambda: self._write_and_prune(final, taken, manifest, temporary, others))
        else:
            self._writer.start(lambda: self._write_share(final, taken, temporary))
        if not comm.all_agree(copied is not None):
            self._conclude()
        return final

    def _begin_together(self, step: int) -> tuple[Path, Path]:
        """On the main rank: the checkpoint's folder, and the one that all write in until it is whole."""
        final = self._free_name(step)
        try:
            return final, self._new_folder(self._unique())
        except OSError as error:
            raise CheckpointError(why_not(final, {}, error)) from None

    def _copied(self, states: dict[str, Any]) -> dict[str, Any] | None:
        """None where the loop is to wait for the writing itself."""
        if self._snapshot is None:
            return None
        try:
            return self._snapshot.take(states)
        except (RuntimeError, MemoryError) as error:  # RuntimeError: what torch makes of the other
            log.warning_once(f"a save waits for the disk, as its state cannot be copied: {' '.join(str(error).split())[:200]}")
            return None

    def wait(self) -> None:
        """Collective. Until the last save is there. Raises on every rank what it raised, once: CheckpointError if it cannot be
        written. Does nothing without `background`."""
        if self._snapshot is None:
            return
        began = time.perf_counter()
        try:
            self._conclude()
        finally:
            self.wait_s += time.perf_counter() - began

    def _conclude(self) -> None:
        """Collective. What is being written is there, or all ranks raise what it raised."""
        self._meet()
        try:
            run_on_main(self._end)
        finally:
            if not comm.is_main():
                with contextlib.suppress(BaseException):  # the main rank has heard of it
                    self._writer.wait()

    def _end(self) -> None:
        try:
            self._writer.wait()
        except BaseException:
            if self._sharded:  # a share may have been written after the main rank has cleared up
                self._remove_leftovers()
            raise

    def _meet(self) -> None:
        """Collective if sharded. The other ranks have written; the main rank's writer does not wait for one that has failed."""
        if not self._sharded or comm.is_alone():
            return
        if not comm.is_main():
            self._writer.join()
        error = None if comm.is_main() or self._writer.error is None else str(self._writer.error)
        told = comm.all_gather_object(error, comm.patient())
        first = next((text for text in told if text is not None), None)
        if first is not None and self._others is not None:
            self._others.cancel(CheckpointError(first))

    @property
    def failure(self) -> BaseException | None:
        """What the save under way has raised, on the main rank, as soon as it has. All ranks hear of it by `wait` or `save`."""
        return self._writer.error

    def close(self) -> BaseException | None:
        """Wait for this rank's own writing; returns what nobody has heard of. For the end of a loop that broke."""
        if self._others is not None:
            self._others.hurry()
        self._writer.join()
        return self._writer.error

    def _write_and_prune(
        self,
        final: Path,
        states: Mapping[str, Any],
        record: Manifest,
        temporary: Path | None = None,
        others: Others | None = None,
    ) -> None:
        """On the main rank alone, in a thread of its own or not: nothing in it is collective."""
        if self._snapshot is not None:
            self._snapshot.wait()
        self._write(final, states, record, temporary, others)
        self._prune(final)

    def _write_share(self, final: Path, states: Mapping[str, Any], temporary: Path) -> None:
        """On another rank, in a thread of its own."""
        if self._snapshot is not None:
            self._snapshot.wait()
        sharding.write_share(final, states, temporary, comm.rank())

    def _write(
        self, final: Path, states: Mapping[str, Any], record: Manifest, made: Path | None, others: Others | None
    ) -> None:
        temporary = made or self._unique()
        states = {name: plain(state, name) for name, state in states.items()}
        try:
            if made is None:
                self._new_folder(temporary)
            files = {f"{name}.pt": write_file(temporary / f"{name}.pt", state) for name, state in states.items()}
            files |= others.wait() if others is not None else {}
            with open(temporary / manifests.NAME, "w") as file:
                file.write(replace(record, files=files).text())
                file.flush()
                os.fsync(file.fileno())
            fsync(temporary)
            os.rename(temporary, final)
            fsync(self.folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: what torch makes of an OSError
            raise CheckpointError(why_not(final, states, error)) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # not there if all went well
        self._whole.add(final)
        self._damaged.discard(final)

    def _unique(self) -> Path:
        return self.folder / f"tmp.{uuid.uuid4().hex}"

    def _new_folder(self, temporary: Path) -> Path:
        self._remove_leftovers()
        self._make_folder()
        temporary.mkdir()
        return temporary

    def _make_folder(self) -> None:
        """Once, the folders above are flushed too: a power cut must not take away the folder in which all else is durable."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._durable:
            return
        for parent in self.folder.absolute().parents:
            with contextlib.suppress(OSError):  # not readable: not ours, and older than this run
                fsync(parent)
                if parent.is_mount():
                    break
        self._durable = True

    def _remove_leftovers(self) -> None:
        """What a killed writer left. Only one run writes here (rundir's lease), so nobody is in there."""
        for leftover in self.folder.glob("tmp.*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _free_name(self, step: int) -> Path:
        """A step may be saved again (a life that went on from an older checkpoint): beside the first, which goes after."""
        count = max((time for path in self.all() for saved, time in [order(path)] if saved == step), default=0) + 1
        return self.folder / (f"step-{step:08d}" + (f"-{count}" if count > 1 else ""))

    def _prune(self, newest: Path) -> None:
        """Keep the last few up to `newest`, the best, the young, those of named steps. What is damaged is not counted, and goes
        once something newer is whole; what lies after `newest` is damaged too, else it had been loaded."""
        best = self._find_best()
        older = [path for path in self.all() if order(path) < order(newest)]
        again = [path for path in older if order(path)[0] == order(newest)[0] or path in self._damaged]
        now = time.time()
        ages = {path: now - _saved_at(path, now) for path in older if path not in again}
        for old in [*again, *self._retention.gone({**ages, newest: 0.0})]:
            if old != best:
                remove(old)

    # --- finding

    def all(self) -> list[Path]:
        """Every checkpoint's folder, the oldest first. Not verified."""
        return checkpoints_in(self.folder)

    def find_latest(self) -> tuple[Path, Manifest] | None:
        """The newest that verifies; each one passed over is said. None if there is none at all.

        Another process may save and prune meanwhile. Raises CheckpointError when there are some and all are damaged.
        """
        return self._newest({}, self._verified)

    def _newest(self, damaged: dict[Path, str], look: Callable[[Path], Manifest]) -> tuple[Path, Manifest] | None:
        """Of those that are not damaged: what is wrong with one, by `look`, is added."""
        self._writer.join()
        while left := [path for path in self.all() if path not in damaged]:
            folder = left[-1]
            try:
                return folder, look(folder)
            except CheckpointError as error:
                if folder.exists():
                    damaged[folder] = str(error)
                # else its writer has something newer by now: look again
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole ({next(iter(damaged.values()))}); "
                "start anew with --fresh, or beside it with --name"
            )
        return None

    def _verified(self, folder: Path) -> Manifest:
        """Read it all. What is damaged is said, and remembered."""
        manifest = self._looked_at(folder, manifests.verify)
        self._whole.add(folder)
        return manifest

    def _glanced_at(self, folder: Path) -> Manifest:
        return self._looked_at(folder, manifests.glance)

    def _looked_at(self, folder: Path, look: Callable[[Path], Manifest]) -> Manifest:
        try:
            return look(folder)
        except CheckpointError as error:
            self._pass_over(folder, str(error))
            raise

    def _pass_over(self, folder: Path, why: str) -> bool:
        """False where it is not damaged but gone: pruned by who writes here."""
        if not folder.exists():
            return False
        self._damaged.add(folder)
        self._whole.discard(folder)
        log.warn(f"checkpoint passed over: {why}")
        return True

    # --- the best

    def best(self) -> Path | None:
        """The folder of the best whole checkpoint by `keep_best`, of equal ones the earliest; None if none has that figure.

        Reads what this process has not written or read before. Not collective: on other ranks than the main one it is what
        they see.
        """
        if self._best is None:
            raise ConfigError("best() needs to know by which figure: Checkpoints(folder, keep_best='eval_loss')")
        self._writer.join()
        return self._find_best()

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Collective. Whether a checkpoint with these metrics, the same on all ranks, would be the best so far.

        Raises ConfigError when `keep_best` is not among them. Always False without it.
        """
        if self._best is None:
            return False
        self._best.check(metrics)
        rank = self._best.rank(metrics)
        self._meet()
        return rank is not None and run_on_main(self._is_before, [self._best, rank])

    def _is_before(self, best: Best, rank: float) -> bool:
        self._writer.join()
        folder = self._find_best()
        known = best.rank(Manifest.read(folder).metrics) if folder is not None else None
        return known is None or rank < known

    def _find_best(self) -> Path | None:
        if self._best is None:
            return None
        measured = {}
        # Equal figures of one step: the copy that was saved last, as that is the one that is gone on from.
        for folder in sorted(self.all(), key=lambda path: (order(path)[0], -order(path)[1])):
            with contextlib.suppress(CheckpointError):  # damaged
                measured[folder] = Manifest.read(folder).metrics
        for folder in self._best.order(measured):
            if folder in self._damaged:
                continue
            with contextlib.suppress(CheckpointError):
                if folder not in self._whole:
                    self._verified(folder)
                return folder
        return None

    # --- loading

    def load_latest(self, parts: Mapping[str, Stateful]) -> Manifest | None:
        """Collective. Load the newest whole checkpoint into `parts` on every rank; returns its manifest, None if none.

        The main rank chooses, all load the same, and each verifies what it reads, as it reads it into the tensors of `parts`:
        where a byte is not what was written, on any rank, the one before is loaded over it on all. Raises CheckpointError when
        none is whole, and ConfigError when the parts are not those saved; what they hold then is not to be trained with.
        """
        self._meet()
        damaged: dict[Path, str] = {}  # known to the main rank
        while (found := run_on_main(lambda: self._newest(damaged, self._glanced_at))) is not None:
            folder, manifest = found
            try:
                self._load(folder, manifest, parts)
            except DamagedError as error:  # the same on all ranks, as is the next
                if run_on_main(self._pass_over, [folder, str(error)]):
                    damaged[folder] = str(error)
            except (ConfigError, CheckpointError):
                if run_on_main(folder.exists):
                    raise
            else:
                self._whole.add(folder)
                return manifest
        return None

    def _load(self, folder: Path, manifest: Manifest, parts: Mapping[str, Stateful], verify: bool = True) -> None:
        """Collective. What one rank raises, all raise: none must leave the others in their next collective."""
        asked = {name for part in (*parts, loading.RNG) for name in sharding.files_of(manifest, part)}
        with _agreed():
            for name, part in parts.items():
                loading.load_part(folder, manifest, name, part, verify)
            loading.load_stream(folder, manifest, verify)
            if verify and comm.is_main():  # a checkpoint is whole or damaged, though nobody asks for all of it
                for name in manifest.files.keys() - asked:
                    for damage in manifests.damages(folder, manifest, only=name):
                        raise DamagedError(damage)


@contextlib.contextmanager
def _agreed() -> Iterator[None]:
    """Collective. What the block raises on one rank, all raise after it."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as problem:
        error = problem
    settle(error, comm.patient())


def _saved_at(path: Path, otherwise: float) -> float:
    try:
        return saved_at(path)
    except OSError:  # damaged, and nobody has looked yet
        return otherwise


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no word for the others."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
