"""The training that run.py kills: tiny, on two ranks, with a save every few steps.

rankwise run --nproc 2 train.py STEPS FINAL SAVED [blocking]

FINAL gets the final parameters; SAVED gets a line for each complete save. Each flush takes 1 ms longer than usual, so that
kills hit it.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import rankwise
from rankwise.actions import Log

background = "blocking" not in sys.argv
steps, final, saved = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(0)
fsync = os.fsync


def slow_fsync(fd: int) -> None:
    fsync(fd)
    time.sleep(0.001)


os.fsync = slow_fsync
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(203, 8, generator=generator), torch.randint(3, (203,), generator=generator))
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))


def step_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
trainer = rankwise.Trainer(
    model, optimizer, step_fn, data, global_batch_size=16, max_steps=steps, actions=[Log(1)],
    checkpoints=rankwise.Checkpoints(every_s=0.05, background=background),
    scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
)  # fmt: skip
save, wait = trainer.checkpoints.save, trainer.checkpoints.wait
begun = []


def noted_save(parts, step, *more):
    path = save(parts, step, *more)
    begun.append(step)
    return path


def noted_wait():
    wait()
    if trainer.world.is_main and begun:
        with open(saved, "a") as file:
            file.write(f"{begun[-1]}\n")


trainer.checkpoints.save, trainer.checkpoints.wait = noted_save, noted_wait
trainer.fit()
if trainer.world.is_main:
    torch.save(model.state_dict(), final)
