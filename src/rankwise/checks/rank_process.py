"""One rank of a self-test: runs the user's script like Python, and tests its Trainer or watches its loop.

python -m rankwise.checks.rank_process SETTINGS.json script.py [its arguments]
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from rankwise.checks.instrument import Enough, Instrument
from rankwise.checks.settings import RankSettings
from rankwise.checks.trainer import findings_of
from rankwise.dist import seed
from rankwise.dist.world import discover
from rankwise.host import main_script
from rankwise.run import directory
from rankwise.trainer import Trainer
from rankwise.training.state import TrainState

_WAIT_S = 10.0


def main() -> None:
    """Write a record to the folder of the test, however the script ends, and exit with status 0."""
    given = json.loads(Path(sys.argv[1]).read_text())
    settings = RankSettings(given["folder"], given["ranks"], given["cut"], tuple(given["batches"]))
    rank = discover(os.environ).rank
    # The same seed in each start: a model that the script does not seed then starts the same on 1 rank and on 4.
    seed.seed_rank(0, rank)
    instrument = Instrument(settings, rank)
    asked: list[dict[str, Any]] = []
    _ask_trainers(instrument, asked)
    ended, lines = "", ""
    with instrument:
        try:
            _run_script(sys.argv[2:])
        except Enough:
            ended = "enough"
        except SystemExit as end:
            ended = "" if end.code in (None, 0) else f"it exited with {end.code}"
        except BaseException as error:  # the command reports whatever the script raises
            ended, lines = f"{type(error).__name__}: {error}", traceback.format_exc()
    record = {**asked[0], "rank": rank} if asked else instrument.record(ended)
    _leave(Path(settings.folder), settings.ranks, rank, {**record, "ended": ended, "traceback": lines}, instrument.gradients)


def _ask_trainers(instrument: Instrument, asked: list[dict[str, Any]]) -> None:
    """Trainer.fit runs the test instead of training, and then the script ends. `asked`: the findings of the first Trainer."""

    def fit(self: Trainer, fresh: bool = False) -> TrainState:
        instrument.close()
        asked.append({"findings": []})
        asked[0]["findings"] += [finding.record() for finding in findings_of(self)]
        raise Enough(0)

    Trainer.fit = fit  # type: ignore[method-assign]


def _run_script(argv: list[str]) -> None:
    sys.argv = list(argv)
    if not os.environ.get("PYTHONSAFEPATH"):  # this process was started with -P, and so has no folder of its own there
        sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
    main_script.run(argv[0])


def _leave(folder: Path, ranks: int, rank: int, record: dict[str, Any], gradients: dict[str, Any]) -> None:
    """Write the record, and wait a moment for the other ranks: they may be in a collective that needs this rank."""
    name = f"ranks-{ranks}-rank-{{}}"
    if gradients:
        np.savez(folder / f"{name.format(rank)}.npz", **gradients)
    directory.write_json(folder / f"{name.format(rank)}.json", record)
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline and not all((folder / f"{name.format(r)}.json").exists() for r in range(ranks)):
        time.sleep(0.02)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # the cleanup of the script's process groups and threads is not tested


if __name__ == "__main__":
    main()
