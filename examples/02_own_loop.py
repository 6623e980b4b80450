"""The parts in your own loop: a single-device script, and what it needs to run on all devices.

    python examples/02_own_loop.py              one device
    rankwise run examples/02_own_loop.py        all devices of this machine

Stop it with Ctrl-C and start it again: it resumes.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import rankwise


def main():
    world = rankwise.init()  # (1) which rank this is; connects to the others
    device = rankwise.local_device(world)  # (2) this rank's GPU, or the CPU if there is none
    torch.manual_seed(0)
    data = rankwise.run_on_main(load_digits)  # (a guard: downloaded once, or fails on all ranks at once)
    dataset = TensorDataset(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # (3) which rank gets which samples, and when
    loader = rankwise.Loader(dataset, global_batch_size=64, max_epochs=10)
    sync = rankwise.AllReduce().attach(model, optimizer)  # (4) the gradient of the whole global batch
    meters, checkpoints = rankwise.Meters("loss"), rankwise.Checkpoints()  # (5) saved in runs/02_own_loop
    parts = {"sync": sync, "model": model, "optimizer": optimizer, "loader": loader}
    step = checkpoints.resume(parts)  # 0 if there is none
    with rankwise.StopSignal() as stop:  # (6) Ctrl-C stops all ranks after the same step
        for step, micro_batches in stop.steps(loader, step):
            for x, y in micro_batches:  # empty on a rank without a sample
                loss = F.cross_entropy(model(x), y, reduction="sum")
                sync.backward(loss, len(y))  # a sum and the number of samples, not a mean
                meters.add(loss=(loss.detach(), len(y)))
            sync.step()
            if step % 50 == 0:
                loss_now = meters.reduce()["loss"].mean  # over all ranks, so call it on all ranks
                rankwise.say(f"step {step}, epoch {loader.epoch + 1}: loss {loss_now:.3f}")
        checkpoints.save(parts, step)
    rankwise.say(f"done after {step} steps")


if __name__ == "__main__":
    main()
