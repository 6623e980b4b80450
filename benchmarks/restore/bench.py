"""What does it cost to load 200 MB, verified and not, compared with torch.load + load_state_dict? And the checksums at a save?

    python benchmarks/restore/bench.py [ROUNDS] [--folder /dev/shm] [--threads 1] [--same-process]

A model and its Adam state (16.7 M parameters, 200 MB), files in the page cache. Each load is the first of a newly forked
process, as on a rank: into a new model with an optimizer that has made no step (fresh), or one that has (in place). With
--same-process all loads are in one process, one after the other, where torch.load can use memory that earlier rounds have
freed. Every way runs once per round. Ratios compare with torch.load + load_state_dict of the same round and case. torch.load:
one file, read completely or mapped; if it is mapped, the optimizer depends on the file afterwards. memcpy: each tensor of the
state into an existing tensor. CPU: of all threads, user and kernel, which depends less on other programs.
"""

import argparse
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from rankwise.checkpoint import Checkpoints, resume
from rankwise.checkpoint import manifest as manifests

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import median, ratios, rounds, spread

Parts = tuple[nn.Module, torch.optim.Optimizer]
Taken = tuple[float, float]
"""(seconds of wall-clock time, seconds of CPU)"""


def new(stepped: bool) -> Parts:
    model = nn.Sequential(*(nn.Linear(1020, 1020) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t for part in (model, optimizer) for _, t in manifests.tensors(part.state_dict())]


def timed(way: Callable[..., object], parts: Parts) -> Taken:
    began, cpu = time.perf_counter(), time.process_time()
    way(*parts)
    return time.perf_counter() - began, time.process_time() - cpu


def forked(way: Callable[..., object], stepped: bool) -> Taken:
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, pickle.dumps(timed(way, new(stepped))))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(answer)


def ways(folder: Path) -> dict[str, Callable[..., object]]:
    model, optimizer = new(stepped=True)
    checkpoints = Checkpoints(folder / "checkpoints", background=False)
    path = checkpoints.save({"model": model, "optimizer": optimizer}, 1)
    manifest = manifests.Manifest.read(path)
    plain = folder / "plain.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, plain)
    state = tensors(model, optimizer)

    def with_torch(mapped: bool, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loaded = torch.load(plain, weights_only=True, mmap=mapped)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])

    def memcpy(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for there, tensor in zip(tensors(model, optimizer), state, strict=False):
            there.copy_(tensor)

    return {
        "torch.load + load_state_dict": lambda m, o: with_torch(False, m, o),
        "the same, mapped": lambda m, o: with_torch(True, m, o),
        "memcpy": memcpy,
        "rankwise, not verified": lambda m, o: resume.load(path, manifest, {"model": m, "optimizer": o}, verify=False),
        "rankwise, verified": lambda m, o: checkpoints.load_latest({"model": m, "optimizer": o}),
        "verification alone": lambda m, o: manifests.verify(path),
    }


def bench(folder: Path, count: int, fork: bool) -> str:
    found = ways(folder)
    lines = [f"{count} rounds; of pairs: median (min .. max); of the least; of CPU: median"]
    take = forked if fork else lambda way, stepped: timed(way, new(stepped))
    for stepped in (False, True):
        ways_here = {
            name: lambda _, way=way, stepped=stepped: take(way, stepped)
            for name, way in found.items()
            if stepped or name != "memcpy"
        }
        times = rounds(ways_here, count, warm=1, rotate=True)
        lines.append("in place: the optimizer has made a step" if stepped else "fresh: it has not")
        base, base_cpu = zip(*times["torch.load + load_state_dict"], strict=True)
        for name, took in times.items():
            wall, cpu = zip(*took, strict=True)
            lines.append(
                f"  {name:30} {spread(ratios(wall, base)):24} {min(wall) / min(base):.2f}   {median(ratios(cpu, base_cpu)):.2f}"
            )
    return "\n".join(lines)


def cost_of_sums(folder: Path) -> str:
    """The time of the checksums at a save, in the background thread."""
    state = tensors(*new(stepped=True))
    size = sum(tensor.nbytes for tensor in state)
    manifest = manifests.Manifest.read(next((folder / "checkpoints").glob("step-*")))
    on_disk = manifest.bytes + len(manifest.text())
    took = []
    for _ in range(9):
        began = time.thread_time()
        for tensor in state:
            manifests.tensor_sum(tensor)
        took.append(time.thread_time() - began)
    cost = median(took) / size * 1e9
    return f"sums at a save: {cost:.3f} s/GB on one core; on the disk {on_disk / size:.4f} of the state"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=15)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="in memory, or on a disk")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--same-process", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print(bench(folder, options.rounds, fork=not options.same_process))
        print(cost_of_sums(folder))
    finally:
        shutil.rmtree(folder)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
