"""The run directory of a training, and this process's right to write there.

run = RunDir(run_path(world, None));  life, lease = claim(run, world, fresh=False)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rankwise import log, schedulers
from rankwise.config import default_run_dir
from rankwise.guards import run_on_main
from rankwise.lease import Lease
from rankwise.rundir import Life, RunDir
from rankwise.terminal import short
from rankwise.world import World


def run_path(world: World, run_dir: str | os.PathLike[str] | None) -> Path:
    """What an agent of ours has made; elsewhere the folder asked for, or the job's own, or ./runs/<the script's stem>."""
    if world.run_dir is None:
        if run_dir is not None:
            return Path(run_dir).absolute()
        return schedulers.job_folder(os.environ) or default_run_dir(Path(_script()).stem)
    if run_dir is not None and Path(run_dir).absolute() != world.run_dir:
        log.say(f"writing in {short(world.run_dir)}, which the launcher made; for run_dir={run_dir} type --run-dir {run_dir}")
    return world.run_dir


def claim(run: RunDir, world: World, fresh: bool) -> tuple[Life, Lease | None]:
    """Collective. (this life, the main rank's right to write there). An agent of ours holds it already."""
    if world.run_dir is not None:
        if fresh:
            run_on_main(_set_aside, [run])
        return run.lives()[-1], None
    lease: Lease | None = None

    def prepare() -> Life:
        nonlocal lease
        aside = run.prepare(fresh, log.say)
        if aside is not None:
            log.say(f"the older run was moved to {short(aside)}")
        lease = run.take(log.say)
        return run.begin_life(world.world_size, tuple(sys.argv), fresh=fresh)

    return run_on_main(prepare), lease


def _set_aside(run: RunDir) -> None:
    """Under an agent, which lives in the run directory: what an earlier training left there gets another name."""
    for path in (run.checkpoints, run.metrics):
        count = 1
        while (other := path.with_name(f"{path.name}.old-{count}")).exists():
            count += 1
        if path.exists():
            path.rename(other)


def _script() -> str:
    return str(getattr(sys.modules["__main__"], "__file__", None) or "interactive")
