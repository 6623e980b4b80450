"""Strategies over a slow network, compared with torch's DDP: samples per second, and bytes sent, counted by the kernel.

    sudo python benchmarks/slow_network/bench.py [--rounds 3] [--mbit 100] [--out FILE.jsonl]

Two ranks in two network namespaces that this script creates. tc (tbf) limits the rate of the link between them, at both ends.
The model has 4.9 M parameters (19.6 MB) in 8 layers. To compute a layer is a sleep of known length in the forward and the
backward pass, with a ready gradient, so that two ranks on two cores do not slow each other down. Every way runs once per round.
Before and after each round, an all-reduce of 4 MB must take the time that the limit allows. A round that is already in
FILE.jsonl is not repeated.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import median, ratios, spread

LAYERS, WIDTH, BATCH = 8, 784, 64
FORWARD_S, BACKWARD_S = 0.002, 0.004
PROBE = 2**20
WAYS = {
    "DDP": (4, 1),
    "DDP, fp16 hook": (6, 1),
    "all-reduce": (4, 1),
    "all-reduce:bf16": (6, 1),
    "all-reduce:int8": (10, 1),
    "all-reduce:powersgd:2": (24, 2),
    "local-sgd:16": (32, 0),
    "diloco:32": (64, 0),
    "diloco:32:bf16": (64, 0),
    "diloco:32:int8": (64, 0),
}


# --- a rank


def rank_main(rounds: list[int]) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    import rankwise
    from rankwise.sync import named

    class Computing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, gradient):
            time.sleep(FORWARD_S)
            ctx.gradient = gradient
            return x + 0 * weight[0, 0]

        @staticmethod
        def backward(ctx, grad):
            time.sleep(BACKWARD_S)
            return grad, ctx.gradient, None

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 28)
            self.ready = torch.randn(WIDTH, WIDTH) * 1e-3

        def forward(self, x):
            return Computing.apply(x, self.weight, self.ready)

    rankwise.init()

    def made(way):
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        x = torch.zeros(BATCH)
        if way.startswith("DDP"):
            wrapped = DistributedDataParallel(model)
            if "fp16" in way:
                wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)

            def step():
                optimizer.zero_grad()
                (wrapped(x).sum() / BATCH).backward()
                optimizer.step()

            return step, lambda: 0
        sync = named(way).attach(model, optimizer, typical_count=BATCH)

        def step():
            sync.backward(model(x).sum(), BATCH, last=True)
            sync.step()

        return step, lambda: sync.figures()["sent_bytes"]

    def timed(steps, step):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        dist.barrier()
        return (time.perf_counter() - began) / steps

    def probe():
        whole = torch.zeros(PROBE)
        timed(1, lambda: dist.all_reduce(whole))
        return timed(3, lambda: dist.all_reduce(whole))

    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    for number in rounds:
        found = {"round": number, "before_s": probe()}
        for way, (steps, warm) in WAYS.items():
            step, sent = made(way)
            for _ in range(warm):
                step()
            dist.barrier()
            payload, wire = sent(), int(counter.read_text())
            step_s = timed(steps, step)
            payload, wire = sent() - payload, int(counter.read_text()) - wire
            found[way] = {"samples_per_s": 2 * BATCH / step_s, "payload": payload / steps, "wire": wire / steps}
        found["after_s"] = probe()
        if rankwise.is_main():
            print(json.dumps(found), flush=True)


# --- the link


def link_up(mbit: int) -> None:
    link_down()
    for name in ("rw0", "rw1"):
        sh(f"ip netns add {name}; ip -n {name} link set lo up")
    sh("ip -n rw0 link add eth0 type veth peer name eth0 netns rw1")
    for i, name in enumerate(("rw0", "rw1")):
        sh(f"ip -n {name} addr add 10.77.0.{i + 1}/24 dev eth0; ip -n {name} link set eth0 up")
        # With offloading, a packet of 64 kB counts as one: the kernel's counter would miss the headers of the packets that it
        # becomes.
        sh(f"ip netns exec {name} ethtool -K eth0 tso off gso off gro off >/dev/null 2>&1 || true")
        sh(f"ip netns exec {name} tc qdisc add dev eth0 root tbf rate {mbit}mbit burst 64kb latency 50ms")


def link_down() -> None:
    for name in ("rw0", "rw1"):
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def sh(line: str) -> None:
    subprocess.run(line, shell=True, check=True)


# --- all rounds


def measured(rounds: list[int], out: Path) -> None:
    ranks = []
    for rank in range(2):
        environ = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29555",
            "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        words = ["ip", "netns", "exec", f"rw{rank}", sys.executable, __file__, "--rank", ",".join(map(str, rounds))]
        ranks.append(subprocess.Popen(words, env=environ, stdout=subprocess.PIPE if rank == 0 else None, text=True))
    assert ranks[0].stdout is not None
    with out.open("a") as file:
        for line in ranks[0].stdout:
            if line.startswith("{"):
                file.write(line)
                file.flush()
                print(f"round {json.loads(line)['round']} done", file=sys.stderr)
    if any(rank.wait() for rank in ranks):
        sys.exit("a rank failed")


def shown(found: list[dict], mbit: int) -> None:
    of_link = [4 * PROBE * 8 / (mbit * 1e6) / each[when] for each in found for when in ("before_s", "after_s")]
    print(f"{len(found)} rounds at {mbit} Mbit/s; an all-reduce of 4 MB gets {spread(of_link)} of it\n")
    base = [each["DDP"]["samples_per_s"] for each in found]
    print(f"DDP: {spread(base, 1)} samples/s\n")
    print("| way | samples/s, / DDP | payload a step, kB | wire / payload |\n|---|---|---|---|")
    for way in WAYS:
        rate = spread(ratios([each[way]["samples_per_s"] for each in found], base))
        payload = median(each[way]["payload"] for each in found)
        wire = median(each[way]["wire"] for each in found)
        print(f"| {way} | {rate} | {payload / 1e3:.1f} | {wire / payload:.3f} |" if payload else f"| {way} | {rate} | | |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main([int(number) for number in args.rank.split(",")])
        return
    out = args.out or Path(f"slow_network_{args.mbit}.jsonl")
    have = {json.loads(line)["round"] for line in out.read_text().splitlines()} if out.exists() else set()
    todo = [number for number in range(args.rounds) if number not in have]
    if todo:
        link_up(args.mbit)
        try:
            measured(todo, out)
        finally:
            link_down()
    shown([json.loads(line) for line in out.read_text().splitlines()], args.mbit)


if __name__ == "__main__":
    main()
