"""Is the demo's loss curve the same on one rank and on several ranks, with the same global batch?

    python stress/same_curve/run.py [STEPS] [RANKS ...] [--batch 32] [--within 1e-5]

Prints the loss of each log interval on every number of ranks, and the largest relative difference from the first. float32 sums
in another order differ in the last bits, and training amplifies this: 4e-8 after 60 steps. In float64, the tests require that
gradients agree to 1e-10. Exits with 1 if a difference is larger than --within, or a run did not log the same steps.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from judge import WrongError, judged

DEMO = Path(__file__).parents[2] / "examples" / "04_gpt.py"


def losses(ranks: int, steps: int, batch: int, folder: Path) -> dict[int, float]:
    run_dir = folder / str(ranks)
    command = [sys.executable, "-m", "rankwise", "run", "--nproc", str(ranks), "--run-dir", str(run_dir), str(DEMO)]
    # One thread on any number of ranks: on a busy machine, threads that wait for each other make one rank take minutes.
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = ["--steps", str(steps), "--batch", str(batch)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, env=environ)
    if done.returncode != 0:
        raise WrongError(f"the demo on {ranks} ranks failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def trial(folder: Path, steps: int, ranks: list[int], batch: int, within: float) -> None:
    """Print the table. Raises WrongError."""
    curves = [losses(n, steps, batch, folder) for n in ranks]
    print("step  " + "  ".join(f"{n} rank{'s' * (n > 1)}".rjust(10) for n in ranks))
    if not curves[0] or any(curve.keys() != curves[0].keys() for curve in curves):
        raise WrongError(f"the runs logged steps {[sorted(curve) for curve in curves]}")
    for step in curves[0]:
        print(f"{step:4}  " + "  ".join(f"{curve[step]:10.7f}" for curve in curves))
    differences = [abs(curve[step] / curves[0][step] - 1) for curve in curves for step in curves[0]]
    print(f"largest relative difference: {max(differences):.1e}")
    if not all(difference <= within for difference in differences):  # also wrong: a loss that is not a number
        raise WrongError(f"a loss differs by more than {within:g}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int, nargs="?", default=100)
    parser.add_argument("ranks", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--batch", type=int, default=32, help="samples in a global batch")
    parser.add_argument("--within", type=float, default=1e-5, help="the largest relative difference that is right")
    options = parser.parse_args()
    return judged(lambda folder: trial(folder, options.steps, options.ranks, options.batch, options.within))


if __name__ == "__main__":
    sys.exit(main())
