"""An Accelerate script, as for torchrun: 20 steps on the CPU."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(320, 8)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for (x,) in loader:
        loss = (model(x) ** 2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    print("trained", steps, "steps as rank", accelerator.process_index, "of", accelerator.num_processes)
