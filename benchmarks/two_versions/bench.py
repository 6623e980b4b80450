"""Is a step of the Trainer slower than it was at an earlier commit?

    python benchmarks/two_versions/bench.py COMMIT [--ranks 1 2] [--tensors 10 1000] [--turns 60]

Trains one small model with both versions at the same time, each by its own `rankwise run`. The two take turns of some steps, so
that a busy machine is busy for both. Prints this checkout's step time divided by that of COMMIT: the median over the pairs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import p10, p90, ratios, rounds

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WARM = 5


class Version:
    """A training that waits between its turns."""

    def __init__(self, tree: Path, folder: Path, ranks: int, tensors: int, turns: int) -> None:
        folder.mkdir()
        self._go, self._done = folder / "go", folder / "done"
        for pipe in (self._go, self._done):
            os.mkfifo(pipe)
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "rankwise", "run", "--nproc", str(ranks), str(HERE / "worker.py")]
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, str(folder), str(tensors), str(turns)],
                env=environment, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._writer, self._reader = self._go.open("w"), self._done.open()

    def turn(self, _number: int) -> float:
        """The time of a step in microseconds."""
        print("go", file=self._writer, flush=True)
        return float(self._reader.readline())

    def end(self) -> None:
        self._writer.close()
        if self._process.wait() != 0:
            raise SystemExit(f"the training failed:\n{self._log.read_text()[-2000:]}")
        self._reader.close()


def compare(before: Path, ranks: int, tensors: int, turns: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        trees = {"before": before, "now": ROOT}
        versions = {name: Version(tree, Path(folder, name), ranks, tensors, turns) for name, tree in trees.items()}
        times = rounds({name: version.turn for name, version in versions.items()}, turns - WARM, WARM, rotate=True)
        for version in versions.values():
            version.end()
    found = sorted(ratios(times["now"], times["before"]))
    quartiles = f"{found[len(found) // 4]:.3f} .. {found[3 * len(found) // 4]:.3f}"
    tenth = p10(times["now"]) / p10(times["before"])
    return (
        f"{ranks} rank{'s' * (ranks > 1)}, {tensors} tensors: {found[len(found) // 2]:.3f} (quartiles {quartiles}; of the "
        f"fastest tenths {tenth:.3f}), {p10(times['before']):.0f} to {p90(times['before']):.0f} us a step before"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("commit")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tensors", type=int, nargs="+", default=[10, 1000])
    parser.add_argument("--turns", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder, "before")
        subprocess.run(["git", "clone", "-q", str(ROOT), str(before)], check=True)
        subprocess.run(["git", "checkout", "-q", options.commit], cwd=before, check=True)
        for ranks in options.ranks:
            for tensors in options.tensors:
                print(compare(before, ranks, tensors, options.turns), flush=True)


if __name__ == "__main__":
    main()
