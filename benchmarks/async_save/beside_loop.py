"""What does a background save of 200 MB cost a training loop that uses all cores, in all?

    python benchmarks/async_save/beside_loop.py [ROUNDS] [--folder /dev/shm] [--steps 12]

The loop trains the model of bench.py (16.7 M parameters with their Adam state) with as many threads as there are cores. In
each round the same steps run without a save; with a save in the background after the first step, and a wait for it at the end;
and with torch.save, which blocks the loop and flushes nothing. The cost is the difference of a way's time from that of the loop
without a save, divided by the time of a memcpy of the state: in wall-clock time, and in CPU time of all threads.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a thread that waits in a loop would count as CPU time

import torch
from bench import tensors, trained

from rankwise.checkpoint import Checkpoints

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import median, rounds


def bench(folder: Path, count: int, steps: int) -> str:
    model, optimizer, _ = trained()
    parts = {"model": model, "optimizer": optimizer}
    state = tensors(model, optimizer)
    buffers = [tensor.clone() for tensor in state]
    inputs = torch.randn(256, 1020)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    checkpoints = Checkpoints(folder / "background", background=True, keep_last=2)

    def plain(turn: int) -> None:
        for _ in range(steps):
            step()

    def background(turn: int) -> None:
        step()
        checkpoints.save(parts, turn)
        for _ in range(steps - 1):
            step()
        checkpoints.wait()

    def torch_save(turn: int) -> None:
        plain(turn)
        for name, part in parts.items():
            torch.save(part.state_dict(), folder / f"{name}.pt")

    def memcpy(turn: int) -> None:
        for buffer, tensor in zip(buffers, state, strict=True):
            buffer.copy_(tensor)

    def timed(way: Callable[[int], None], turn: int) -> tuple[float, float]:
        began, began_cpu = time.perf_counter(), time.process_time()
        way(turn)
        return time.perf_counter() - began, time.process_time() - began_cpu

    ways = {"no save": plain, "memcpy": memcpy, "background": background, "torch.save": torch_save}
    times = rounds({name: lambda turn, way=way: timed(way, turn) for name, way in ways.items()}, count, warm=2)
    lines = [f"{steps} steps of {1e3 * median(wall for wall, _ in times['no save']) / steps:.0f} ms; {count} rounds"]
    for place, clock in enumerate(("wall", "CPU")):
        found = {name: [each[place] for each in taken] for name, taken in times.items()}
        copy = median(found["memcpy"])
        for name in ("background", "torch.save"):
            cost = median(a - b for a, b in zip(found[name], found["no save"], strict=True))
            lines.append(
                f"{clock:4}  {name:10}  {cost / copy:5.1f} memcpy  ({1e3 * cost:.0f} ms; a memcpy {1e3 * copy:.0f} ms)"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=11)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="in memory, or on a disk")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print(bench(folder, options.rounds, options.steps))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
