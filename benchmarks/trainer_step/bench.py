"""What does a step of the Trainer (log, progress line, checkpoints and the gate on) cost over a hand-written loop?

    python benchmarks/trainer_step/bench.py                          one rank, against a plain loop
    rankwise run --nproc 2 benchmarks/trainer_step/bench.py          two ranks, against DDP

Both loops live in this process and take turns of 40 steps; the same tiny model (MLP 16-32-4), data set, batch size of a rank
(16) and optimizer (SGD): nothing hides a loop's own cost. The hand-written loop uses torch's DataLoader.
"""

import statistics
import sys
import tempfile
import threading
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import rankwise

TURN = 40
TURNS = 120
BATCH = 16


class Rows:
    draws_nothing = True

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, 16, generator=generator)
        self.y = torch.randint(4, (n,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]):
        return self.x[indices], self.y[indices]


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


class Turns:
    """Two threads of which one runs; each hands over after TURN steps, and notes how long they took."""

    def __init__(self) -> None:
        self.events = {"raw": threading.Event(), "Trainer": threading.Event()}
        self.times: dict[str, list[float]] = {"raw": [], "Trainer": []}
        self.began = {"raw": 0.0, "Trainer": 0.0}

    def wait(self, name: str) -> None:
        self.events[name].wait()
        self.events[name].clear()
        self.began[name] = time.perf_counter()

    def over(self, name: str) -> None:
        self.times[name].append((time.perf_counter() - self.began[name]) / TURN)
        self.events["raw" if name == "Trainer" else "Trainer"].set()


def raw_loop(turns: Turns, world, data: Rows) -> None:
    model, optimizer = parts()
    wrapped = DistributedDataParallel(model) if world.world_size > 1 else model
    sampler = DistributedSampler(data) if world.world_size > 1 else None
    loader = DataLoader(data, BATCH, shuffle=sampler is None, sampler=sampler, collate_fn=lambda batch: batch)
    step = 0
    turns.wait("raw")
    while True:
        for x, y in loader:
            loss = F.cross_entropy(wrapped(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % TURN == 0:
                turns.over("raw")
                if step == TURN * TURNS:
                    return
                turns.wait("raw")


def step_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def trainer_loop(turns: Turns, world, data: Rows, folder: str) -> None:
    def hand_over(state) -> None:
        if state.step % TURN == 0 and state.step < TURN * TURNS:
            turns.over("Trainer")
            turns.wait("Trainer")

    trainer = rankwise.Trainer(
        *parts(), step_fn, data, batch_size=BATCH, max_steps=TURN * TURNS, actions=[hand_over], run_dir=folder, fresh=True,
        save_every_s=1.0,
    )  # fmt: skip
    turns.wait("Trainer")
    trainer.fit()  # its last turn ends with it: what it saves at the end must not meet the other loop's collectives
    turns.over("Trainer")


def main() -> None:
    world = rankwise.init()
    torch.set_num_threads(1)
    folder = str(world.run_dir) if world.run_dir else rankwise.broadcast_object(tempfile.mkdtemp())
    turns = Turns()
    data = Rows(16384)
    # The Trainer in the main thread, where signals can be had; the hand-written loop beside it.
    raw = threading.Thread(target=raw_loop, args=(turns, world, data))
    raw.start()
    turns.events["raw"].set()
    trainer_loop(turns, world, data, folder)
    raw.join()
    warm = 5
    pairs = list(zip(turns.times["Trainer"], turns.times["raw"], strict=True))[warm:-1]
    ratios = [a / b for a, b in pairs]
    tenth = {name: statistics.quantiles(times[warm:], n=10)[0] for name, times in turns.times.items()}
    if world.is_main:
        print(
            f"{world.world_size} rank(s), {len(ratios)} paired turns of {TURN} steps, Trainer / hand-written: "
            f"median {statistics.median(ratios):.3f}, p10 of turns {tenth['Trainer'] / tenth['raw']:.3f} "
            f"(raw {1e6 * tenth['raw']:.0f} us a step); Python {sys.version.split()[0]}, torch {torch.__version__}"
        )


if __name__ == "__main__":
    main()
