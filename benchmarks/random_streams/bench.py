"""What does it cost to key a dataset's random numbers, and to leave the random streams of the training unchanged?

python benchmarks/random_streams/bench.py
"""

import random
import sys
import time
from pathlib import Path

import numpy as np
import torch

from rankwise.data.fetch import Fetch
from rankwise.dist import seed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import median, p10, rounds

TURNS, CALLS, BATCH = 60, 200, 32


class Rows:
    def __len__(self):
        return 1024

    def __getitem__(self, index):
        return index


class QuietRows(Rows):
    draws_nothing = True


class TorchRows(Rows):
    def __getitem__(self, index):
        torch.default_generator.manual_seed(index)  # for the streams this is a draw, and it takes the least time
        return index


def all_the_same(key):
    state = seed.rng_state()
    seed.seed_everything(key)
    seed.set_rng_state(state)


def their_own_way(key):
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed.seed_streams(key)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


saved = seed.SavedStreams()


def saved_and_restored(key):
    saved.save()
    seed.seed_streams(key)
    saved.restore()


keyed, quiet, drawing = (Fetch(rows, None, 0) for rows in (Rows(), QuietRows(), TorchRows()))
indices = np.arange(BATCH)
CASES = {
    "rng_state, seed_everything, set_rng_state": all_the_same,
    "each generator's own get, seed and set": their_own_way,
    "SavedStreams.save, seed_streams, SavedStreams.restore": saved_and_restored,
    "torch.manual_seed": torch.manual_seed,
    "seed_streams": seed.seed_streams,
    "SavedStreams.save, SavedStreams.restore: nothing was drawn": lambda _: (saved.save(), saved.restore()),
    f"a batch of {BATCH}, a dataset that draws nothing": lambda _: keyed((0, indices)),
    f"a batch of {BATCH}, one that says so": lambda _: quiet((0, indices)),
    f"a batch of {BATCH}, one that draws from torch": lambda _: drawing((0, indices)),
}


def microseconds(call):
    began = time.perf_counter()
    for key in range(CALLS):
        call(key)
    return (time.perf_counter() - began) / CALLS * 1e6


times = rounds({name: lambda _, call=call: microseconds(call) for name, call in CASES.items()}, TURNS)
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, numpy {np.__version__}; {TURNS} turns of {CALLS} calls")
print(f"{'':45s} us p10  median")
for name, values in times.items():
    print(f"{name:45s} {p10(values):7.1f} {median(values):7.1f}")
