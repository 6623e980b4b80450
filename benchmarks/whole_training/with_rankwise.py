"""The same with rankwise. With the argument `persistent`, loader workers stay from epoch to epoch."""

import sys

import torch.nn.functional as F
from task import BATCH, EPOCHS, WORKERS, data, model_and_optimizer

import rankwise


def step(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


model, optimizer = model_and_optimizer()
training, evaluation = data()
workers, keep = WORKERS // rankwise.init().world_size, "persistent" in sys.argv
loader = rankwise.Loader(
    training, batch_size=BATCH, num_workers=workers, persistent_workers=keep, drop_last=True, max_epochs=EPOCHS
)
rankwise.Trainer(
    model,
    optimizer,
    step,
    loader,
    actions=[rankwise.every(rankwise.Evaluate(evaluation), epochs=1)],
    checkpoints=rankwise.Checkpoints(every_epochs=1),
).fit(fresh=True)
