"""How much of a short epoch is the start of the loader workers? 20 batches of 32 images of 48 kB, 2 workers.

    python benchmarks/loader/epochs.py [rounds] [GB]

`GB`: memory that the training process has besides, which each fork must map (0).
"""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from rankwise import Loader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import median, ratios, rounds, spread

SAMPLES, BATCH, EPOCHS = 640, 32, 10


class Images:
    draws_nothing = True

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int):
        return torch.full((3, 64, 64), float(index)), index % 10


def theirs(persistent: bool) -> float:
    """Milliseconds of an epoch after the first."""
    batches = DataLoader(Images(), BATCH, shuffle=True, num_workers=2, persistent_workers=persistent)
    times = []
    for _ in range(EPOCHS + 1):
        began = time.perf_counter()
        for _batch in batches:
            pass
        times.append(time.perf_counter() - began)
    return 1e3 * median(times[1:])


def ours(persistent: bool) -> float:
    loader = Loader(Images(), batch_size=BATCH, num_workers=2, persistent_workers=persistent, max_epochs=EPOCHS + 1)
    times, began = [], time.perf_counter()
    for step, _ in enumerate(loader, 1):
        if step % (SAMPLES // BATCH) == 0:
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
    return 1e3 * median(times[1:])


def main() -> None:
    torch.set_num_threads(1)
    given = [*map(float, sys.argv[1:]), *(7.0, 0.0)[len(sys.argv) - 1 :]]
    ballast = torch.ones(int(given[1] * 25e7))
    ways = {
        "DataLoader": lambda _: theirs(False),
        "DataLoader, persistent_workers": lambda _: theirs(True),
        "Loader": lambda _: ours(False),
        "Loader, persistent_workers": lambda _: ours(True),
    }
    found = rounds(ways, int(given[0]), rotate=True)
    print(f"{ballast.nbytes / 1e9:.1f} GB besides\n| way | ms per epoch | / DataLoader |\n|---|---|---|")
    for name, times in found.items():
        print(f"| {name} | {spread(times, 0)} | {spread(ratios(times, found['DataLoader']))} |")


if __name__ == "__main__":
    main()
