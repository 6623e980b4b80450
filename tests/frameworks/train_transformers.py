"""A Hugging Face Trainer script, as for torchrun: 20 steps on the CPU."""

import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

os.environ["ACCELERATE_DISABLE_RICH"] = "1"


class Rows(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        return {"x": torch.full((8,), index / 320)}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x):
        return {"loss": (self.layer(x) ** 2).mean()}


if __name__ == "__main__":
    arguments = TrainingArguments(
        tempfile.mkdtemp(), max_steps=20, per_device_train_batch_size=8, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, remove_unused_columns=False, logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(Model(), arguments, train_dataset=Rows())
    trainer.train()
    print("trained", trainer.state.global_step, "steps as rank", arguments.process_index, "of", arguments.world_size)
