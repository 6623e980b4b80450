"""What other launchers do with a signal. Each row of the table in docs/stopping.md is tried here, without our code.

A small dose tries one signal per launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from clusters import STATE, Start, hosts, mpich, openmpi, sge, slurm
from launched import wait_for

__all__ = ["hosts", "mpich", "openmpi", "sge", "slurm"]  # fixtures

pytestmark = [pytest.mark.cluster, pytest.mark.stress]

DOCUMENT = Path(__file__).parents[2] / "docs" / "stopping.md"
SAVE_S = 4.0  # longer than Open MPI waits, and shorter than all others

RANK = f"""
import os, signal, sys, time
names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
rank = next((os.environ[name] for name in names if name in os.environ), "0")
asked = []
def note(signum, _):
    with open(f"got-{{rank}}", "a") as file:
        file.write(signal.Signals(signum).name + "\\n")
    asked.append(time.monotonic())
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, note)
open(f"there-{{rank}}", "w").close()
until = time.monotonic() + 60
while time.monotonic() < until and not (asked and time.monotonic() > asked[0] + {SAVE_S}):
    time.sleep(0.02)
if asked:
    open(f"saved-{{rank}}", "w").close()
sys.exit(75)
"""


@dataclass(frozen=True)
class Row:
    """A row of the page's table, for one signal."""

    launcher: str
    asked_by: str
    got: str
    """A signal, or empty."""

    saves: bool
    lives_on: bool
    statuses: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.launcher}: {self.asked_by}"

    @property
    def up(self) -> str | None:
        """What must be running for it."""
        return COMMANDS[self.launcher][0]


def rows() -> Iterator[Row]:
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 5 or cells[3] not in ("yes", "no"):
            continue
        ways = re.findall(r"`([^`]+)`", cells[1]) or [cells[1]]
        statuses = [tuple(map(int, text.split(" or "))) for text in cells[4].split(", ")]
        for number, way in enumerate(ways):
            same = way if way.startswith("SIG") else f"SIG{way.split()[-2]}"
            named = re.match(r"`(SIG\w+)`", cells[2])
            got = same if cells[2].startswith("the same") else named[1] if named else ""
            launcher = cells[0].replace("`", "")
            yield Row(launcher, way, got, cells[3] == "yes", "continue" in cells[2], statuses[number % len(statuses)])


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "rank.py"]
SSH = ["ssh", "-i", f"{STATE}/ssh/id", "node1"]
COMMANDS: dict[str, tuple[str | None, Sequence[str]]] = {
    "torchrun": (None, TORCHRUN),
    "Open MPI's mpirun": ("openmpi", ["mpirun.openmpi", "-np", "2", sys.executable, "rank.py"]),
    "MPICH's mpirun": ("mpich", ["mpirun.mpich", "-np", "2", sys.executable, "rank.py"]),
    "srun": ("slurm", ["srun", "-N2", "-n2", sys.executable, "rank.py"]),
    "sbatch -W, srun in its script": ("slurm", ["sbatch", "-W", "job.sh"]),
    "qsub -sync y": ("sge", ["qsub", "-sync", "y", "job.sh"]),
    "qsub -sync y -notify": ("sge", ["qsub", "-sync", "y", "-notify", "job.sh"]),
    "qsub -sync y -l s_rt=5": ("sge", ["qsub", "-sync", "y", "-l", "s_rt=5", "job.sh"]),
    "ssh without a terminal": ("hosts", SSH),
}
"""By its name on the page: the fixture that starts it, and a command for rank.py."""

JOBS = {
    "slurm": "#!/bin/bash\n#SBATCH -N2 -n2 -o job.log\nexec srun {python} rank.py\n",
    "sge": "#!/bin/bash\n#$ -cwd -o job.log -j y\nexec {python} rank.py\n",
}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}


def test_the_table_is_of_all_that_starts_ranks() -> None:
    assert {row.launcher for row in rows()} == set(COMMANDS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        chosen = {row.launcher: row for row in rows()}.values() if metafunc.config.getoption("dose") == "small" else rows()
        metafunc.parametrize("row", list(chosen), ids=str)


def test_a_signal_to_another_launcher_does_what_the_table_says(row: Row, request: pytest.FixtureRequest) -> None:
    fixture, words = COMMANDS[row.launcher]
    start: Start | None = request.getfixturevalue(fixture) if fixture is not None else None
    assert start is not None or fixture is None
    Path("rank.py").write_text(RANK)
    if fixture in JOBS:
        Path("job.sh").write_text(JOBS[fixture].format(python=shlex.quote(sys.executable)))
    if fixture == "hosts":
        words = [*words, shlex.join(["cd", os.getcwd()]) + " && exec " + shlex.join([sys.executable, "rank.py"])]
    ranks = 1 if fixture in ("hosts", "sge") else 2
    with open("out.txt", "w") as out, running(words, out) as process:
        wait_for(lambda: len(list(Path.cwd().glob("there-*"))) == ranks, "all ranks")
        ask(row.asked_by, process)
        status = process.wait(timeout=60)
        if row.lives_on:
            assert len(ranks_here()) == ranks
        else:
            wait_for(lambda: not ranks_here(), "the end of all ranks")
    got = {name for path in Path.cwd().glob("got-*") for name in path.read_text().split()}
    assert got == ({row.got} if row.got and row.got != "SIGKILL" else set()), Path("out.txt").read_text()
    assert len(list(Path.cwd().glob("saved-*"))) == ranks * row.saves
    assert (status if status >= 0 else 128 - status) in row.statuses


@contextlib.contextmanager
def running(words: Sequence[str], out: object) -> Iterator[subprocess.Popen[bytes]]:
    """Nothing of it is left at the end."""
    process = subprocess.Popen(
        words, env={**os.environ, **AS_ROOT}, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
    )  # type: ignore[call-overload]
    try:
        yield process
    finally:
        for rank in ranks_here():
            rank.kill()
        process.kill()
        process.wait()


def ask(way: str, process: subprocess.Popen[bytes]) -> None:
    if way.startswith("SIG"):
        process.send_signal(signal.Signals[way])
    elif "JOB" in way:
        words = ["squeue", "-h", "-o", "%i", "--me"] if "scancel" in way else ["qstat"]
        listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        subprocess.run(way.replace("JOB", listed[-1].split()[0]).split(), check=True, capture_output=True)


def ranks_here() -> list[psutil.Process]:
    """The ranks of this test, on any host."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:] in (["rank.py"], ["-u", "rank.py"]) and process.cwd() == os.getcwd():
                found.append(process)
    return found
