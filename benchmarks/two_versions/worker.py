"""The training that bench.py runs: a chain of small layers. After each turn, rank 0 waits until bench.py lets it continue."""

import inspect
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

import rankwise

folder, tensors, turns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
STEPS = max(2, 400 // tensors)  # per turn: about 40 ms

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(tensors // 2)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(4096, 16))
world = rankwise.init()
torch.set_num_threads(1)
go = open(f"{folder}/go") if world.is_main else None  # noqa: SIM115  # as long as it trains
done = open(f"{folder}/done", "w") if world.is_main else None  # noqa: SIM115  # as long as it trains
began = 0.0
moved = "checkpoints" in inspect.signature(rankwise.Trainer).parameters
SETTINGS = {"checkpoints": rankwise.Checkpoints(every_s=None)} if moved else {"save_every_s": 1e9}


def step(model, batch):
    [x] = batch
    return F.mse_loss(model(x), x, reduction="sum"), x.numel()


def hand_over(state):
    global began
    if world.is_main and state.step % STEPS == 0:
        if state.step > STEPS:  # the first turn is a warm-up, and includes the start
            print(1e6 * (time.perf_counter() - began) / STEPS, file=done, flush=True)
        if not state.last:
            go.readline()
        began = time.perf_counter()


rankwise.Trainer(
    model, optimizer, step, data, global_batch_size=16, max_steps=STEPS * (turns + 1), actions=[hand_over], **SETTINGS
).fit()
