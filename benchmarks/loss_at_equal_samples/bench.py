"""What fewer and smaller messages cost in loss, at equal samples: each strategy compared with torch's DDP.

    python benchmarks/loss_at_equal_samples/bench.py [--seeds 3] [--steps 416] [--out FILE.jsonl]

A GPT on bytes with 1.334 M parameters (37 tensors), on the text of examples/04_gpt.py, 2 ranks, 8 windows of 128 bytes per rank
and step, AdamW with 2e-3 for every way. For each seed, every way starts with the same parameters and reads the same windows in
the same order. The loss is the mean over a validation text after the last step, with the model that all ranks have then. A pair
of seed and way that is already in FILE.jsonl is not repeated.
"""

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "04_gpt.py"
BATCH, LR = 8, 2e-3
WIDTH, LAYERS, HEADS = 160, 4, 4
WAYS = {  # the largest allowed difference from DDP, as a mean over seeds
    "DDP": None,
    "all-reduce:bf16": 0.02,
    "all-reduce:int8": 0.02,
    "local-sgd:16": 0.12,
    "post-local-sgd:128:16": 0.13,
    "diloco:32:int8": 0.10,
}


# --- a rank


def rank_main(way: str, seed: int, steps: int) -> None:
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    import rankwise
    from rankwise.sync import named

    world = rankwise.init()
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("example_gpt", EXAMPLE)
    gpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpt)
    text, held_out = gpt.standard_library()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.out = nn.Linear(WIDTH, WIDTH, bias=False)
            self.wide = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
            self.narrow = nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, x):
            q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
            return x + self.narrow(functional.gelu(self.wide(self.norm2(x))))

    class Toy(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(gpt.CONTEXT, WIDTH)
            self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

        def forward(self, tokens):
            x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
            return self.head(self.norm(self.blocks(x)))

    torch.manual_seed(seed)
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    windows = torch.randperm(len(text), generator=torch.Generator().manual_seed(seed))

    def loss_sum(net, inputs, targets):
        return functional.cross_entropy(net(inputs).flatten(0, 1), targets.flatten(), reduction="sum")

    if way == "DDP":
        wrapped = DistributedDataParallel(model)

        def step(inputs, targets):
            optimizer.zero_grad()
            (loss_sum(wrapped, inputs, targets) / targets.numel()).backward()
            optimizer.step()

        finish = optimizer.zero_grad
    else:
        sync = named(way).attach(model, optimizer, typical_count=BATCH * gpt.CONTEXT)
        sync.check_length(steps)

        def step(inputs, targets):
            sync.backward(loss_sum(model, inputs, targets), targets.numel(), last=True)
            sync.step()

        finish = sync.finish
    for number in range(steps):
        first = (number * world.world_size + world.rank) * BATCH
        step(*text.__getitems__(windows[first : first + BATCH].tolist()))
    finish()
    with torch.no_grad():
        inputs, targets = held_out.__getitems__(list(range(len(held_out))))
        pieces = zip(inputs.split(64), targets.split(64), strict=True)
        loss = sum(float(loss_sum(model, x, y)) for x, y in pieces) / targets.numel()
    if world.is_main:
        print(json.dumps({"way": way, "seed": seed, "steps": steps, "loss": loss}), flush=True)


# --- all ways


def measured(way: str, seed: int, steps: int) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
        environ = {
            **os.environ, **{name: str(value) for name, value in numbers.items()},
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        words = [sys.executable, __file__, "--rank", way, "--seeds", str(seed), "--steps", str(steps)]
        ranks.append(subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True))
    told = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed")
    return next(line for line in told[0].splitlines() if line.startswith("{"))


def shown(found: list[dict], seeds: int) -> None:
    loss = {(each["way"], each["seed"]): each["loss"] for each in found}
    print("| way | loss, mean | above DDP, mean (least .. most) | at most |\n|---|---|---|---|")
    for way, most in WAYS.items():
        above = [loss[way, seed] - loss["DDP", seed] for seed in range(seeds)]
        mean = sum(loss[way, seed] for seed in range(seeds)) / seeds
        bound = "" if most is None else f"{most:+.2f}"
        print(f"| {way} | {mean:.3f} | {sum(above) / seeds:+.3f} ({min(above):+.3f} .. {max(above):+.3f}) | {bound} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=416)
    parser.add_argument("--out", type=Path, default=Path("loss_at_equal_samples.jsonl"))
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.rank, args.seeds, args.steps)
        return
    found = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    have = {(each["way"], each["seed"]) for each in found if each["steps"] == args.steps}
    with args.out.open("a") as file:
        for seed in range(args.seeds):
            for way in WAYS:
                if (way, seed) not in have:
                    line = measured(way, seed, args.steps)
                    file.write(line + "\n")
                    file.flush()
                    print(line, file=sys.stderr)
    found = [json.loads(line) for line in args.out.read_text().splitlines()]
    shown([each for each in found if each["steps"] == args.steps], args.seeds)


if __name__ == "__main__":
    main()
