"""Does a training on ranks take the same steps as plain torch on one device, for all models and optimizers?

    python stress/against_torch/run.py [--cells 2000] [--ranks 1 2 3 4 5] [--seed 0]

For each number of ranks, draws --cells cells by a seed, from all combinations of the optimizers of torch.optim, their kernels,
models, layouts in memory, events in the middle of a training, ways of reducing and micro-batches (cells.py); `--cells 0` takes
all. Prints what differs by more than 1e-12, and exits with 1 if anything does.
"""

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cells
from judge import WrongError, judged

import rankwise


def trial(folder: Path, ranks: list[int], many: int, seed: int) -> None:
    """Print the table. Raises WrongError."""
    wrong = 0
    for n in ranks:
        chosen = list(cells.cells((False, True) if n > 1 else (None,)))
        if many:
            chosen = random.Random(seed).sample(chosen, min(many, len(chosen)))
        told = rankwise.run_function(cells.run_all, (chosen, str(folder)), nproc=n, run_dir=folder / f"run-{n}")
        found = [
            (cell, next(filter(None, problems), None)) for cell, problems in zip(chosen, zip(*told, strict=True), strict=True)
        ]
        kinds = Counter("equal" if p is None else "equal after the same gradient" if p == "sign" else "WRONG" for _, p in found)
        print(f"{n} rank{'s' * (n > 1)}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())), flush=True)
        for cell, problem in found:
            if problem not in (None, "sign"):
                wrong += 1
                print(f"  {' | '.join(map(str, cell))}: {problem}", flush=True)
    if wrong:
        raise WrongError(f"{wrong} cells differ from plain torch")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=2000, help="for each number of ranks; 0: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return judged(lambda folder: trial(folder, options.ranks, options.cells, options.seed))


if __name__ == "__main__":
    sys.exit(main())
