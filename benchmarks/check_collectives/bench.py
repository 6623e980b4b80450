"""One all-reduce with and without --check-collectives, in turn within one run.

rankwise run --nproc 2 --check-collectives benchmarks/check_collectives/bench.py
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import median, p10, p90, ratios, rounds

CHUNK = 200
ROUNDS = 40

dist.init_process_group("gloo")
noted, plain = dist.all_reduce, dist.all_reduce.__wrapped__
if "collective_notes.py" not in noted.__code__.co_filename:
    raise SystemExit("start it with: rankwise run --nproc 2 --check-collectives benchmarks/check_collectives/bench.py")


def seconds(all_reduce, tensor):
    dist.barrier()
    began = time.perf_counter()
    for _ in range(CHUNK):
        all_reduce(tensor)
    return (time.perf_counter() - began) / CHUNK


def compare(numel):
    tensor = torch.zeros(numel)
    ways = {"plain": lambda _: seconds(plain, tensor), "noted": lambda _: seconds(noted, tensor)}
    found = rounds(ways, ROUNDS if numel < 1_000_000 else 4)
    slower = ratios(found["noted"], found["plain"])
    if dist.get_rank() == 0:
        print(
            f"{numel:>9} elements: {median(found['plain']) * 1e6:7.0f} us without, "
            f"ratio {median(slower):.3f} (p10 {p10(slower):.3f}, p90 {p90(slower):.3f})"
        )


for numel in (1, 1000, 1_000_000):
    compare(numel)
