"""From the command to the last rank's first step, and from there to the exit: rankwise against torchrun.

python benchmarks/launch/bench.py [rounds] [ranks ...]
"""

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKER = str(Path(__file__).with_name("worker.py"))


def commands(ranks: int, folder: str) -> dict[str, list[str]]:
    return {
        "torchrun": [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
            WORKER,
            folder,
        ],
        "rankwise": [sys.executable, "-m", "rankwise", "run", "--nproc", str(ranks), WORKER, folder],
    }


def measure(command: list[str], folder: str) -> tuple[float, float, float]:
    """(seconds to the last rank's first step, from there to the exit, CPU seconds of the whole tree)."""
    for mark in Path(folder).glob("first-*"):
        mark.unlink()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.time()
    # Not checked: gloo's own teardown fails now and then under torchrun, after the first step is done and noted.
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ended = time.time()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    first = max(float(mark.read_text()) for mark in Path(folder).glob("first-*"))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return first - began, ended - first, cpu


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    os.environ["OMP_NUM_THREADS"] = "1"
    for ranks in [int(word) for word in sys.argv[2:]] or [2, 4]:
        folder = tempfile.mkdtemp()
        figures: dict[str, list[tuple[float, float, float]]] = {"torchrun": [], "rankwise": []}
        for _ in range(rounds):
            for name, command in commands(ranks, folder).items():
                figures[name].append(measure(command, folder))
        shutil.rmtree(folder)
        print(f"{ranks} ranks, {rounds} interleaved rounds, rankwise / torchrun: median of pairs (min .. max)")
        for column, what in enumerate(("launch to first step", "first step to exit", "CPU of the whole tree")):
            pairs = zip(figures["rankwise"], figures["torchrun"], strict=True)
            ratios = [ours[column] / theirs[column] for ours, theirs in pairs]
            print(f"  {what:22} {statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")


if __name__ == "__main__":
    main()
