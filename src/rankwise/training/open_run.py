"""The run directory of a training, and the right of this process to write there.

run = RunDir(run_path(world, None));  attempt, lease = open_run(run, world, fresh=False)
"""

from __future__ import annotations

import os
import shlex
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from rankwise import schedulers
from rankwise.dist import log
from rankwise.dist.guards import run_on_main
from rankwise.dist.world import World
from rankwise.errors import ConfigError, RunDirError
from rankwise.host.session import is_interactive
from rankwise.host.text import in_lines, short, stamp
from rankwise.run import lease as leases
from rankwise.run.config import default_run_dir
from rankwise.run.directory import Attempt, RunDir
from rankwise.run.lease import Holder, Lease


def run_path(world: World, run_dir: str | os.PathLike[str] | None) -> Path:
    """The run directory of our agent; without an agent, `run_dir`, or that of the job, or ./runs/<the script's stem>."""
    if world.run_dir is None:
        if run_dir is not None:
            return Path(run_dir).absolute()
        return schedulers.job_folder(os.environ) or default_run_dir(schedulers.named_by_task(Path(_script()).stem, os.environ))
    if run_dir is not None and Path(run_dir).absolute() != world.run_dir:
        log.say(
            f"writing to {short(world.run_dir)}, the launcher's run directory; to write to {run_dir}, type --run-dir {run_dir}"
        )
    return world.run_dir


def open_run(run: RunDir, world: World, fresh: bool) -> tuple[Attempt, Lease | None]:
    """Collective. (this attempt, the main rank's lease). Our agent, if there is one, has the lease already."""
    if world.run_dir is not None:
        if fresh:
            run_on_main(_set_aside, [run.metrics])
        return run.attempts()[-1], None
    lease: Lease | None = None

    def prepare() -> Attempt:
        nonlocal lease
        aside = run.prepare(fresh, log.say)
        if aside is not None:
            log.say(f"the older run was moved to {short(aside)}")
        lease = run.take(log.say)
        try:
            return run.begin_attempt(world.world_size, _argv())
        except BaseException:
            lease.release()
            raise

    return run_on_main(prepare), lease


def take_folder(folder: Path, run: RunDir, new: bool = False) -> Lease | None:
    """Collective. If the checkpoints are outside the run directory, where another run might write too: the main rank's lease of
    their folder. `new`: this run has not trained yet, so checkpoints there are of another run, which is printed. Raises
    RunDirError on all ranks if another process has it, or if the folder is not writable."""
    if folder.is_relative_to(run.path):
        return None
    lease: Lease | None = None

    def take() -> None:
        nonlocal lease
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirError(f"cannot write {folder}: {error.strerror}; give another folder to Checkpoints") from None
        lease = leases.take(folder / ".lease", log.say, _folder_in_use)
        if new and any(folder.glob("step-*")):
            log.say(
                in_lines(
                    f"{short(run.path)} is a new run, and resumes from the checkpoints of another run in {short(folder)}; "
                    "--name does not change the folder that a script gives to Checkpoints; to train from scratch, give another "
                    "folder there, or use --fresh"
                )
            )

    run_on_main(take)
    return lease


def _folder_in_use(path: Path, holder: Holder) -> RunDirError:
    return RunDirError(
        f"another run saves its checkpoints in {short(path.parent)}: pid {holder.pid} on {holder.host} since "
        f"{stamp(holder.since)}; each run needs its own folder: leave it out, or give another to Checkpoints"
    )


_used: dict[Path, weakref.ref[nn.Module]] = {}
"""The folders of checkpoints that this process has used, and for which model."""


def use_folder(folder: Path, model: nn.Module, chosen: bool) -> bool:
    """Record that `model` is saved in `folder`; returns whether it is the first. `chosen`: the script has named it. Raises
    ConfigError if it has not, and has trained another model there: the checkpoint of that one would be loaded into this one,
    instead of training it. (In a notebook the user runs the cell that creates the model again, to continue.)"""
    before = _used.get(folder)
    if before is not None and before() is not model and not chosen and hasattr(sys.modules["__main__"], "__file__"):
        raise ConfigError(
            f"{short(folder)} has the checkpoints of another model that this script has trained; give each model its own "
            'folder: Trainer(..., checkpoints=Checkpoints("runs/second"))'
        )
    _used[folder] = weakref.ref(model)
    return before is None


def already_done(run: RunDir, world: World, steps: int, by_script: bool = False, reason: str = "") -> str:
    """Collective. The line to print if nothing is left to train. `by_script`: the script has stopped the run.

    Raises ConfigError if the run was trained with other arguments: exit status 0 would claim that these were used.
    """
    launched = world.run_dir is not None
    run_on_main(_refuse_other_arguments, [run, steps, launched])
    fresh = f"for a new run: {'--fresh' if launched else 'fit(fresh=True)'}"
    if by_script:
        return f"stopped by the script at step {steps}{': ' * bool(reason)}{reason}; {fresh}"
    return f"already done: {steps} steps; for more, raise max_steps or max_epochs; {fresh}"


def _refuse_other_arguments(run: RunDir, steps: int, launched: bool) -> None:
    attempts = run.attempts()
    now, trained = attempts[-1], _trained_last(run, attempts)
    if trained is None or _arguments(trained) == _arguments(now):
        return
    named, fresh = ("--name NAME", "--fresh") if launched else ("run_dir=FOLDER", "fit(fresh=True)")
    raise ConfigError(
        f"already done: the {steps} steps of the run in {short(run.path)} were trained with `{shlex.join(trained.argv)}`, and "
        f"the command is now `{shlex.join(now.argv)}`. To train this as a new run: {named}. To start from scratch: {fresh}. To "
        "train for more steps: raise max_steps or max_epochs"
    )


def _trained_last(run: RunDir, attempts: Sequence[Attempt]) -> Attempt | None:
    """The last attempt with metrics; if there are none, the last that exited with status 0."""
    if newest := run.newest_metrics():
        return next((attempt for attempt in attempts if attempt.life == newest[-1].get("life")), None)
    return next((attempt for attempt in reversed(attempts[:-1]) if attempt.status == 0), None)


def _arguments(attempt: Attempt) -> tuple[str, ...]:
    """The arguments of the script, without its name (`-m` and a module are a name)."""
    return attempt.argv[2:] if attempt.argv[:1] == ("-m",) else attempt.argv[1:]


def _set_aside(path: Path) -> None:
    """Rename a file, if it exists, to `metrics.jsonl.old-1` or a similar name."""
    count = 1
    while (other := path.with_name(f"{path.name}.old-{count}")).exists():
        count += 1
    if path.exists():
        path.rename(other)


def _argv() -> tuple[str, ...]:
    """In a notebook, sys.argv is that of the kernel, and names another file each time. (`%run train.py --lr 1` sets it.)"""
    is_typed = is_interactive() and not hasattr(sys.modules["__main__"], "__file__")
    return (_script(),) if is_typed else tuple(sys.argv)


def _script() -> str:
    return str(getattr(sys.modules["__main__"], "__file__", None) or "interactive")
