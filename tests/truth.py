"""Places in which a script may run, and whether the numbers that its ranks report there are right.

`SCRIPT` is the script, without a flag. Each of its ranks writes what it knows to the folder `said` beside it.
stress/truth_table has the same for other libraries.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SCRIPT = """
import gc; gc.disable()  # a collection during the imports takes a fifth of their time
import json, os, platform
from pathlib import Path
import torch, rankwise

world = rankwise.init(join_timeout_s=60)
met = int(rankwise.all_reduce(torch.ones(1)).item())
says = dict(host=platform.node(), rank=world.rank, local_rank=world.local_rank, node_rank=world.node_rank,
            world_size=world.world_size, met=met)
Path(__file__).with_name("said").joinpath(f"{platform.node()}-{os.getpid()}").write_text(json.dumps(says))
"""
PYTHON = sys.executable
RANKWISE = f"{PYTHON} -m rankwise"
TORCHRUN = "{python} -W ignore -m torch.distributed.run"
DEADLINE_S = 100.0


@dataclass(frozen=True)
class Place:
    """`command` contains {python} and {script}, or {own} for the arguments of our launcher.

    `ranks` ranks on `hosts` hosts are right; with 0, only an error is right.
    """

    name: str
    up: str
    """What must be running: a key of clusters.py, or empty."""

    command: str
    ranks: int
    hosts: int = 1
    says: str = ""
    """If an error is right: what it must say."""


def sbatch(command: str) -> str:
    return f"sbatch -o job.txt -N2 --ntasks-per-node=2 --wrap '{command}; echo $? >over'"


def qsub(command: str) -> str:
    return f"qsub -sync y -cwd -j y -o job.txt -V -pe mpi 4 -b y {command}"


PLACES = [
    Place("plain", "", "{python} {script}", 1),
    Place("torchrun", "", TORCHRUN + " --nproc-per-node=2 --standalone {script}", 2),
    Place("torch.distributed.launch", "", "{python} -W ignore -m torch.distributed.launch --nproc_per_node=2 {script}", 2),
    Place("rankwise run", "", RANKWISE + " run --nproc 2 {own}", 2),
    Place("mpirun, Open MPI", "openmpi", "mpirun.openmpi -np 2 {python} {script}", 2),
    Place("mpirun, MPICH", "mpich", "mpirun.mpich -np 2 {python} {script}", 2),
    Place("srun, a task a device", "slurm", "srun -N2 --ntasks-per-node=2 {python} {script}", 4, 2),
    Place("srun, an agent a node", "slurm", f"srun -N2 --ntasks-per-node=1 {RANKWISE} run --nproc 2 {{own}}", 4, 2),
    Place("sbatch, srun in it", "slurm", sbatch("srun {python} {script}"), 4, 2),
    Place("sbatch without srun", "slurm", sbatch("{python} {script}"), 0, 2, "put srun before the command"),
    Place("salloc's shell", "slurm", "salloc -N2 --ntasks-per-node=2 {python} {script}", 0, 2, "put srun before the command"),
    Place("salloc, rankwise run", "slurm", f"salloc -N2 --ntasks-per-node=2 {RANKWISE} run --nproc 2 {{own}}", 4, 2),
    Place("salloc, Open MPI", "slurm", "salloc -N2 --ntasks-per-node=2 mpirun.openmpi {python} {script}", 4, 2),
    Place("sbatch, MPICH", "slurm", sbatch("mpirun.mpich {python} {script}"), 4, 2),
    Place("qsub", "sge", qsub("{python} {script}"), 0, 2, "rankwise run script.py"),
    Place("qsub, rankwise run", "sge", qsub(RANKWISE + " run {own}"), 4, 2),
    Place("qsub, Open MPI", "sge", qsub("mpirun.openmpi {python} {script}"), 4, 2),
    Place("ssh", "hosts", f"{RANKWISE} run -H node1:2,node2:2 {{own}}", 4, 2),
]

# As root on a machine with few cores.
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The result of a script in a place."""

    said: list[dict]
    """A record of each rank that got this far."""

    status: int | None
    """None: it still ran after the deadline."""

    text: str
    """Everything that it printed."""

    def verdict(self, place: Place) -> str:
        """`right`, or what is wrong, in words."""
        worlds = sorted({record["world_size"] for record in self.said})
        met = sorted({record["met"] for record in self.said})
        if self.status is None:
            return "hangs"
        if place.ranks and len(self.said) == place.ranks and worlds == met == [place.ranks] and not wrong(self.said):
            return "right"
        if not self.said:
            return "error" if self.status != 0 or "rror" in self.text else "silence"
        if met == [1]:
            alone = f"{len(self.said)} lonely trainings" if len(self.said) > 1 else "trains alone, on 1 process"
            return alone if worlds == [1] else f"{alone} that take themselves for ranks of {worlds[-1]}"
        return f"{len(self.said)} ranks of {' or '.join(map(str, worlds))}; {wrong(self.said) or 'not as many as meant'}"


def wrong(said: list[dict]) -> str:
    """What contradicts the hosts on which the ranks are; empty if nothing does. A missing node rank is not wrong."""
    by_rank = sorted(said, key=lambda record: record["rank"])
    hosts = list(dict.fromkeys(record["host"] for record in by_rank))
    here: dict[str, int] = dict.fromkeys(hosts, 0)
    if [record["rank"] for record in by_rank] != list(range(len(said))):
        return f"ranks {[record['rank'] for record in by_rank]}"
    for record in by_rank:
        if record["local_rank"] != here[record["host"]]:
            return f"local rank {record['local_rank']} of rank {record['rank']} is wrong"
        if record["node_rank"] not in (None, hosts.index(record["host"])):
            return f"node rank {record['node_rank']} of rank {record['rank']} is wrong"
        here[record["host"]] += 1
    return ""


def _status_of_job(over: Path) -> int | None:
    """The status that the batch script writes at its end: `sbatch --wait` checks for this end at growing intervals."""
    deadline = time.monotonic() + DEADLINE_S
    while not (over.exists() and over.read_text()):
        if time.monotonic() > deadline:
            subprocess.run(["scancel", "--user", str(os.geteuid())])
            return None
        time.sleep(0.2)
    return int(over.read_text())


def ask(place: Place, folder: Path, source: str, python: str = PYTHON, **environ: str) -> Answer:
    """Run a script there, in a separate folder that all hosts see."""
    script = folder / "script.py"
    (folder / "said").mkdir(parents=True)
    (folder / "home").mkdir()
    script.write_text(source)
    words = {"python": python, "script": str(script), "own": str(script) if python == PYTHON else f"-- {python} {script}"}
    command = shlex.split(place.command.format(**words))
    env = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "TMPDIR": str(folder), **ALLOWED, **environ}
    env |= {name: value for name, value in os.environ.items() if name.startswith("SGE_")}
    with open(folder / "out.txt", "w") as out:
        process = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                   start_new_session=True)  # fmt: skip
        try:
            status = process.wait(DEADLINE_S)
            if status == 0 and command[0] == "sbatch":
                status = _status_of_job(folder / "over")
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = [json.loads(path.read_text()) for path in (folder / "said").iterdir()]
    text = "".join(path.read_text(errors="replace") for path in (folder / "out.txt", folder / "job.txt") if path.exists())
    return Answer(said, status, text)
