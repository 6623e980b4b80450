"""One all-reduce with and without --check-collectives, in turns within one run.

rankwise run --nproc 2 --check-collectives benchmarks/check_collectives/bench.py
"""

import statistics
import time

import torch
import torch.distributed as dist

CHUNK = 200
ROUNDS = 40

dist.init_process_group("gloo")
noted, plain = dist.all_reduce, dist.all_reduce.__wrapped__
if "warm.py" not in noted.__code__.co_filename:
    raise SystemExit("start it with: rankwise run --nproc 2 --check-collectives benchmarks/check_collectives/bench.py")


def seconds(all_reduce, tensor):
    dist.barrier()
    began = time.perf_counter()
    for _ in range(CHUNK):
        all_reduce(tensor)
    return (time.perf_counter() - began) / CHUNK


for numel in (1, 1000, 1_000_000):
    tensor = torch.zeros(numel)
    ratios, base = [], []
    for _ in range(ROUNDS if numel < 1_000_000 else 4):
        a, b = seconds(plain, tensor), seconds(noted, tensor)
        base.append(a)
        ratios.append(b / a)
    if dist.get_rank() == 0:
        low, high = statistics.quantiles(ratios, n=10)[0], statistics.quantiles(ratios, n=10)[-1]
        print(
            f"{numel:>9} elements: {statistics.median(base) * 1e6:7.0f} us without, "
            f"ratio {statistics.median(ratios):.3f} (p10 {low:.3f}, p90 {high:.3f})"
        )
