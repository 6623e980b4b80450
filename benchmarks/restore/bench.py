"""What does it cost to load 200 MB, verified and not, beside torch.load + load_state_dict?

    python benchmarks/restore/bench.py [ROUNDS] [--folder /dev/shm] [--threads 1]

A model and its Adam state (16.7 M parameters, 200 MB), one process, files in the page cache. Each way loads into a new model
and a new optimizer, in turn. torch.load: one file, read whole or mapped; mapped, the optimizer hangs on the file from then on.
memcpy: each tensor of the state into one that is there, the least that reading can take. Ratios to torch.load of that round.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint import manifest as manifests


def new() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(1020, 1020) for _ in range(16)))
    return model, torch.optim.AdamW(model.parameters(), foreach=True)


def bench(folder: Path, rounds: int) -> str:
    model, optimizer = new()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    checkpoints = Checkpoints(folder / "checkpoints")
    path = checkpoints.save({"model": model, "optimizer": optimizer}, 1)
    manifest = manifests.Manifest.read(path)
    plain = folder / "plain.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, plain)
    state = [t for part in (model, optimizer) for _, t in manifests.tensors(part.state_dict())]
    buffers = [tensor.clone() for tensor in state]

    def with_torch(mapped: bool, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loaded = torch.load(plain, weights_only=True, mmap=mapped)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])

    ways = {
        "torch.load + load_state_dict": lambda m, o: with_torch(False, m, o),
        "the same, mapped": lambda m, o: with_torch(True, m, o),
        "memcpy": lambda m, o: [b.copy_(t) for b, t in zip(buffers, state, strict=True)],
        "rankwise, not verified": lambda m, o: checkpoints._load(path, manifest, {"model": m, "optimizer": o}),
        "rankwise, verified": lambda m, o: checkpoints.load_latest({"model": m, "optimizer": o}),
        "rankwise, verification alone": lambda m, o: manifests.verify(path),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            parts = new()
            began = time.perf_counter()
            ways[name](*parts)
            times[name].append(time.perf_counter() - began)
    base = times["torch.load + load_state_dict"][1:]
    lines = [f"{sum(t.nbytes for t in state) / 1e6:.0f} MB; {rounds} rounds; median of pairs (min .. max), ratio of the least"]
    for name, took in times.items():
        ratios = [a / b for a, b in zip(took[1:], base, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"
        lines.append(f"{name:30} {spread:24} {min(took[1:]) / min(base):.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=15)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="in memory, or on a disk")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print(bench(folder, options.rounds))
    finally:
        shutil.rmtree(folder)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
