"""Metrics over all ranks, in your own loop: a stream of data, mean losses, an exact evaluation, predictions.

python examples/06_figures.py                 one device
rankwise run examples/06_figures.py           all devices of this machine
"""

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

import rankwise

EPOCHS, EVERY = 5, 30


class NoisyDigits(IterableDataset):
    """A stream: the same on every rank, and each rank keeps its share. Each sample is different in each epoch."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for k in torch.randperm(len(self.x)).tolist():  # equal on all ranks
            yield self.x[k] + 0.05 * torch.randn(64), self.y[k]


def evaluate(model, batch):
    """Sums, and the number of samples in each."""
    x, y = batch
    scores = model(x)
    loss = F.cross_entropy(scores, y, reduction="sum")
    return {"loss": (loss, len(y)), "accuracy": ((scores.argmax(1) == y).sum(), len(y))}


def main():
    world = rankwise.init()
    device = rankwise.local_device(world)  # this rank's GPU, or the CPU if there is none
    rankwise.seed_everything(0)
    data = rankwise.run_on_main(load_digits)
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    train_data, eval_data = NoisyDigits(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sync = rankwise.AllReduce().attach(model, optimizer, clip_norm=1.0)
    rankwise.seed_rank(0, world.rank)  # dropout differs between ranks

    eval_loader = rankwise.Loader(eval_data, global_batch_size=64, shuffle=False)
    evaluation = rankwise.Evaluate(eval_loader, evaluate)
    meters, metrics = rankwise.Meters("loss"), {}
    loader = rankwise.Loader(train_data, global_batch_size=50, max_epochs=EPOCHS)
    for step, micro_batches in enumerate(loader, start=1):
        for inputs, targets in micro_batches:
            loss = F.cross_entropy(model(inputs), targets, reduction="sum")
            sync.backward(loss, len(targets))
            meters.add(loss=(loss.detach(), len(targets)))  # does not wait for a device or a rank
        sync.step()
        if step % EVERY == 0:
            loss_now = meters.reduce()["loss"].mean  # on all ranks: one message of a few bytes
            rankwise.say(f"step {step}: loss {loss_now:.4f}")
        if loader.position == 0:  # the epoch has ended
            metrics = evaluation.figures(model, sync)
            rankwise.say(f"epoch {loader.epoch}: accuracy {metrics['eval_accuracy']:.3f}")
    predicted = rankwise.predict(lambda model, batch: model(batch[0]).argmax(1), model, eval_loader)
    if predicted is not None:  # on the main rank
        rankwise.say(f"mistaken: images {(predicted != y[1500:]).nonzero().flatten().tolist()}")
    rankwise.say(f"done: {step} steps, accuracy {metrics['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
