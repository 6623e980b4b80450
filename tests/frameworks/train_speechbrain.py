"""A SpeechBrain script, as for torchrun: a Brain, 20 steps, gloo on the CPU."""

import speechbrain
import torch
from speechbrain.utils.distributed import ddp_init_group
from torch.utils.data import DataLoader, TensorDataset


class Brain(speechbrain.Brain):
    def compute_forward(self, batch, stage):
        return self.modules.layer(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return (predictions**2).mean()


if __name__ == "__main__":
    options = {"device": "cpu", "distributed_backend": "gloo", "noprogressbar": True}
    ddp_init_group(options)
    torch.manual_seed(0)
    brain = Brain(
        {"layer": torch.nn.Linear(8, 1)},
        opt_class=lambda p: torch.optim.SGD(p, lr=0.1),
        run_opts={**options, "distributed_launch": True},
    )
    sampler = torch.utils.data.DistributedSampler(range(320))
    brain.fit(range(1), DataLoader(TensorDataset(torch.randn(320, 8)), batch_size=8, sampler=sampler))
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    print("trained", brain.optimizer_step, "steps as rank", rank, "of", size)
