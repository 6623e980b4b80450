"""Five programs as users write them, from the shortest to one made of all parts, run unchanged on one rank and on two."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import scripts_on_ranks

from rankwise.hdf5 import HDF5Writer

MINE = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

_drawn = torch.Generator().manual_seed(3)
_x = torch.randn(640, 16, generator=_drawn)
train_set = TensorDataset(_x[:512], _x[:512, :10].argmax(1))
valid_set = TensorDataset(_x[512:], _x[512:, :10].argmax(1))


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))


def step(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def accuracy(model, batch):
    x, y = batch
    predicted = model(x).argmax(1)
    f1.update(predicted, y)
    return {"accuracy": ((predicted == y).sum(), len(y))}


class F1:
    def __init__(self):
        self.reset()

    def reset(self):
        self.table = torch.zeros(10, 10)

    def update(self, predicted, y):
        self.table += torch.bincount(y * 10 + predicted, minlength=100).view(10, 10)

    def merge_state(self, others):
        for other in others:
            self.table += other.table

    def compute(self):
        return (2 * self.table.diag() / (self.table.sum(0) + self.table.sum(1)).clamp(min=1)).mean()


f1 = F1()


class Pretrained(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.neck = nn.Linear(16, 24), nn.Linear(24, 512)

    def forward(self, x):
        return self.neck(torch.relu(self.backbone(x)))


pretrained = Pretrained


class ArcFace(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, width, generator=torch.Generator().manual_seed(5)))

    def forward(self, x, y):
        cosine = F.normalize(x) @ F.normalize(self.weight).T
        return F.cross_entropy(8 * (cosine - 0.1 * F.one_hot(y, len(self.weight))), y, reduction="none")


def pad(samples):
    return nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 10)

    def forward(self, x):
        return self.out(x.sum(1) / 50)
"""

WANDB = """
import json, os
import rankwise

def init(**given):
    assert given["id"] == "program" and given["mode"] == (None if rankwise.is_main() else "disabled"), given

def log(metrics, step):
    with open("wandb.jsonl", "a") as file:
        file.write(json.dumps({"rank": rankwise.rank(), "step": step, **metrics}) + "\\n")
"""

SHORTEST = """
import torch, rankwise
from mine import Net, step, train_set                                   # step(model, batch) -> (loss sum, count)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rankwise.Trainer(model, optimizer, step, train_set, global_batch_size=64, max_epochs=3).fit()
"""

OF_PARTS = """
import torch, wandb, rankwise
from rankwise import Checkpoints, Evaluate, Loader, LocalSGD, Trainer
from rankwise.actions import EMA, EarlyStopping
from mine import Net, accuracy, f1, step, train_set, valid_set
def to_wandb(state):  # an action: called on every rank after every step
    if rankwise.is_main() and state.new_metrics:
        wandb.log(state.new_metrics, step=state.step)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ema = EMA(model, decay=0.999)  # has state_dict(): saved and resumed like any part
trainer = Trainer(
    model, optimizer, step, Loader(train_set, global_batch_size=256, accumulate=2, num_workers=4),
    max_steps=20_000, clip_norm=1.0, precision="bf16", sync=LocalSGD(every=16),
    evaluate=Evaluate(valid_set, accuracy, metrics={"f1": f1}, every_steps=500),
    checkpoints=Checkpoints(every_s=600, keep_last=2, keep_best="ema_accuracy", larger_is_better=True),
    actions=[ema, Evaluate(valid_set, accuracy, model=ema, name="ema", every_steps=500),
             EarlyStopping("ema_accuracy", patience=5, larger_is_better=True), to_wandb])
wandb.init(project="digits", id=trainer.run_dir.name, resume="allow", mode=None if rankwise.is_main() else "disabled")
trainer.fit()
"""

OWN_LOOP = """
import torch, rankwise
from torch.nn import functional as F
from mine import Net, train_set
rankwise.init()
torch.manual_seed(0)
model = Net().to(rankwise.local_device())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = rankwise.Loader(train_set, global_batch_size=64, max_epochs=10)
sync = rankwise.AllReduce().attach(model, optimizer, clip_norm=1.0)     # collective: rank 0's model everywhere
meters, checkpoints = rankwise.Meters("loss"), rankwise.Checkpoints(keep_last=3)
parts = {"model": model, "optimizer": optimizer, "loader": loader, "sync": sync}
step = checkpoints.resume(parts)                                        # 0 if there is none
with rankwise.StopSignal() as stop:
    for step, micro_batches in stop.steps(loader, step):                # ends with the data, or at an agreed stop
        for x, y in micro_batches:
            loss = F.cross_entropy(model(x), y, reduction="sum")
            sync.backward(loss, len(y))
            meters.add(loss=(loss.detach(), len(y)))
        sync.step()
        if step % 40 == 0:
            loss_now = meters.reduce()["loss"].mean                     # collective, so outside of say()
            rankwise.say(f"step {step}: loss {loss_now:.4f}")
    checkpoints.save(parts, step)                                       # inside: signals are still held
"""

UNFREEZING = """
import torch, rankwise
from mine import ArcFace, pretrained, train_set
torch.manual_seed(0)
model = torch.nn.ModuleDict({"net": pretrained(), "loss": ArcFace(512, 1000)})  # one module holds all that is trained
backbone = model["net"].backbone.requires_grad_(False)
head = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD([{"params": head, "lr": 0.1}, {"params": [*backbone.parameters()], "lr": 1e-3}])
def step(model, batch):
    x, y = batch
    return model["loss"](model["net"](x), y).sum(), len(y)
def unfreeze(state):
    if state.step == 1000:
        state.model["net"].backbone.requires_grad_(True)  # followed from the next step on; saved and resumed
rankwise.Trainer(model, optimizer, step, train_set, global_batch_size=64, max_epochs=5, actions=[unfreeze]).fit()
"""

BY_LENGTH = """
import torch, rankwise
from mine import Recogniser, pad, step
data = rankwise.HDF5Dataset("train.hdf5", fields=("inputs", "targets")) # opened in each process; has .lengths
loader = rankwise.Loader(data, batches=rankwise.LengthBatches(global_tokens=1_000), collate_fn=pad, num_workers=2)
torch.manual_seed(0)
model = Recogniser()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
rankwise.Trainer(model, optimizer, step, loader, max_epochs=20).fit()
"""

FEWER = [
    ("20_000", "18"),
    ("every_steps=500", "every_steps=6"),
    ("every=16", "every=4"),
    ("step == 1000", "step == 20"),
    ("=20)", "=3)"),
]
"""Smaller numbers for the test: with its own numbers, a program runs for hours."""

AFTERWARDS = """
torch.save(model.state_dict(), f"model-{rankwise.rank()}.pt")
"""


def write_sequences() -> None:
    with HDF5Writer("train.hdf5", overwrite=True) as writer:
        for k in range(120):
            inputs = torch.randn(5 + 7 * k % 90, 16, generator=torch.Generator().manual_seed(k))
            writer.add(inputs=inputs, targets=k % 10)


def trained(program: str, ranks: int) -> tuple[str, list[dict[str, torch.Tensor]]]:
    """(what the main rank prints, the model of each rank)."""
    for before, after in FEWER:
        program = program.replace(before, after)
    Path("mine.py").write_text(MINE)
    Path("wandb.py").write_text(WANDB)
    write_sequences()
    Path("program.py").write_text(program + AFTERWARDS)
    shutil.rmtree("runs", ignore_errors=True)
    all_done = scripts_on_ranks(ranks, "program.py")
    if any(done.returncode for done in all_done):
        pytest.fail("\n".join(f"rank {rank}: {done.returncode}\n{done.stdout}" for rank, done in enumerate(all_done)))
    models = [torch.load(f"model-{rank}.pt", weights_only=True) for rank in range(ranks)]
    for model in models[1:]:
        assert all(torch.equal(model[name], models[0][name]) for name in model)
    return all_done[0].stdout, models


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-5) for name in a)


@pytest.mark.parametrize(
    "program", [SHORTEST, UNFREEZING, OWN_LOOP, BY_LENGTH], ids=["shortest", "unfreezing", "loop", "lengths"]
)
@pytest.mark.one_in(2)
def test_a_program_trains_the_same_model_on_one_rank_and_on_two(program: str) -> None:
    alone, [by_one] = trained(program, 1)
    both, [by_two, _] = trained(program, 2)
    assert same(by_one, by_two)
    assert list(Path("runs/program/checkpoints").glob("step-*"))
    if program is OWN_LOOP:
        assert re.findall(r"step \d+: loss [\d.]{5}", alone) == re.findall(r"step \d+: loss [\d.]{5}", both) != []


@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.one_in(2)
def test_a_trainer_made_of_parts_evaluates_twice_stops_early_and_logs_each_metric_once_from_the_main_rank(ranks: int) -> None:
    said, _ = trained(OF_PARTS, ranks)
    rows = [json.loads(line) for line in Path("wandb.jsonl").read_text().splitlines()]
    assert {row["rank"] for row in rows} == {0}
    evaluated = [row["step"] for row in rows if "ema_accuracy" in row]
    assert evaluated == [row["step"] for row in rows if {"eval_accuracy", "eval_f1", "ema_accuracy"} <= row.keys()]
    assert evaluated == sorted(set(evaluated)) != []
    assert "best ema_accuracy: runs/program/checkpoints/step-" in said
    assert f"step {evaluated[0]}: ema_accuracy " in said
    saved = list(Path("runs/program/checkpoints").glob("step-*"))
    assert all((folder / "ema.pt").exists() and (folder / "early_stopping.pt").exists() for folder in saved)
    assert saved


def test_the_loop_of_ones_own_has_25_lines_at_most() -> None:
    assert len(OWN_LOOP.strip().splitlines()) <= 25
