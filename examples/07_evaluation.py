"""Metrics that are not a sum divided by a count: a metric object, and predictions in the order of the dataset.

python examples/07_evaluation.py                 one device
rankwise run examples/07_evaluation.py           all devices of this machine
"""

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import rankwise


class MacroF1:
    """A metric of torchmetrics also works. Your own object needs `merge_state`, which combines the objects of all ranks."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.reset()

    def reset(self):
        self.table = torch.zeros(self.classes, self.classes)  # true class, predicted class

    def update(self, predicted, y):
        self.table += torch.bincount(y * self.classes + predicted, minlength=self.table.numel()).view_as(self.table).cpu()

    def merge_state(self, others):
        for other in others:
            self.table += other.table

    def compute(self):
        return (2 * self.table.diag() / (self.table.sum(0) + self.table.sum(1))).mean()


def step(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def main():
    rankwise.init()
    data = rankwise.run_on_main(load_digits)
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    train_data, test_data = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    f1 = MacroF1(10)

    def evaluate(model, batch):
        x, y = batch
        f1.update(model(x).argmax(1), y)
        return {"loss": step(model, batch)}

    trainer = rankwise.Trainer(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), step, train_data, global_batch_size=50, max_epochs=3,
        evaluate=rankwise.Evaluate(test_data, evaluate, metrics={"f1": f1}),
    )  # fmt: skip
    state = trainer.fit()
    scores = trainer.predict(test_data, lambda model, batch: model(batch[0]).softmax(1))
    if rankwise.is_main():
        area = roc_auc_score(y[1500:].numpy(), scores.numpy(), multi_class="ovr")
        rankwise.say(f"macro F1 {state.metrics['eval_f1']:.3f}, area under the curve {area:.3f}")


if __name__ == "__main__":
    main()
