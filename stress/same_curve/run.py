"""Is the demo's loss curve the same on one rank and on several, with the same global batch?

    python benchmarks/same_curve/bench.py [steps] [ranks ...]

Prints the loss of each log interval on every number of ranks, and the largest relative difference from the first. float32 sums
in another order differ in the last bits, and training amplifies that; in float64 the tests hold gradients to 1e-10.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "04_gpt.py"


def losses(ranks: int, steps: int, folder: str) -> dict[int, float]:
    run_dir = f"{folder}/{ranks}"
    command = [
        sys.executable,
        "-m",
        "rankwise",
        "run",
        "--nproc",
        str(ranks),
        "--run-dir",
        run_dir,
        str(DEMO),
        "--steps",
        str(steps),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    records = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    ranks = [int(word) for word in sys.argv[2:]] or [1, 2, 3]
    with tempfile.TemporaryDirectory() as folder:
        curves = [losses(n, steps, folder) for n in ranks]
    print("step  " + "  ".join(f"{n} rank{'s' * (n > 1)}".rjust(10) for n in ranks))
    for step in curves[0]:
        print(f"{step:4}  " + "  ".join(f"{curve[step]:10.7f}" for curve in curves))
    worst = max(abs(curve[step] / curves[0][step] - 1) for curve in curves for step in curves[0])
    print(f"largest relative difference: {worst:.1e}")


if __name__ == "__main__":
    main()
