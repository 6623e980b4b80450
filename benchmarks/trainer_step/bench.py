"""What does a step of the Trainer cost (with log, progress line, checkpoints and the gate), compared with a hand-written loop?

    python benchmarks/trainer_step/bench.py                          one rank, against a plain loop; a class with __getitems__
    rankwise run --nproc 2 benchmarks/trainer_step/bench.py          two ranks, against DDP
    python benchmarks/trainer_step/bench.py quiet                    the same class, with draws_nothing
    python benchmarks/trainer_step/bench.py samples                  a class with only __getitem__
    python benchmarks/trainer_step/bench.py tensors                  a TensorDataset

Both loops run in this process and take turns of 40 steps. They use the same tiny model (MLP 16-32-4), dataset, batch size per
rank (16) and optimizer (SGD), so that nothing hides the cost of the loop itself. The hand-written loop uses torch's DataLoader.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rankwise

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import median, p10, ratios

TURN = 40
TURNS = 120
BATCH = 16


class Samples:
    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, 16, generator=generator)
        self.y = torch.randint(4, (n,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index], self.y[index]


class Rows(Samples):
    def __getitems__(self, indices: list[int]):
        return self.x[indices], self.y[indices]


class QuietRows(Rows):
    draws_nothing = True


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


class Turns:
    """Threads of which one runs at a time. After TURN steps, it lets the next one run, and records how long the steps took."""

    def __init__(self, names: list[str], turns: int = TURNS) -> None:
        self.names = names
        self.turns = turns
        self.events = {name: threading.Event() for name in names}
        self.times: dict[str, list[float]] = {name: [] for name in names}
        self.began = dict.fromkeys(names, 0.0)

    def wait(self, name: str) -> None:
        self.events[name].wait()
        self.events[name].clear()
        self.began[name] = time.perf_counter()

    def over(self, name: str) -> None:
        self.times[name].append((time.perf_counter() - self.began[name]) / TURN)
        self.events[self.names[(self.names.index(name) + 1) % len(self.names)]].set()

    def after_step(self, name: str, step: int) -> None:
        """Let the next thread run if the turn is over. Not in the last turn, which includes what the loop does at its end."""
        if step % TURN == 0 and step < TURN * self.turns:
            self.over(name)
            self.wait(name)


def raw_loop(turns: Turns, world, data: Rows) -> None:
    turns.wait("raw")  # the setup also calls collectives, which must not meet those of the other loop
    model, optimizer = parts()
    wrapped = DistributedDataParallel(model) if world.world_size > 1 else model
    sampler = DistributedSampler(data) if world.world_size > 1 else None
    collate = (lambda batch: batch) if isinstance(data, Rows) else None
    loader = DataLoader(data, BATCH, shuffle=sampler is None, sampler=sampler, collate_fn=collate)
    step = 0
    while step < TURN * turns.turns:
        for x, y in loader:
            loss = F.cross_entropy(wrapped(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            turns.after_step("raw", step)
            if step == TURN * turns.turns:
                break
    turns.over("raw")


def step_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def trainer_loop(turns: Turns, world, data: Rows, folder: str) -> None:
    hand_over = lambda state: turns.after_step("Trainer", state.step)  # noqa: E731
    turns.wait("Trainer")
    trainer = rankwise.Trainer(
        *parts(), step_fn, data, batch_size=BATCH, max_steps=TURN * turns.turns, actions=[hand_over], run_dir=folder,
        checkpoints=rankwise.Checkpoints(every_s=len(turns.names)),  # about a second of its own time per save
    )  # fmt: skip
    trainer.fit(fresh=True)  # the last turn includes the end: its collectives must not meet those of the other loop
    turns.over("Trainer")


def main() -> None:
    world = rankwise.init()
    torch.set_num_threads(1)
    folder = str(world.run_dir) if world.run_dir else rankwise.broadcast_object(tempfile.mkdtemp())
    turns = Turns(["raw", "Trainer"])
    kinds = {"": Rows, "quiet": QuietRows, "samples": Samples, "tensors": lambda n: TensorDataset(Rows(n).x, Rows(n).y)}
    data = kinds["".join(sys.argv[1:])](16384)
    # The Trainer runs in the main thread, which can get signals, and the hand-written loop in another one.
    raw = threading.Thread(target=raw_loop, args=(turns, world, data))
    raw.start()
    turns.events["raw"].set()
    trainer_loop(turns, world, data, folder)
    raw.join()
    warm = 5
    slower = ratios(turns.times["Trainer"], turns.times["raw"])[warm:-1]
    tenth = {name: p10(times[warm:]) for name, times in turns.times.items()}
    if world.is_main:
        print(
            f"{world.world_size} rank(s), {len(slower)} paired turns of {TURN} steps, Trainer / hand-written: "
            f"median {median(slower):.3f}, p10 of turns {tenth['Trainer'] / tenth['raw']:.3f} "
            f"(raw {1e6 * tenth['raw']:.0f} us a step); Python {sys.version.split()[0]}, torch {torch.__version__}"
        )


if __name__ == "__main__":
    main()
