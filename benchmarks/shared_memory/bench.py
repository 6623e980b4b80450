"""Collectives of ranks on one host: in memory that they share, and over gloo, in turn within one run.

rankwise run --nproc 2 benchmarks/shared_memory/bench.py
"""

import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import rankwise
from rankwise.dist import comm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import median, p10, p90, ratios, rounds

rankwise.init()
if comm._memory() is None:
    raise SystemExit("these ranks share no memory")


def seconds(call, calls):
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def by_gloo(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)


def compare(what, memory, gloo, calls):
    found = rounds(
        {"memory": lambda _: seconds(memory, calls), "gloo": lambda _: seconds(gloo, calls)}, 40 if calls > 10 else 8
    )
    ratio = ratios(found["memory"], found["gloo"])
    if dist.get_rank() == 0:
        print(
            f"{what:>34}: gloo {median(found['gloo']) * 1e6:9.0f} us, in memory {median(found['memory']) * 1e6:9.0f} us, "
            f"ratio {median(ratio):.3f} (p10 {p10(ratio):.3f}, p90 {p90(ratio):.3f})"
        )


for numel, calls in ((1, 100), (700, 100), (20_000, 50), (200_000, 20), (1_000_000, 5), (25_000_000, 1)):
    tensor = torch.zeros(numel)
    compare(f"sum of {numel:,} float32", partial(comm.add, tensor), partial(dist.all_reduce, tensor), calls)
compare("barrier", comm.barrier, dist.barrier, 100)
compare("all_gather_object of a small dict", partial(comm.all_gather_object, {"a": 1}), partial(by_gloo, {"a": 1}), 100)
