import lightning
import torch
from answer import say

TOLD = {}  # devices= and num_nodes=


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, _):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self):
        trainer = self.trainer
        say(trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size)


lightning.Trainer(
    accelerator="cpu", strategy="ddp", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, **TOLD,
).fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 1)))  # fmt: skip
