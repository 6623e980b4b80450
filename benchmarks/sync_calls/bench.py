"""What the calls of a strategy cost in a hand-written loop on one rank, compared with no calls, and with DDP of one rank.

    python benchmarks/sync_calls/bench.py [--rounds 15]

A model of 4.9 M parameters (19.6 MB), 64 samples per step, AdamW. In each round every way makes 32 steps (two periods of
local-sgd:16, one of diloco:32), in turn. Time is CPU time of the loop's thread. `bare, judged` is the lower limit: the bare
loop that also checks the gradient before each step, as every strategy must, to skip a step that is not finite.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import ratios, rounds, spread

from rankwise.sync import named

STEPS, BATCH = 32, 64
STRATEGIES = ["local-sgd:16", "post-local-sgd:8:16", "diloco:32", "diloco:32:int8", "all-reduce"]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(784, 784), nn.ReLU())))


def timed(step) -> float:
    began = time.thread_time()
    for _ in range(STEPS):
        step()
    return time.thread_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    x, y = torch.randn(BATCH, 784), torch.randn(BATCH, 784)

    def loss(net):
        return functional.mse_loss(net(x), y, reduction="sum") / 784

    def plain(net, wrapped, judged=False):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

        def step():
            optimizer.zero_grad()
            (loss(wrapped) / BATCH).backward()
            if not judged or nn.utils.get_total_norm([p.grad for p in net.parameters()]).isfinite():
                optimizer.step()

        return step

    def by(name):
        net = model()
        sync = named(name).attach(net, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True), typical_count=BATCH)

        def step():
            sync.backward(loss(net), BATCH, last=True)
            sync.step()

        return step

    bare, other, third, fourth = model(), model(), model(), model()
    steps = {
        "bare": plain(bare, bare),
        "bare again": plain(other, other),
        "bare, judged": plain(fourth, fourth, judged=True),
        "DDP": plain(third, DistributedDataParallel(third)),
        **{name: by(name) for name in STRATEGIES},
    }
    ways = {name: (lambda turn, step=step: timed(step)) for name, step in steps.items()}
    found = rounds(ways, args.rounds, warm=1, rotate=True)
    print("| way | / bare loop | / bare, judged | / DDP |\n|---|---|---|---|")
    for name in list(steps)[1:]:
        print(
            f"| {name} | {' | '.join(spread(ratios(found[name], found[base])) for base in ('bare', 'bare, judged', 'DDP'))} |"
        )


if __name__ == "__main__":
    main()
