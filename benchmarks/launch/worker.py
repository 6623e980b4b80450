"""A torchrun script: gloo, DDP around a small model, one Adam step. Records when its first and its last step were complete."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(8, 16)).sum().backward()
optimizer.step()
dist.barrier()
with open(os.path.join(sys.argv[1], f"first-{dist.get_rank()}"), "w") as file:
    file.write(repr(time.time()))
