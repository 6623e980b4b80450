"""The same with Accelerate."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from task import BATCH, EPOCHS, WORKERS, data, model_and_optimizer
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
workers = WORKERS // accelerator.num_processes
model, optimizer = model_and_optimizer()
training, evaluation = data()
model, optimizer, batches, evaluated = accelerator.prepare(
    model,
    optimizer,
    DataLoader(training, BATCH, shuffle=True, num_workers=workers, drop_last=True),
    DataLoader(evaluation, BATCH, num_workers=workers),
)
for epoch in range(EPOCHS):
    model.train()
    for step, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % 50 == 0:
            accelerator.print(epoch, step, loss.item())
    model.eval()
    total, samples = 0.0, 0
    with torch.no_grad():
        for x, y in evaluated:
            losses = accelerator.gather_for_metrics(F.cross_entropy(model(x), y, reduction="none"))
            total, samples = total + losses.sum().item(), samples + len(losses)
    accelerator.print("eval_loss", total / samples)
    accelerator.save_state("checkpoint")
