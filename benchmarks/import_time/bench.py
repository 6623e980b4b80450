"""How much longer does it take to import rankwise than torch, and how long does `rankwise --help` take?

python benchmarks/import_time/bench.py [rounds]
"""

import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import ratios, rounds, spread

CASES = {
    "import torch": [sys.executable, "-c", "import torch"],
    "import rankwise, all public names": [
        sys.executable,
        "-c",
        "import rankwise\nfor n in rankwise.__all__: getattr(rankwise, n)",
    ],
    "import rankwise": [sys.executable, "-c", "import rankwise"],
    "rankwise --help": [sys.executable, "-m", "rankwise", "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
}


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    found = rounds({name: lambda _, command=command: seconds(command) for name, command in CASES.items()}, count)
    base = found["import torch"]
    print(f"{count} interleaved rounds; whole processes; ratio to `import torch`: median of pairs (min .. max), min / min")
    for name, times in found.items():
        print(f"{name:36}  {spread(ratios(times, base), 3)}  {min(times) / min(base):.3f}")


if __name__ == "__main__":
    main()
