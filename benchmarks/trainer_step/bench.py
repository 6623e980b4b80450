"""What does a step of the Trainer cost (with log, progress line, checkpoints and the gate), compared with a hand-written loop?

    python benchmarks/trainer_step/bench.py                          one rank, against a plain loop; a class with __getitems__
    rankwise run --nproc 2 benchmarks/trainer_step/bench.py          two ranks, against DDP
    python benchmarks/trainer_step/bench.py quiet                    the same class, with draws_nothing
    python benchmarks/trainer_step/bench.py samples                  a class with only __getitem__
    python benchmarks/trainer_step/bench.py tensors                  a TensorDataset
    python benchmarks/trainer_step/bench.py gpt                      examples/04_gpt.py, 0.66 M parameters
    python benchmarks/trainer_step/bench.py gpt-bf16                 on a GPU: the same with 12 layers, 85 M parameters, in bf16
    rankwise run --nproc 2 benchmarks/trainer_step/bench.py 25m      25 M parameters; 100m: 100 M
    python benchmarks/trainer_step/bench.py 25m --alone Trainer      a loop alone (plain, best), and its peak memory

The loops run in this process and take turns of 40 steps (fewer with large models). They use the same model, dataset, batch size
per rank, fused optimizer and threads. By default the model is tiny (MLP 16-32-4, 16 samples), so that nothing hides the cost of
the loop itself; the large ones are eight square layers with 16 samples, so that gradients and parameters take most of a step.
The Trainer saves once per second of its own time; with the large models (up to 1.2 GB) every 300 s, which is its default.
`plain` uses torch's DataLoader as its documentation does (on several ranks DDP, with gradient_as_bucket_view), `best` takes its
batches from two tensors by index_select, which no dataset of a class can reach. `floor` is a bare loop of the calls that the
Trainer's promises need: read the batch without a change of the random streams, sum the loss, add gradients and counts of the
ranks in one message, look at the gradient before the step, clear it, keep the sum of the loss for the log.

On a machine with a GPU all loops compute there: `plain` reads with pinned memory, and a turn ends when the GPU has finished.
"""

import argparse
import importlib.util
import math
import os
import resource
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rankwise
from rankwise.data.fetch import collate
from rankwise.data.kinds import draws_nothing
from rankwise.dist.seed import SavedStreams

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import median, p10, ratios

BATCH = 16


class Samples:
    def __init__(self, n: int, width: int = 16, classes: int = 4) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, width, generator=generator)
        self.y = torch.randint(classes, (n,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index], self.y[index]


class Rows(Samples):
    def __getitems__(self, indices: list[int]):
        return self.x[indices], self.y[indices]


class QuietRows(Rows):
    draws_nothing = True


def tiny():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, fused=True)


def step_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Case(NamedTuple):
    data: Any
    parts: Callable[[], tuple[nn.Module, torch.optim.Optimizer]] = tiny
    turn: int = 40
    """Steps of one turn."""

    turns: int = 120
    batch: int = BATCH
    step_fn: Callable[..., Any] = step_fn
    mean_loss: Callable[..., Any] = mean_loss
    clip_norm: float | None = None
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    log_every: int = 50
    precision: str = "fp32"
    save_every_s: float | None = None
    """None: about a second of the Trainer's own time per save."""


def square(width: int, turns: int) -> Case:
    def parts():
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    return Case(Rows(512, width, width), parts, turn=2, turns=turns, save_every_s=300)


def gpt(batch: int = 32, precision: str = "fp32", **sizes: int) -> Case:
    """What examples/04_gpt.py trains, with its schedule and clipping, a log every 10 steps and a save every 20 s. `sizes`: of
    another GPT."""
    spec = importlib.util.spec_from_file_location("example_gpt", Path(__file__).parents[2] / "examples" / "04_gpt.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def parts():
        torch.manual_seed(0)
        model = example.GPT(**sizes)
        return model, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95), fused=True)

    def mean_loss(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def schedule(optimizer):
        def rate(step):
            return (step + 1) / 40 if step < 40 else 0.1 + 0.45 * (1 + math.cos(math.pi * min(step / 800, 1)))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    data = example.standard_library()[0]
    return Case(
        data, parts, 10, 30, batch, example.step, mean_loss, 1.0, schedule, log_every=10, save_every_s=20, precision=precision
    )


CASES = {
    "rows": lambda: Case(Rows(16384)),
    "quiet": lambda: Case(QuietRows(16384)),
    "samples": lambda: Case(Samples(16384)),
    "tensors": lambda: Case(TensorDataset(Rows(16384).x, Rows(16384).y)),
    "gpt": gpt,
    "gpt-bf16": lambda: gpt(64, "bf16", width=768, layers=12, heads=12),
    "25m": lambda: square(1768, 40),
    "100m": lambda: square(3536, 15),
}


class Turns:
    """Threads of which one runs at a time. After the steps of its turn, it lets the next one run, and records how long a step
    took."""

    def __init__(self, names: list[str], case: Case) -> None:
        self.names = names
        self.steps = case.turn * case.turns
        self._turn = case.turn
        self.events = {name: threading.Event() for name in names}
        self.times: dict[str, list[float]] = {name: [] for name in names}
        self.began = dict.fromkeys(names, 0.0)
        self.peak = 0.0

    def wait(self, name: str) -> None:
        self.events[name].wait()
        self.events[name].clear()
        self.began[name] = time.perf_counter()

    def over(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times[name].append((time.perf_counter() - self.began[name]) / self._turn)
        self.events[self.names[(self.names.index(name) + 1) % len(self.names)]].set()

    def after_step(self, name: str, step: int) -> None:
        """Let the next thread run if the turn is over. Not in the last turn, which includes what the loop does at its end."""
        if step % self._turn == 0 and step < self.steps:
            self.peak = peak_mib()
            self.over(name)
            self.wait(name)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def batches(name: str, case: Case, world, device) -> Iterator[Any]:
    """The batches of this rank, of all epochs, on the device."""
    for batch in batches_on_cpu(name, case, world, device.type == "cuda"):
        yield tuple(tensor.to(device, non_blocking=True) for tensor in batch)


def batches_on_cpu(name: str, case: Case, world, pin: bool) -> Iterator[Any]:
    if name == "best":
        x, y = case.data.tensors if isinstance(case.data, TensorDataset) else (case.data.x, case.data.y)
        epoch = 0
        while True:
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))[world.rank :: world.world_size]
            for indices in order[: len(order) // case.batch * case.batch].view(-1, case.batch):
                yield x.index_select(0, indices), y.index_select(0, indices)
            epoch += 1
    sampler = DistributedSampler(case.data) if world.world_size > 1 else None
    collate = (lambda batch: batch) if hasattr(case.data, "__getitems__") else None
    loader = DataLoader(case.data, case.batch, shuffle=sampler is None, sampler=sampler, collate_fn=collate, pin_memory=pin)
    while True:
        yield from loader


def by_hand(name: str, turns: Turns, world, case: Case) -> None:
    turns.wait(name)  # the setup also calls collectives, which must not meet those of the other loops
    device = rankwise.local_device(world)
    autocast = rankwise.Precision(case.precision).autocast
    model, optimizer = case.parts()
    model.to(device)
    scheduler = case.schedule(optimizer) if case.schedule else None
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if world.world_size > 1 else model
    for step, batch in enumerate(batches(name, case, world, device), 1):
        with autocast():
            loss = case.mean_loss(wrapped, batch)
        loss.backward()
        if case.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if step % case.log_every == 0:
            loss.item()  # the sum over ranks and the line of a log are not counted
        turns.after_step(name, step)
        if step == turns.steps:
            break
    turns.over(name)


def bare_promises(turns: Turns, world, case: Case) -> None:
    """The floor of the Trainer, with all gradients in one buffer, and on several ranks a count at its end."""
    turns.wait("floor")
    model, optimizer = case.parts()
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    message = torch.zeros(sum(sizes) + (world.world_size > 1))
    flat, end = message[: sum(sizes)], message[sum(sizes) :]
    for parameter, piece in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = piece.view_as(parameter)
    data = case.data
    streams = None if draws_nothing(data) else SavedStreams()
    seed, losses, count = torch.tensor(1 / case.batch), torch.zeros(()), 0
    made = data.__getitems__ if hasattr(data, "__getitems__") else lambda indices: collate([data[index] for index in indices])
    step = 0
    while step < turns.steps:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(step)).numpy()[world.rank :: world.world_size]
        for first in range(0, len(order) - case.batch + 1, case.batch):
            indices = order[first : first + case.batch].tolist()
            if streams is not None:
                streams.save()
            batch = made(indices)
            if streams is not None:
                streams.restore()
            loss_sum, samples = case.step_fn(model, batch)
            loss_sum.backward(seed)
            losses += loss_sum.detach()
            count += samples
            if world.world_size > 1:
                end.fill_(samples)
                dist.all_reduce(message)
                end.item()
            if math.isfinite(torch.linalg.vector_norm(flat).item()):
                optimizer.step()
            message.zero_()
            step += 1
            turns.after_step("floor", step)
            if step == turns.steps:
                break
    turns.over("floor")


def trainer_loop(turns: Turns, world, case: Case, folder: str) -> None:
    hand_over = lambda state: turns.after_step("Trainer", state.step)  # noqa: E731
    turns.wait("Trainer")
    model, optimizer = case.parts()
    trainer = rankwise.Trainer(
        model, optimizer, case.step_fn, case.data, batch_size=case.batch, max_steps=turns.steps, clip_norm=case.clip_norm,
        precision=case.precision, scheduler=case.schedule(optimizer) if case.schedule else None, run_dir=folder,
        actions=[rankwise.actions.Log(every_steps=case.log_every), hand_over],
        checkpoints=rankwise.Checkpoints(every_s=case.save_every_s if case.save_every_s is not None else len(turns.names)),
    )  # fmt: skip
    trainer.fit(fresh=True)  # the last turn includes the end: its collectives must not meet those of the other loops
    turns.over("Trainer")


def or_exit(loop: Callable[..., None], *args: Any) -> None:
    """Run the loop. If it raises, the process ends: the other threads would wait for their turn forever."""
    try:
        loop(*args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", nargs="?", choices=CASES, default="rows")
    parser.add_argument("--alone", choices=["Trainer", "plain", "best"])
    args = parser.parse_args()
    world = rankwise.init()
    if args.case not in ("gpt", "gpt-bf16", "25m", "100m"):
        torch.set_num_threads(1)
    folder = str(world.run_dir) if world.run_dir else rankwise.broadcast_object(tempfile.mkdtemp())
    case = CASES[args.case]()
    names = ["plain", "Trainer"]
    names += ["best"] if not args.case.startswith("gpt") else []
    on_cpu = rankwise.local_device(world).type == "cpu"
    names += ["floor"] if case.parts is tiny and on_cpu else []
    if args.alone:
        case, names = case._replace(turns=5, save_every_s=3600), [args.alone]  # it saves only at the end
    turns = Turns(names, case)
    by_name = {
        "plain": partial(by_hand, "plain"),
        "best": partial(by_hand, "best"),
        "floor": bare_promises,
        "Trainer": partial(trainer_loop, folder=folder),
    }
    # No loop in the main thread: there malloc returns memory to the kernel, and takes it again, more often (3 to 5 % of gpt).
    threads = [threading.Thread(target=or_exit, args=(by_name[name], turns, world, case)) for name in names]
    for thread in threads:
        thread.start()
    turns.events[names[0]].set()
    for thread in threads:
        thread.join()
    if args.alone:
        print(
            f"{args.case}, {args.alone} alone, rank {world.rank}: peak memory {turns.peak:.0f} MiB in the loop, "
            f"{peak_mib():.0f} MiB with its end (the Trainer saves there)"
        )
    elif world.is_main:
        report(turns, args.case, world.world_size, case.turn)


def report(turns: Turns, name: str, ranks: int, steps: int) -> None:
    warm = min(5, len(turns.times["plain"]) // 5)
    tenth = {each: p10(times[warm:-1]) for each, times in turns.times.items()}
    for other in turns.names:
        if other == "Trainer":
            continue
        slower = ratios(turns.times["Trainer"][warm:-1], turns.times[other][warm:-1])
        print(
            f"{name}, {ranks} rank(s), {len(slower)} turns of {steps} steps, Trainer / {other}: median of pairs "
            f"{median(slower):.3f}, p10 of turns {tenth['Trainer'] / tenth[other]:.3f} ({1e6 * tenth[other]:.0f} us by hand)"
        )


if __name__ == "__main__":
    main()
