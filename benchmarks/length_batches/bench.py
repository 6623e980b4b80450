"""Batches by length: how much is padding, how long do ranks wait, is every sample used once, what does the plan cost?

pip install -c constraints.txt speechbrain torchaudio;  python benchmarks/length_batches/bench.py
"""

import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from speechbrain.dataio.sampler import DistributedSamplerWrapper, DynamicBatchSampler

from rankwise import LengthBatches, Loader
from rankwise.data.batching import balanced_runs
from rankwise.dist import World

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import median, rounds, spread

SAMPLES, TURNS = 50_000, 5
RNG = np.random.default_rng(0)
LENGTHS = {
    "uniform": RNG.integers(50, 1500, SAMPLES),
    "log-normal": np.clip(np.exp(RNG.normal(6.4, 0.6, SAMPLES)), 50, 3000).astype(int),
}
RANKS = (1, 2, 4, 8)


class Rows:
    draws_nothing = True

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index


def ours(ranks, **settings):
    """For each rank, its batch of each step."""
    return [
        plan_of(Loader(Rows(), max_epochs=1, **settings).at(World(r, ranks, r, ranks, 0, source="benchmark")))
        for r in range(ranks)
    ]


def plan_of(loader):
    batching, world = loader._batching, loader._world
    return [lists[0] if lists else [] for _, _, lists in batching.plan(0, 0, world.rank, world.world_size, 1)]


def speechbrain(lengths, tokens, ranks, buckets):
    plans = []
    for rank in range(ranks):
        sampler = DynamicBatchSampler(Rows(), tokens // ranks, num_buckets=buckets, lengths_list=lengths.tolist())
        wrapped = DistributedSamplerWrapper(sampler, num_replicas=ranks, rank=rank, shuffle=True) if ranks > 1 else sampler
        wrapped.set_epoch(0)
        plans.append(list(wrapped))
    return plans


def figures(lengths, plans):
    """(padding, the padded frames of the slowest rank in each step divided by a fair share of the real frames, samples lost,
    repeated)"""

    def padded(batch):
        return len(batch) * max(lengths[batch], default=0)

    costs = np.array([[padded(batch) for batch in plan] for plan in plans])
    seen = Counter(k for plan in plans for batch in plan for k in batch)
    real = sum(lengths[k] * n for k, n in seen.items())
    repeated = sum(n - 1 for n in seen.values())
    return 1 - real / costs.sum(), costs.max(0).sum() * len(plans) / lengths.sum(), SAMPLES - len(seen), repeated


def cases(lengths):
    """For each case, a function that makes the plans for a number of ranks."""
    tokens = int(4 * 32 * lengths.mean())

    def by_length(n, **given):
        return ours(n, batches=LengthBatches(global_tokens=tokens, lengths=lengths, **given))

    return {
        "as many samples each, in any order": lambda n: ours(n, global_batch_size=128),
        "LengthBatches": by_length,
        "the same, pool of 8 steps": lambda n: by_length(n, pool=8 * 128),
        "SpeechBrain, 50 buckets": lambda n: speechbrain(lengths, tokens, n, 50),
        "SpeechBrain, 200 buckets": lambda n: speechbrain(lengths, tokens, n, 200),
    }


def main():
    for name, lengths in LENGTHS.items():
        print(f"\n{name}: padding on 1 rank; relative cost on {RANKS} ranks; lost, repeated on all of them together")
        for case, plan in cases(lengths).items():
            found = [figures(lengths, plan(ranks)) for ranks in RANKS]
            costs = " ".join(f"{cost:.3f}" for _, cost, _, _ in found)
            print(f"{case:36s} {found[0][0]:6.1%}  {costs}  {sum(f[2] for f in found)} {sum(f[3] for f in found)}")

    def seconds(plan):
        began = time.process_time()
        plan(1)
        return time.process_time() - began

    plans = cases(LENGTHS["log-normal"])
    times = rounds({case: lambda _, plan=plan: seconds(plan) for case, plan in plans.items()}, TURNS)
    base = median(times["LengthBatches"])
    print("\nCPU time of one epoch's plan on 1 rank, ratios of medians")
    for case, spent in times.items():
        print(f"{case:36s} {spread([taken / base for taken in spent])}")
    print(f"LengthBatches: {base / SAMPLES * 1e6:.2f} us a sample")


def sharing():
    """The time that a rank needs to find its part of a global batch."""
    lengths = LENGTHS["uniform"]
    print("\nCPU time of sharing a global batch out")
    for parts in (1, 8, 64, 512):
        size = max(128, 8 * parts)
        batches = [sorted(lengths[k : k + size].tolist()) for k in range(0, SAMPLES - size, size)][:60]
        began = time.process_time()
        for batch in batches:
            balanced_runs(batch, parts)
        print(f"{parts} parts of {size} samples: {(time.process_time() - began) / len(batches) / size * 1e6:.2f} us a sample")


if __name__ == "__main__":
    main()
    sharing()
