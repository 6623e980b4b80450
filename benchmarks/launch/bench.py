"""The time from the command to the last rank's first step, and from there to the exit: rankwise against torchrun.

python benchmarks/launch/bench.py [rounds] [ranks ...]
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import ratios, rounds, spread

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


def timed(command: list[str], folder: str) -> tuple[float, float, float]:
    """(seconds to the last rank's first step, from there to the exit, CPU seconds of the whole tree)."""
    for mark in Path(folder).glob("first-*"):
        mark.unlink()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.time()
    # Not checked: gloo's own teardown sometimes fails with torchrun, after the first step is complete and recorded.
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ended = time.time()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    first = max(float(mark.read_text()) for mark in Path(folder).glob("first-*"))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return first - began, ended - first, cpu


def compare(ranks: int, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ways = {name: lambda _, words=words: timed(words, folder) for name, words in commands(ranks, folder).items()}
        found = rounds(ways, count)
    print(f"{ranks} ranks, {count} interleaved rounds, rankwise / torchrun: median of pairs (min .. max)")
    columns = zip(zip(*found["rankwise"], strict=True), zip(*found["torchrun"], strict=True), strict=True)
    for what, (ours, theirs) in zip(
        ("launch to first step", "first step to exit", "CPU of the whole tree"), columns, strict=True
    ):
        print(f"  {what:22} {spread(ratios(ours, theirs))}")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    os.environ["OMP_NUM_THREADS"] = "1"
    for ranks in [int(word) for word in sys.argv[2:]] or [2, 4]:
        compare(ranks, count)


if __name__ == "__main__":
    main()
