"""How much longer does importing rankwise's parts take than importing torch, and how long does `rankwise --help` take?

python benchmarks/import_time/bench.py [rounds]
"""

import statistics
import subprocess
import sys
import time

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


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, command in CASES.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - began)
    base = seconds["import torch"]
    print(f"{rounds} interleaved rounds; whole processes; ratio to `import torch`: median of pairs (min .. max), min / min")
    for name, times in seconds.items():
        ratios = [t / b for t, b in zip(times, base, strict=True)]
        least = min(times) / min(base)
        print(f"{name:36} {statistics.median(ratios):6.3f} ({min(ratios):.3f} .. {max(ratios):.3f})  {least:.3f}")


if __name__ == "__main__":
    main()
