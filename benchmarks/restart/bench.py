"""The time from the request to fork the ranks again to the last rank's first step, against a cold launch of torchrun.

python benchmarks/restart/bench.py [rounds] [ranks ...]
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import ratios, rounds, spread

WORKER = str(Path(__file__).with_name("worker.py"))


def first_step(folder: str, attempt: int, ranks: int) -> float:
    marks = list(Path(folder).glob(f"first-{attempt}-*"))
    assert len(marks) == ranks, f"{len(marks)} of {ranks} ranks did a step in life {attempt}"
    return max(float(mark.read_text()) for mark in marks)


def restart(ranks: int, folder: str) -> tuple[float, float]:
    """(seconds from the fork request of the second attempt to its first step, seconds from the end of the first attempt to
    it)"""
    command = [sys.executable, "-m", "rankwise", "run", "--nproc", str(ranks), "--max-restarts", "1", "--fresh"]
    subprocess.run([*command, WORKER, folder, "die"], cwd=folder, capture_output=True, check=True)
    before, after = json.loads(Path(folder, "runs", "worker", "world.json").read_text())["lives"]
    first = first_step(folder, 1, ranks)
    return first - after["started"], first - before["ended"]  # an attempt starts right after the request for its ranks


def cold(ranks: int, folder: str) -> float:
    """Seconds from the command to the first step, with torchrun."""
    began = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", WORKER, folder]
    # Not checked: gloo's own teardown sometimes fails with torchrun, after the first step is complete and recorded.
    subprocess.run(command, cwd=folder, capture_output=True)
    return first_step(folder, 0, ranks) - began


def compare(ranks: int, count: int) -> None:
    def in_a_folder(way):
        with tempfile.TemporaryDirectory() as folder:
            return way(ranks, folder)

    found = rounds({"torchrun": lambda _: in_a_folder(cold), "restart": lambda _: in_a_folder(restart)}, count)
    restarts = [from_fork for from_fork, _ in found["restart"]]
    print(f"{ranks} ranks, {count} interleaved rounds: median (min .. max)")
    print(f"  torchrun, launch to first step, s   {spread(found['torchrun'], 3)}")
    print(f"  restart, fork to first step, s      {spread(restarts, 3)}")
    print(f"  restart / torchrun                  {spread(ratios(restarts, found['torchrun']), 3)}")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    os.environ["OMP_NUM_THREADS"] = "1"
    for ranks in [int(word) for word in sys.argv[2:]] or [2, 4]:
        compare(ranks, count)


if __name__ == "__main__":
    main()
