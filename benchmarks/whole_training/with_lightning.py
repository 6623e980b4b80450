"""The same with Lightning. The argument: the number of ranks."""

import sys

import lightning
import torch.nn.functional as F
from task import BATCH, EPOCHS, WORKERS, data, model_and_optimizer
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.optimizer = model_and_optimizer()

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("eval_loss", F.cross_entropy(self.model(x), y), sync_dist=True)

    def configure_optimizers(self):
        return self.optimizer


ranks = int(sys.argv[1])
training, evaluation = data()
trainer = lightning.Trainer(
    max_epochs=EPOCHS, accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", num_sanity_val_steps=0
)
trainer.fit(
    Module(),
    DataLoader(training, BATCH, shuffle=True, num_workers=WORKERS // ranks, drop_last=True),
    DataLoader(evaluation, BATCH, num_workers=WORKERS // ranks),
)
