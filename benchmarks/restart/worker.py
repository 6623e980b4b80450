"""A torchrun script: gloo, DDP around a small model, one Adam step. Records when its first step was complete. With `die` as the
second argument, rank 1 fails in the first attempt, so that all ranks are restarted."""

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
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(os.path.join(sys.argv[1], f"first-{attempt}-{dist.get_rank()}"), "w") as file:
    file.write(repr(time.time()))
dist.barrier()
if sys.argv[2:] == ["die"] and attempt == "0" and dist.get_rank() == 1:
    sys.exit("as asked")
