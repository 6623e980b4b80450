"""How long does the loop wait for a save of 200 MB, compared with a memcpy of the state, and with other libraries?

    python benchmarks/async_save/bench.py [ROUNDS] [--folder /dev/shm] [--threads 1]

A model and its Adam state (16.7 M parameters, 200 MB), one process, float32 on the CPU. In each round every way saves once, in
turn, after one step of the optimizer. Only the call that the loop waits for is timed; before the next way starts, the script
waits for the rest of the save. The first two rounds, in which buffers are allocated, are not counted.

memcpy: each tensor of the state is copied into an existing tensor. Blocking and background: rankwise.Checkpoints, verified,
with checksums and flushed. torch.save: two files, no flush, no rename. DCP: torch.distributed.checkpoint.async_save, with a
thread. Lightning: AsyncCheckpointIO, if it is installed. Seconds are wall-clock time, and CPU time of the calling thread, which
depends less on other programs.
"""

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from rankwise.checkpoint import Checkpoints

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import median, ratios, rounds, spread

Way = tuple[Callable[[int], object], Callable[[], object]]
"""(what the loop waits for, a wait until the save is complete)"""


def trained() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1020, 1020) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    gradients = [torch.randn_like(p) for p in model.parameters()]

    def step() -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    step()
    return model, optimizer, step


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = (value for state in optimizer.state_dict()["state"].values() for value in state.values())
    return [*model.state_dict().values(), *moments]


def ways(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Way]:
    parts = {"model": model, "optimizer": optimizer}
    state = tensors(model, optimizer)
    buffers = [tensor.clone() for tensor in state]

    def memcpy(step: int) -> None:
        for buffer, tensor in zip(buffers, state, strict=True):
            buffer.copy_(tensor)

    def torch_save(step: int) -> None:
        for name, part in parts.items():
            torch.save(part.state_dict(), folder / f"{name}.pt")

    behind = Checkpoints(folder / "background", background=True)
    blocking = Checkpoints(folder / "blocking", background=False)
    found: dict[str, Way] = {
        "memcpy": (memcpy, lambda: None),
        "background": (lambda step: behind.save(parts, step), behind.wait),
        "blocking": (lambda step: blocking.save(parts, step), lambda: None),
        "torch.save": (torch_save, lambda: None),
    }
    futures = []

    def dcp_async(step: int) -> None:
        states = {name: part.state_dict() for name, part in parts.items()}
        futures.append(dcp.async_save(states, checkpoint_id=str(folder / "dcp"), no_dist=True))

    found["DCP async_save"] = (dcp_async, lambda: futures.pop().result())
    if plugin := lightning(folder):
        found["Lightning AsyncCheckpointIO"] = plugin(parts)
    return found


def lightning(folder: Path) -> Callable[[dict], Way] | None:
    try:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO
    except ImportError:
        return None
    from lightning.fabric.plugins import TorchCheckpointIO

    def way(parts: dict) -> Way:
        plugin = AsyncCheckpointIO(TorchCheckpointIO())

        def save(step: int) -> None:
            states = {name: part.state_dict() for name, part in parts.items()}
            plugin.save_checkpoint(states, folder / "lightning.ckpt")

        def wait() -> None:  # its executor has one thread, so what is submitted last runs last
            plugin._executor.submit(lambda: None).result()

        return save, wait

    return way


def bench(folder: Path, count: int) -> str:
    model, optimizer, step = trained()
    size = sum(tensor.nbytes for tensor in tensors(model, optimizer))
    found = ways(folder, model, optimizer)

    def saved(way: Way, turn: int) -> tuple[float, float]:
        save, wait = way
        step()
        began, began_cpu = time.perf_counter(), time.thread_time()
        save(turn)
        taken = time.perf_counter() - began, time.thread_time() - began_cpu
        wait()
        return taken

    times = rounds({name: lambda turn, way=way: saved(way, turn) for name, way in found.items()}, count, warm=2, rotate=True)
    wall = {name: [seconds for seconds, _ in taken] for name, taken in times.items()}
    cpu = {name: [seconds for _, seconds in taken] for name, taken in times.items()}
    on_disk = sum(path.stat().st_size for path in (folder / "background").rglob("step-*/*")) / len(
        list((folder / "background").glob("step-*"))
    )
    lines = [
        f"{size / 1e6:.0f} MB, on the disk {on_disk / size:.4f} of that; {count} rounds; ratios to memcpy of the same round"
    ]
    lines.append(f"{'':28} {'wall: median (min .. max)':32} CPU of the caller: median")
    for name in found:
        cpus = ratios(cpu[name], cpu["memcpy"])
        lines.append(f"{name:28} {spread(ratios(wall[name], wall['memcpy'])):32} {median(cpus):.2f}")
    medians = {name: median(seconds) for name, seconds in wall.items()}
    least = {name: min(seconds) for name, seconds in wall.items()}
    lines.append("ratio of medians, of least:  " + ", ".join(
        f"{name} {medians[name] / medians['memcpy']:.2f} {least[name] / least['memcpy']:.2f}" for name in found
    ))  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=15)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="in memory, or on a disk")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print(bench(folder, options.rounds))
    finally:
        shutil.rmtree(folder)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
