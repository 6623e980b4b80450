"""A whole training as people have it, from the command to the last checkpoint: images that are read one by one and augmented,
loader workers, an evaluation and a checkpoint in each epoch. Compared with PyTorch's own loop, Lightning and Accelerate.

    python benchmarks/whole_training/bench.py [rounds]

The scripts `with_*.py` train the same (task.py), each as its library's own guide writes it. Lightning and Accelerate:
`pip install lightning accelerate`.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import median, ratios, rounds, spread

HERE = Path(__file__).resolve().parent


def script(name: str) -> str:
    return str(HERE / f"with_{name}.py")


def ways(ranks: int) -> dict[str, list[str]]:
    python = [sys.executable]
    rankwise = [*python, "-m", "rankwise", "run", "--nproc", str(ranks), script("rankwise")]
    torchrun = [*python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    accelerate = [*python, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(ranks)]
    return {
        "PyTorch": [*(python if ranks == 1 else torchrun), script("torch")],
        "rankwise": rankwise,
        "rankwise, persistent_workers": [*rankwise, "persistent"],
        "Lightning": [*python, script("lightning"), str(ranks)],
        "Accelerate": [*(python if ranks == 1 else accelerate), script("accelerate")],
    }


def seconds(command: list[str]) -> tuple[float, float]:
    """(wall time, processor time of all processes)."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, env=env, cwd=folder, check=True, capture_output=True)
        wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    print("| ranks | way | wall s | / PyTorch | CPU s | / PyTorch |\n|---|---|---|---|---|---|")
    for ranks in (1, 2):
        called = {name: (lambda _, command=command: seconds(command)) for name, command in ways(ranks).items()}
        found = rounds(called, int(sys.argv[1]) if len(sys.argv) > 1 else 5, rotate=True)
        for name, figures in found.items():
            cells = []
            for kind in (0, 1):
                mine, theirs = ([pair[kind] for pair in each] for each in (figures, found["PyTorch"]))
                cells += [f"{median(mine):.1f}", spread(ratios(mine, theirs))]
            print(f"| {ranks} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
