"""A Trainer with parts: an averaged model beside the trained one, early stopping, a logger, and actions at intervals.

python examples/08_parts.py                 one device
rankwise run examples/08_parts.py           all devices of this machine
rankwise run examples/08_parts.py --wandb   its metrics also on Weights & Biases (pip install wandb)
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import rankwise
from rankwise.actions import EMA, EarlyStopping, Log


def step(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def accuracy(model, batch):
    x, y = batch
    return {"accuracy": ((model(x).argmax(1) == y).sum(), len(y))}


def to_wandb(state: rankwise.TrainState) -> None:
    """An action: any function of the state, called on every rank after every step."""
    if rankwise.is_main() and state.new_metrics:
        import wandb

        wandb.log(state.new_metrics, step=state.step)


def say_norm(state: rankwise.TrainState) -> None:
    norm = torch.stack([p.detach().norm() for p in state.model.parameters()]).norm().item()
    rankwise.say(f"step {state.step}: the norm of the weights is {norm:.1f}")


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--wandb", action="store_true")
    with_wandb = arguments.parse_args().wandb
    rankwise.init()
    digits = rankwise.run_on_main(load_digits)
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train_set, valid_set = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = EMA(model, decay=0.9)
    trainer = rankwise.Trainer(
        model, optimizer, step, rankwise.Loader(train_set, global_batch_size=50, accumulate=2), max_epochs=20, clip_norm=1.0,
        evaluate=rankwise.Evaluate(valid_set, accuracy),
        checkpoints=rankwise.Checkpoints(every_s=60, keep_best="ema_accuracy", larger_is_better=True),
        actions=[
            ema, rankwise.Evaluate(valid_set, accuracy, model=ema, name="ema"),
            EarlyStopping("ema_accuracy", patience=2, larger_is_better=True),
            Log(every_steps=30), rankwise.every(say_norm, epochs=2), *([to_wandb] if with_wandb else []),
        ],
    )  # fmt: skip
    if with_wandb and rankwise.is_main():
        import wandb

        wandb.init(project="digits", id=trainer.run_dir.name, resume="allow")
    state = trainer.fit()
    rankwise.say(f"done: {state.step} steps, accuracy of the averaged model {state.metrics['ema_accuracy']:.3f}")


if __name__ == "__main__":
    main()
