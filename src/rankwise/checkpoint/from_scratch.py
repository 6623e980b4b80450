"""Starting from scratch in a folder with checkpoints of an older run, because of `--fresh` or `fit(fresh=True)`.

begin(folder, mirror, writers)     # at the first use of a folder; only a run that was started with --fresh starts from scratch
start(folder, mirror, writers)     # FOLDER/step-00000400 -> FOLDER/old-1/step-00000400
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rankwise.checkpoint.folders import checkpoints_in
from rankwise.checkpoint.mirror import Mirror
from rankwise.dist import comm, log
from rankwise.dist.guards import run_on_firsts, run_on_main
from rankwise.errors import ConfigError, RunDirError
from rankwise.host.text import short
from rankwise.run.directory import RunDir


def begin(folder: Path, mirror: Mirror | None, writers: Callable[[], Sequence[Sequence[int]]]) -> None:
    """Collective. If the run was started with --fresh, its first use of each folder starts from scratch, in any attempt: an
    earlier attempt may have failed before."""
    path = comm.world().run_dir
    if path is None:
        return
    run = RunDir(path)
    if run_on_main(run.is_first_use, [folder]):
        start(folder, mirror, writers())
        run_on_main(run.record_use, [folder])


def start(folder: Path, mirror: Mirror | None, writers: Sequence[Sequence[int]]) -> None:
    """Collective. Move the checkpoints of an older run aside. Raises ConfigError if the mirror has any: the run would resume
    from them."""
    names = run_on_main(mirror.names) if mirror is not None else []
    if names and mirror is not None:
        raise ConfigError(
            f"to start from scratch, mirror={mirror.url!r} must be empty, and it has {names[-1]}; "
            "give another URL, or empty this one"
        )
    aside = run_on_firsts(writers, lambda: _move_aside(folder))
    if aside is not None:
        log.say(f"the older checkpoints were moved to {short(aside)}")


def _move_aside(folder: Path) -> Path | None:
    """Move the checkpoints into a folder beside them, and return it. Nothing else moves: the folder may be a link or a mount
    point, and may have files of the user."""
    older = checkpoints_in(folder)
    if not older:
        return None
    number = 1
    while (aside := folder / f"old-{number}").exists():
        number += 1
    try:
        aside.mkdir()
        for path in older:
            path.rename(aside / path.name)
    except OSError as error:
        raise RunDirError(
            f"the older checkpoints in {folder} cannot be moved to {aside} ({error.strerror}); move them, or give another "
            "folder to Checkpoints"
        ) from None
    return aside
