"""A classifier on scikit-learn's handwritten digits, with the Trainer. The script does not mention ranks.

python examples/03_trainer_digits.py              one device
rankwise run examples/03_trainer_digits.py        all devices of this machine
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import rankwise


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8 x 8 pixels: the first 1,500 for training, the others for evaluation."""
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def step(model, batch):
    """Returns the sum of the losses, and the number of samples."""
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def evaluate(model, batch):
    x, y = batch
    scores = model(x)
    loss = F.cross_entropy(scores, y, reduction="sum")
    correct = (scores.argmax(1) == y).sum()
    return {"loss": (loss, len(y)), "accuracy": (correct, len(y))}


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    train_data, eval_data = digits()
    rankwise.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        step,
        train_data,
        evaluate=rankwise.Evaluate(eval_data, evaluate),
        global_batch_size=64,
        max_epochs=20,
    ).fit()


if __name__ == "__main__":
    main()
