"""A loop as PyTorch's tutorials write it, with DDP on several ranks."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import BATCH, EPOCHS, WORKERS, data, model_and_optimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
model, optimizer = model_and_optimizer()
training, evaluation = data()
sampler = evaluation_sampler = None
if ranks > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    sampler, evaluation_sampler = DistributedSampler(training), DistributedSampler(evaluation, shuffle=False)
workers = WORKERS // ranks
batches = DataLoader(training, BATCH, shuffle=sampler is None, sampler=sampler, num_workers=workers, drop_last=True)
evaluated = DataLoader(evaluation, BATCH, sampler=evaluation_sampler, num_workers=workers)
for epoch in range(EPOCHS):
    if sampler is not None:
        sampler.set_epoch(epoch)
    model.train()
    for step, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 50 == 0 and rank == 0:
            print(epoch, step, loss.item(), flush=True)
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in evaluated:
            total += torch.tensor([F.cross_entropy(model(x), y, reduction="sum").item(), len(y)])
    if ranks > 1:
        dist.all_reduce(total)
    if rank == 0:
        print("eval_loss", (total[0] / total[1]).item(), flush=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
