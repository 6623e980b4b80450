"""From the command to the last rank's first step, and from there to the exit, over two hosts: rankwise against torchrun.

tests/cluster/hosts/hosts-up 2; python benchmarks/two_hosts/bench.py node1 node2 [rounds] [ranks a host]; .../hosts-down

torchrun must be started on each host, here by two ssh commands at once. rankwise is started once, and reaches both over ssh
itself. The hosts share this folder.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import median, ratios, rounds, spread

WORKER = str(Path(__file__).parents[1] / "launch" / "worker.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def torchrun(hosts: list[str], ranks: int, folder: str, port: int) -> list[list[str]]:
    started = []
    for number, host in enumerate(hosts):
        words = [*TORCHRUN, f"--nnodes={len(hosts)}", f"--node_rank={number}", f"--nproc_per_node={ranks}"]
        words += [f"--master_addr={hosts[0]}", f"--master_port={port}", WORKER, folder]
        started.append(["ssh", "-o", "BatchMode=yes", host, f"cd {shlex.quote(folder)}; OMP_NUM_THREADS=1 {shlex.join(words)}"])
    return started


def rankwise(hosts: list[str], ranks: int, folder: str, port: int) -> list[list[str]]:
    named = ",".join(f"{host}:{ranks}" for host in hosts)
    return [[sys.executable, "-m", "rankwise", "run", "-H", named, WORKER, folder]]


def timed(commands: list[list[str]], folder: str, ranks: int) -> tuple[float, float]:
    """(seconds to the last rank's first step, from there to the exit)."""
    for mark in Path(folder).glob("first-*"):
        mark.unlink()
    began = time.time()
    started = [subprocess.Popen(c, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for c in commands]
    for process in started:
        process.wait()
    ended = time.time()
    marks = [float(mark.read_text()) for mark in Path(folder).glob("first-*")]
    assert len(marks) == ranks, f"{len(marks)} of {ranks} ranks did a step"
    return max(marks) - began, ended - max(marks)


def main() -> None:
    hosts = sys.argv[1:3]
    count, ranks = [int(word) for word in sys.argv[3:5]] if len(sys.argv) > 4 else (7, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:

        def way(make):
            return lambda turn: timed(make(hosts, ranks, folder, 29500 + turn), folder, ranks * len(hosts))

        found = rounds({"torchrun": way(torchrun), "rankwise": way(rankwise)}, count)
    print(
        f"{ranks} ranks on each of {len(hosts)} hosts, {count} interleaved rounds, "
        "rankwise / torchrun: median of pairs (min .. max)"
    )
    columns = {name: list(zip(*rows, strict=True)) for name, rows in found.items()}
    for column, what in enumerate(("command to first step", "first step to exit")):
        print(f"{what}: {spread(ratios(columns['rankwise'][column], columns['torchrun'][column]))}")
        for name in found:
            print(f"  {name}: {median(columns[name][column]):.2f} s")


if __name__ == "__main__":
    main()
