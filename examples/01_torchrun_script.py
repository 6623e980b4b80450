"""The launcher alone: a script written for torchrun, unchanged; it does not use rankwise.

rankwise run examples/01_torchrun_script.py
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    gpu = torch.accelerator.current_accelerator(check_available=True)  # None on a machine without a GPU
    device = torch.device("cpu") if gpu is None else torch.device(gpu.type, int(os.environ["LOCAL_RANK"]))
    if gpu is not None:
        torch.accelerator.set_device_index(device)
    # RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set, as with torchrun
    dist.init_process_group(dist.get_default_backend_for_device(device))  # NCCL for GPUs, gloo for the CPU
    torch.manual_seed(0)
    data = load_digits()
    dataset = TensorDataset(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1}: rank {dist.get_rank()} of {dist.get_world_size()}, last loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
