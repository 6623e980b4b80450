"""Which folders are checkpoints, their order, and where those of a run are.

for path in checkpoints_in(folder): ...          # the oldest first
folder = find("train")                           # runs/train/checkpoints
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import uuid
from pathlib import Path

from rankwise.errors import CheckpointError, RunDirError
from rankwise.host.disk import fsync, is_folder
from rankwise.host.text import listed, short
from rankwise.run.directory import RunDir, find_run, runs_here

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")  # other files in the folder are not ours


def is_name(name: str) -> bool:
    """Whether this is the name of a checkpoint."""
    return _NAME.fullmatch(name) is not None


def is_checkpoint(path: Path) -> bool:
    """Decided by the name; the checkpoint may be corrupted."""
    return is_name(path.name) and is_folder(path)


def checkpoints_in(folder: Path) -> list[Path]:
    """The folder of every checkpoint, the oldest first. Not verified. Raises CheckpointError if the folder cannot be read."""
    if not is_folder(folder):
        return []
    try:
        names = os.listdir(folder)
    except FileNotFoundError:  # removed since
        return []
    except OSError as error:  # not `glob`: to it a private folder is empty, and the run would start from scratch
        raise CheckpointError(f"the folder {folder} cannot be read ({error.strerror})") from None
    return sorted(filter(is_checkpoint, map(folder.joinpath, names)), key=order)


def order(path: Path) -> tuple[int, int]:
    """(step, which time it was saved) of step-00000400 or step-00000400-2."""
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1]), int(found[2] or 1)


def remove(path: Path) -> bool:
    """Remove a checkpoint. False if this is not possible, or another process has removed it."""
    # Renamed first: if the process is killed during the deletion, no half checkpoint must remain under this name.
    hidden = path.with_name(f"tmp.{uuid.uuid4().hex}")
    try:
        os.rename(path, hidden)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        fsync(path.parent)  # a power failure must not leave it either
    remove_whole(hidden)
    return True


def remove_whole(path: Path) -> None:
    """Remove a folder, or a link to one; what cannot be removed remains."""
    if not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def put(temporary: Path, final: Path) -> None:
    """Flush the files of a folder to disk, and rename the folder to `final`, which it replaces."""
    for path in temporary.iterdir():
        fsync(path)
    fsync(temporary)
    if final.exists():
        remove(final)
    os.rename(temporary, final)
    fsync(final.parent)


def find(run: str | None) -> Path:
    """The folder with the checkpoints of a run. `run`: its name in ./runs, its run directory, or this folder itself. None: the
    only run here. Raises RunDirError if there is none."""
    if run is None:
        found = runs_here(_has_checkpoints)
        if len(found) != 1:
            if not found:
                raise RunDirError(f"no run under {Path('runs').absolute()} has checkpoints; give the folder of one that has")
            names = listed(path.name for path in found)
            raise RunDirError(f"which run? Type its name or folder; the runs with checkpoints here: {names}")
        return RunDir(found[0]).checkpoints
    for path in (Path(run), Path("runs", run)):
        for folder in (path, RunDir(path).checkpoints):
            if checkpoints_in(folder):
                return folder
    there = next(filter(is_folder, (Path(run), Path("runs", run))), None) or find_run(run, "checkpoint").path
    raise RunDirError(f"there are no checkpoints in {there}")


def _has_checkpoints(path: Path) -> bool:
    try:
        return bool(checkpoints_in(RunDir(path).checkpoints))
    except CheckpointError:  # a run of another user
        return False


def pick(folder: Path, name: str | None, option: str = "--checkpoint") -> Path:
    """The checkpoint of this name (`step-00000400`, or `400`), which was given as `option`; None: the newest. Not verified."""
    paths = checkpoints_in(folder)
    if name is None:
        return paths[-1]
    for path in reversed(paths):  # if a step was saved twice, the later one
        if order(path)[0] == int(name) if name.isdecimal() else path.name == Path(name).name:
            return path
    there = ", ".join(path.name for path in paths)
    raise RunDirError(f"{option} {shlex.quote(name or '')}: no such checkpoint in {short(folder)}; there are: {there}")
