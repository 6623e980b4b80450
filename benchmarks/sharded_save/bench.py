"""How long does the loop wait for a save, and when is it on disk, if each rank writes a share instead of the main rank all?

    rankwise run --nproc 2 benchmarks/sharded_save/bench.py [ROUNDS] [--folder /dev/shm]

A model and its Adam state (200 MB), the same on all ranks, are saved in the background by one rank and by all ranks, in turn,
with an optimizer step before each save; two rounds are not counted. Ratios compare with the single writer in the same round.
Seconds are those of the rank that waits longest. CPU is that of the main rank's loop thread (for the copy), and of all its
threads until the save is on disk.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import rankwise
from rankwise.checkpoint import Checkpoints
from rankwise.dist import comm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import ratios, rounds, spread


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=9)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    rankwise.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1020, 1020) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    gradients = [torch.randn_like(p) for p in model.parameters()]
    folder = rankwise.run_on_main(lambda: Path(tempfile.mkdtemp(dir=options.folder)))

    def saved(checkpoints: Checkpoints, turn: int) -> list[float]:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        comm.barrier()
        began, cpu, all_cpu = time.perf_counter(), time.thread_time(), time.process_time()
        checkpoints.save({"model": model, "optimizer": optimizer}, turn)
        taken = [time.perf_counter() - began, time.thread_time() - cpu]
        checkpoints.wait()
        taken += [time.perf_counter() - began, time.process_time() - all_cpu]
        slowest = comm.all_reduce(torch.tensor([taken[0], taken[2]]), "max").tolist()
        return [slowest[0], taken[1], slowest[1], taken[3]]

    ways = {name: Checkpoints(folder / name, keep_last=1, background=True, sharded=name == "all") for name in ("all", "one")}
    found = rounds(
        {name: lambda turn, way=way: saved(way, turn) for name, way in ways.items()}, options.rounds, warm=2, rotate=True
    )
    if comm.is_main():
        columns = zip(zip(*found["all"], strict=True), zip(*found["one"], strict=True), strict=True)
        figures = ("the loop waits", "CPU of the copy", "on the disk", "CPU of all of the main rank")
        for figure, (all_ranks, one) in zip(figures, columns, strict=True):
            print(f"{figure:30} all ranks / one: {spread(ratios(all_ranks, one))}", flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
