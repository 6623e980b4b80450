"""The training that run.py preempts: it loads, computes, reduces, evaluates and saves, and always shows which of these it does.

LAUNCHER train.py FOLDER STEPS [blocking] [workers] [until=STEP]

In FOLDER each rank writes `samples-RANK` (step and samples, in the order of use), `ends-RANK` (a line per attempt: when it
learned of the stop, after which step it stopped, with what status it exited), and a row of `now`, a map of integers: its
process, the steps that this attempt has done, what it does now. `final.pt` has the final parameters.
"""

import mmap
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import rankwise
from rankwise.actions import Log

ROW = 8
PID, DONE, PHASE, AGREED = range(4)
LOAD, COMPUTE, REDUCE, EVALUATE, SAVE = PHASES = range(1, 6)


class Now:
    """A rank's row of the map that run.py reads."""

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")[rank * ROW : (rank + 1) * ROW]
        self._pid = os.getpid()
        self._words[DONE] = self._words[PHASE] = self._words[AGREED] = 0
        self._words[PID] = self._pid

    def into(self, phase: int) -> None:
        if os.getpid() == self._pid:  # not a loader worker
            self._words[PHASE] = phase

    def done(self, steps: int) -> None:
        self._words[DONE] = steps

    def agreed(self) -> None:
        self._words[AGREED] = 1


folder, steps = Path(sys.argv[1]), int(sys.argv[2])
until = next((int(word[6:]) for word in sys.argv if word.startswith("until=")), steps)
torch.set_num_threads(1)
torch.manual_seed(0)
fsync = os.fsync


def slow_fsync(fd: int) -> None:
    fsync(fd)
    time.sleep(0.002)


os.fsync = slow_fsync
world = rankwise.init()
now = Now(folder / "now", world.rank)


def note(name: str, text: str) -> None:
    with (folder / f"{name}-{world.rank}").open("a") as file:
        file.write(f"{text}\n")


class Digits(torch.utils.data.Dataset):
    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.x, self.y = torch.randn(samples, 8, generator=generator), torch.randint(3, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        now.into(LOAD)
        time.sleep(0.0005)
        return self.x[index], self.y[index], index


def step_fn(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    now.into(COMPUTE)
    x, y, index = batch
    if model.training and torch.is_grad_enabled():  # not when the Trainer tries the first micro-batch
        step = trainer.state.step + 1
        note("samples", f"{step}: {' '.join(map(str, index.tolist()))}")
        time.sleep((step * 7 + world.rank * 5) % 11 * 0.001)  # each rank runs at its own pace
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def eval_fn(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
    now.into(EVALUATE)
    time.sleep(0.005)
    return {"loss": step_fn(model, batch)}


def action(state: rankwise.TrainState) -> None:
    now.done(state.step - began)


model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = rankwise.Loader(Digits(203), global_batch_size=16, num_workers=int("workers" in sys.argv))
checkpoints = rankwise.Checkpoints(every_s=0.3, background="blocking" not in sys.argv)
trainer = rankwise.Trainer(
    model, optimizer, step_fn, loader, max_steps=until, evaluate=rankwise.Evaluate(Digits(31), eval_fn, every_steps=10),
    checkpoints=checkpoints, run_dir=None if world.run_dir else folder / "run", actions=[action, Log(5)],
    scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
)  # fmt: skip
reduce, save, agreed = trainer.sync.step, trainer.checkpoints.save, trainer.stop.agreed
began = -1
stopped_at = ""


def noted_reduce(*words: object) -> object:
    now.into(REDUCE)
    return reduce(*words)


def noted_save(*words: object) -> object:
    now.into(SAVE)
    return save(*words)


def noted_agreed(step: int) -> bool:
    global began, stopped_at
    began = step if began < 0 else began
    stops = agreed(step)
    if stops:
        stopped_at = f"{time.monotonic()} {step}"
        now.agreed()
    return stops


trainer.sync.step, trainer.checkpoints.save, trainer.stop.agreed = noted_reduce, noted_save, noted_agreed
status: object = 0
try:
    trainer.fit()
    if world.is_main:
        torch.save(model.state_dict(), folder / "final.pt")
except SystemExit as end:
    status = end.code
    raise
finally:
    note("ends", f"{status} {stopped_at}")
