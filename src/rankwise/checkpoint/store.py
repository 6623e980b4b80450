"""The checkpoints of one run: whole or absent, verified on load, the one before used when the newest is damaged.

    checkpoints = Checkpoints(run_dir / "checkpoints")
    manifest = checkpoints.load_latest({"model": model, "optimizer": optimizer, "loader": loader})
    checkpoints.save({"model": model, ...}, step=400)

Which stay: the last few, and the best by a figure, if one is named:

    checkpoints = Checkpoints(folder, keep_last=2, keep_best="eval_accuracy", larger_is_better=True)
    checkpoints.save(parts, step=400, metrics={"eval_accuracy": 0.93});  checkpoints.best()

    checkpoints/step-00000400/{manifest.json, model.pt, optimizer.pt, ..., rng.pt}

One file for each Stateful thing, written by the main rank; `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import platform
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankwise import comm, log, seed
from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.background import Background
from rankwise.checkpoint.best import Best
from rankwise.checkpoint.disks import digest, sharing, spread
from rankwise.checkpoint.folders import checkpoints_in, fsync, order, remove
from rankwise.checkpoint.layout import layout
from rankwise.checkpoint.manifest import FileRecord, Manifest, saved_at
from rankwise.checkpoint.mirror import Mirror
from rankwise.checkpoint.reader import read
from rankwise.checkpoint.retention import Retention
from rankwise.checkpoint.snapshot import Snapshot
from rankwise.errors import CheckpointError, ConfigError, DamagedError
from rankwise.guards import run_on_firsts, run_on_main, settle
from rankwise.lease import Fence
from rankwise.state import Stateful
from rankwise.terminal import count

_RNG = "rng"


class Checkpoints:
    """`keep_last`: how many stay; the newest is never deleted. `keep_best`: the name of a figure (`eval_loss`); the checkpoint
    with the least of it stays too, or that with the most if `larger_is_better`, which only a loss need not say. So do those of
    `keep_steps`, and those `keep_younger_than_s`. What is damaged goes once something newer is whole.

    `background`: `save` copies the state and returns; a thread of the main rank writes it while the loop goes on. Call `wait`
    before the end. One save at a time is under way, in host memory as large as the state.

    `scope`: `main`, and the main rank writes; `node`, and so does the first rank of each node, where they have disks of their
    own. What is loaded is the newest that any node has; those that do not see it get a copy through the process group.
    `mirror`: a URL for fsspec, where what is saved is copied behind the loop, and from where it is had when it is newer there
    or whole there alone. A failure of it is a warning.
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
        scope: str = "main",
        mirror: str | None = None,
    ) -> None:
        if scope not in ("main", "node"):
            raise ConfigError(f"checkpoint_scope={scope!r}: choose main (rank 0 writes) or node (one rank of each node)")
        self.folder = folder
        self._retention = Retention.of(keep_last, keep_younger_than_s, keep_steps)
        self._best = Best.of(keep_best, larger_is_better)
        self._damaged: set[Path] = set()  # known to the main rank, as is the next
        self._whole: set[Path] = set()
        self._durable = False
        self._snapshot = Snapshot() if background else None
        self._writer = Background()
        self._scope = scope
        self._groups: list[list[int]] | None = None  # the ranks for which one writes, that one first
        self._mirror = Mirror(mirror) if mirror is not None else None
        self.wait_s = 0.0
        """Seconds that the loop has spent in saving so far."""

        self.fence: Fence | None = None
        """Asked, on the main rank, before a checkpoint gets its name: one that another run has taken over from must not."""

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
        told = comm.all_gather_object((seed.rng_state(), self._times_saved(step)))
        streams, times = [stream for stream, _ in told], max(times for _, times in told)

        def begin() -> Path:
            self._writer.wait()
            final = self.folder / (f"step-{step:08d}" + (f"-{times + 1}" if times else ""))
            states = {name: part.state_dict() for name, part in parts.items()}
            states[_RNG] = {str(rank): stream for rank, stream in enumerate(streams)}
            record = Manifest(
                manifests.VERSION, step, comm.world_size(), torch.__version__, {}, dict(info or {}), _finite(metrics or {}),
                asdict(self._best) if self._best is not None else {},
            )  # fmt: skip
            copied = self._copied(states)
            if copied is None:
                self._write_and_prune(final, states, record)
            else:
                self._writer.start(lambda: self._write_and_prune(final, copied, record))
            return final

        try:
            return run_on_firsts(self._writers(), begin)
        finally:
            self.wait_s += time.perf_counter() - began

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
        written. Does nothing without `background` or `mirror`."""
        if self._snapshot is None and self._mirror is None:
            return
        began = time.perf_counter()
        try:
            run_on_firsts(self._writers(), self._wait)
        finally:
            self.wait_s += time.perf_counter() - began

    def _wait(self) -> None:
        self._writer.wait()
        if self._mirror is not None and comm.is_main():
            self._mirror.wait()

    def _writers(self) -> list[list[int]]:
        """Collective, the first time. The groups of ranks of which the first one writes."""
        if self._groups is None:
            self._groups = [list(range(comm.world_size()))]
            if self._scope == "node" and not comm.is_alone():
                self._groups = sharing(self.folder)
                if len(self._groups) == 1 and len(comm.nodes()) > 1:
                    log.say(f"all nodes see {self.folder}: the main rank writes for all")
        return self._groups

    @property
    def failure(self) -> BaseException | None:
        """What the save under way has raised, on the main rank, as soon as it has. All ranks hear of it by `wait` or `save`."""
        return self._writer.error

    def close(self) -> BaseException | None:
        """Wait for this rank's own writing; returns what nobody has heard of. For the end of a loop that broke."""
        self._writer.join()
        if self._mirror is not None and comm.is_main():
            self._mirror.wait()
        return self._writer.error

    def _write_and_prune(self, final: Path, states: Mapping[str, Any], record: Manifest) -> None:
        """On those ranks alone that write, in a thread of its own or not: nothing in it is collective."""
        if self._snapshot is not None:
            self._snapshot.wait()
        self._write(final, states, record)
        gone = self._prune(final)
        if self._mirror is not None and comm.is_main():
            self._mirror.offer(final, gone)

    def _write(self, final: Path, states: Mapping[str, Any], record: Manifest) -> None:
        temporary = self.folder / f"tmp.{uuid.uuid4().hex}"
        states = {name: _plain(state, name) for name, state in states.items()}
        try:
            self._remove_leftovers()
            self._make_folder()
            temporary.mkdir()
            files = {f"{name}.pt": _write_file(temporary / f"{name}.pt", state) for name, state in states.items()}
            with open(temporary / manifests.NAME, "w") as file:
                file.write(replace(record, files=files).text())
                file.flush()
                os.fsync(file.fileno())
            fsync(temporary)
            if self.fence is not None:
                self.fence.check()
            os.rename(temporary, final)
            fsync(self.folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: what torch makes of an OSError
            raise CheckpointError(_why_not(final, states, error)) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # not there if all went well
        self._whole.add(final)
        self._damaged.discard(final)

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

    def _times_saved(self, step: int) -> int:
        """A step may be saved again (a life that went on from an older checkpoint): beside the first, which goes after."""
        return max((time for path in self.all() for saved, time in [order(path)] if saved == step), default=0)

    def _prune(self, newest: Path) -> list[str]:
        """Keep the last few up to `newest`, the best, the young, those of named steps. What is damaged is not counted, and goes
        once something newer is whole; what lies after `newest` is damaged too, else it had been loaded. Returns what went."""
        best = self._find_best()
        older = [path for path in self.all() if order(path) < order(newest)]
        again = [path for path in older if order(path)[0] == order(newest)[0] or path in self._damaged]
        now = time.time()
        ages = {path: now - _saved_at(path, now) for path in older if path not in again}
        gone = [old for old in [*again, *self._retention.gone({**ages, newest: 0.0})] if old != best]
        for old in gone:
            remove(old)
        return [old.name for old in gone]

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
        log.warn(f"checkpoint passed over: {why}", force=not comm.is_main())
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

        All load the same one, the newest that any node has, and verify what they read, as they read it into the tensors of
        `parts`: where a byte is not what was written, on any rank, the one before is loaded over it on all. Raises
        CheckpointError when none is whole, and ConfigError when the parts are not those saved; what they hold then is not to be
        trained with.
        """
        damaged: dict[Path, str] = {}  # known to the first rank of each node
        failures: Counter[Path] = Counter()
        while (found := self._chosen(damaged)) is not None:
            folder, manifest, is_copy = found
            own = self._load(folder, manifest, parts)
            try:
                settle(own, comm.patient())  # none must leave the others in their next collective
            except DamagedError as error:  # the same on all ranks, as is the next
                failures[folder] += 1
                if self._is_damaged_here(isinstance(own, DamagedError) or failures[folder] > 1):
                    self._give_up(folder, str(error), damaged)
            except (ConfigError, CheckpointError):
                if run_on_main(folder.exists):
                    raise
            else:
                self._whole.add(folder)
                if is_copy and self._scope == "main" and not comm.is_main():
                    remove(folder)
                return manifest
        return None

    def _chosen(self, damaged: dict[Path, str]) -> tuple[Path, Manifest, bool] | None:
        """Collective. The newest that any node has, brought to those that do not see it; and whether it was to this rank."""
        group = comm.patient()
        is_first = any(ranks[0] == comm.rank() for ranks in comm.nodes())
        own, why, error = None, "", None
        if is_first:
            try:
                if comm.is_main():
                    self._bring()
                own = self._newest(damaged, self._glanced_at)
            except CheckpointError as problem:
                why = str(problem)
            except BaseException as problem:
                error = problem
        settle(error, group)
        told = comm.all_gather_object((own[0].name if own is not None else "", why), group)
        newest = max((name for name, _ in told if name), key=lambda name: order(Path(name)), default=None)
        if newest is None:
            for why in filter(None, (why for _, why in told)):
                raise CheckpointError(why)
            return None
        source = next(rank for rank, (name, _) in enumerate(told) if name == newest)
        folder = self.folder / newest
        mine: Any = (own[1], digest(folder), platform.node()) if own is not None else None
        manifest, there, host = comm.broadcast_object(mine, source, group)
        lacks = comm.all_gather_object(is_first and (folder in damaged or digest(folder) != there), group)
        to = []
        if any(lacks):
            disks = sharing(self.folder)
            to = [ranks[0] for ranks in disks if source not in ranks and any(lacks[rank] for rank in ranks)]
            damaged.pop(folder, None)  # on the source's own disk it is read once more
            self._damaged.discard(folder)
        if to:
            size = f"{manifest.bytes / 1e6:.1f} MB"
            log.say(f"{newest} is on {host} and not on {count(len(to), 'other node')}: copied there, {size}")
            spread(folder, source, to)
        return folder, manifest, comm.rank() in to

    def _is_damaged_here(self, mine: bool) -> bool:
        """Collective. Whether one of this node's ranks has read another byte than was written, on the node's first rank."""
        told = comm.all_gather_object(mine)
        return any(ranks[0] == comm.rank() and any(told[rank] for rank in ranks) for ranks in comm.nodes())

    def begin_anew(self) -> None:
        """Collective. Raises ConfigError when the mirror holds checkpoints of an older run: they would be gone on from."""
        names = run_on_main(self._mirror.names) if self._mirror is not None else []
        if names and self._mirror is not None:
            raise ConfigError(
                f"to begin anew, checkpoint_mirror={self._mirror.url!r} must be empty, and {names[-1]} is there; "
                "give another URL, or remove what is there"
            )

    def _give_up(self, folder: Path, why: str, damaged: dict[Path, str]) -> None:
        if self._pass_over(folder, why):
            damaged[folder] = why
            if self._mirror is not None and comm.is_main() and self._replace(folder.name):
                del damaged[folder]

    def _bring(self) -> None:
        """From the mirror what is newer there than all that is here."""
        if self._mirror is None:
            return
        here = self.all()
        try:
            names = self._mirror.names()
        except CheckpointError as error:
            if not here:
                raise
            log.warn(f"{error}; going on with what is here")
            return
        for name in reversed(names):
            if (here and order(Path(name)) <= order(here[-1])) or self._replace(name):
                break

    def _replace(self, name: str) -> bool:
        assert self._mirror is not None
        try:
            self._damaged.discard(self._mirror.fetch(name, self.folder))
        except CheckpointError as error:
            log.warn(f"checkpoint passed over: {error}")
            return False
        log.say(f"{name} comes from {self._mirror.url}")
        return True

    def _load(
        self, folder: Path, manifest: Manifest, parts: Mapping[str, Stateful], verify: bool = True
    ) -> BaseException | None:
        """What went wrong on this rank."""
        error: BaseException | None = None
        try:
            for name, part in parts.items():
                _load_part(folder, manifest, name, part, verify)
            self._load_stream(folder, manifest, verify)
            if verify and comm.is_main():  # a checkpoint is whole or damaged, though nobody asks for all of it
                for name in manifest.files.keys() - {f"{part}.pt" for part in (*parts, _RNG)}:
                    for damage in manifests.damages(folder, manifest, only=name):
                        raise DamagedError(damage)
        except BaseException as problem:
            error = problem
        return error

    def _load_stream(self, folder: Path, manifest: Manifest, verify: bool) -> None:
        streams = _read(folder, manifest, _RNG, None, verify)
        mine = streams.get(str(comm.rank()))
        if mine is not None:
            seed.set_rng_state(mine)
        if manifest.world_size != comm.world_size():
            then, now = count(manifest.world_size, "rank"), count(comm.world_size(), "rank")
            log.say(
                f"the checkpoint was made on {then}, this is {now}: the same global batches in the same order; "
                "random layers and rounding differ"
            )


def _saved_at(path: Path, otherwise: float) -> float:
    try:
        return saved_at(path)
    except OSError:  # damaged, and nobody has looked yet
        return otherwise


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no word for the others."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}


def _plain(state: Any, path: str) -> Any:
    """The state without numpy's numbers, which `weights_only` would refuse to read; an array is refused here, by its path."""
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, np.ndarray):
        raise CheckpointError(f"{path} is a numpy array, which could not be loaded again; keep it as a tensor")
    if isinstance(state, dict):
        changed = {key: new for key, value in state.items() if (new := _plain(value, f"{path}/{key}")) is not value}
        if changed:
            state = state.copy()
            state.update(changed)
    elif isinstance(state, list | tuple) and not hasattr(state, "_fields"):
        parts = [_plain(value, f"{path}/{index}") for index, value in enumerate(state)]
        if any(new is not old for new, old in zip(parts, state, strict=True)):
            return type(state)(parts)
    return state


def _write_file(path: Path, state: Any) -> FileRecord:
    """Reserve the space, write, make it durable. An OSError for want of space comes before anything is written."""
    sums = {name: manifests.tensor_sum(tensor) for name, tensor in manifests.tensors(state)}
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, _size(state))
        torch.save(state, file)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    try:
        again = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many types: what cannot be loaded again is no checkpoint
        text = " ".join(str(error).split())
        raise CheckpointError(f"{path.stem} could not be loaded again: {text[:300]}") from None
    places = {name: at for name, at in layout(path, again).items() if name in sums}
    return FileRecord(size, "", sums, places, manifests.rest_sum(path, places))


def _size(state: Any) -> int:
    """Bytes that a state needs on disk, to within a few per cent: its tensors, and what else is in it."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in manifests.tensors(state)}
    return sum(storages.values()) + 256 * len(storages) + 4096 + _size_of_others(state)


def _size_of_others(state: Any) -> int:
    if isinstance(state, Mapping):
        return sum(_size_of_others(key) + _size_of_others(value) for key, value in state.items())
    if isinstance(state, list | tuple | set):
        return sum(map(_size_of_others, state))
    return len(state) if isinstance(state, str | bytes) else 2


def _why_not(final: Path, states: Mapping[str, Any], error: OSError | RuntimeError) -> str:
    need = sum(map(_size, states.values()))
    parent = next(p for p in final.parents if p.exists())
    free = shutil.disk_usage(parent).free
    if isinstance(error, RuntimeError):
        if free > need:
            return f"cannot write {final}: {error}"
    elif error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write {final}: {error.strerror}"
    return f"cannot write {final}: it needs {need / 1e6:.1f} MB and {free / 1e6:.1f} MB are free there"


def _read(folder: Path, manifest: Manifest, name: str, part: Stateful | None, verify: bool) -> Any:
    path = folder / f"{name}.pt"
    try:
        return read(path, manifest.files[path.name], part, verify)
    except DamagedError as error:
        raise DamagedError(f"{error}{f', as rank {comm.rank()} reads it' if comm.rank() else ''}") from None
    except FileNotFoundError:
        if comm.is_main():
            raise DamagedError(f"{path} cannot be read (No such file or directory)") from None
        raise CheckpointError(f"{path} is missing on rank {comm.rank()}: all ranks must see the same folder") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror}), on rank {comm.rank()}") from None
    except Exception as error:  # torch raises many types; the file is whole, so it is not one of ours
        raise CheckpointError(f"{path} does not load: {error}") from None


def _load_part(folder: Path, manifest: Manifest, name: str, part: Stateful, verify: bool = True) -> None:
    path = folder / f"{name}.pt"
    if path.name not in manifest.files:
        raise ConfigError(
            f"the checkpoint {folder} has no {name}; it was made by another program: --fresh starts anew, --name beside it"
        )
    state = _read(folder, manifest, name, part, verify)
    try:
        part.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"{name} does not fit its checkpoint {path}: {text[:400]}; undo the change, or start anew with --fresh, "
            "or beside it with --name NAME"
        ) from None
