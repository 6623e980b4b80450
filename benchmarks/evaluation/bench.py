"""How long do Evaluate and predict take, compared with a loop written manually with torch's DataLoader?

    python benchmarks/evaluation/bench.py

One rank, one thread, a small model, so that the time of a batch outside the model dominates. The ways take turns on the same
data. Below 1, rankwise is faster.

The floor is a bare loop of the calls that the promises need: each batch is read without a change of the random streams, and
each prediction is copied, because the function may overwrite it.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rankwise
from rankwise import Evaluate, Loader
from rankwise.data.fetch import collate
from rankwise.dist.seed import SavedStreams

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import median, p10, ratios, rounds

WIDTH, CLASSES = 16, 4
TURNS, WARM = 40, 4


class PerSample:
    """Returns one sample at a time."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index], self.y[index]


class InOne(PerSample):
    """Makes a batch at once, as many datasets in memory do."""

    def __getitems__(self, indices: list[int]):
        return self.x[indices], self.y[indices]


def as_it_is(batch):
    return batch


def figures(model, batch):
    x, y = batch
    logits = model(x)
    loss = F.cross_entropy(logits, y, reduction="sum")
    return {"loss": (loss, len(y)), "accuracy": ((logits.argmax(1) == y).sum(), len(y))}


def by_hand(model, batches) -> dict[str, float]:
    model.eval()
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for x, y in batches:
            logits = model(x)
            loss += F.cross_entropy(logits, y, reduction="sum").item()
            correct += (logits.argmax(1) == y).sum().item()
            count += len(y)
    model.train()
    return {"eval_loss": loss / count, "eval_accuracy": correct / count}


def predicted_by_hand(model, batches) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(x) for x, _ in batches])
    model.train()
    return logits


def batches_of(data, size: int):
    """Those of the floor."""
    streams = SavedStreams()
    made = data.__getitems__ if hasattr(data, "__getitems__") else lambda indices: collate([data[index] for index in indices])
    for first in range(0, len(data), size):
        indices = list(range(first, min(first + size, len(data))))
        streams.save()
        batch = made(indices)
        streams.restore()
        yield batch


def predicted_in_copies(model, batches) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(x).to("cpu", copy=True) for x, _ in batches])
    model.train()
    return logits


def timed(call):
    def turn(_number: int) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return turn


def row(name: str, data, collate_fn, size: int, model: nn.Module) -> str:
    def logits(model, batch):
        return model(batch[0])

    loader = Loader(data, global_batch_size=size, shuffle=False, max_epochs=1)
    plain = DataLoader(data, batch_size=size, collate_fn=collate_fn)
    ours = Evaluate(loader, figures).figures(model)
    theirs = by_hand(model, plain)
    assert ours.keys() == theirs.keys()
    assert all(abs(ours[key] - theirs[key]) < 1e-5 for key in ours)
    assert torch.equal(rankwise.predict(logits, model, loader), predicted_by_hand(model, plain))
    times = rounds(
        {
            "evaluate": timed(lambda: Evaluate(loader, figures).figures(model)),
            "evaluate by hand": timed(lambda: by_hand(model, plain)),
            "evaluate floor": timed(lambda: by_hand(model, batches_of(data, size))),
            "predict": timed(lambda: rankwise.predict(logits, model, loader)),
            "predict by hand": timed(lambda: predicted_by_hand(model, plain)),
            "predict floor": timed(lambda: predicted_in_copies(model, batches_of(data, size))),
        },
        TURNS, WARM, rotate=True,
    )  # fmt: skip
    told = []
    for way in ("evaluate", "predict"):
        mine, plainly, floor = times[way], times[f"{way} by hand"], times[f"{way} floor"]
        us_a_batch = 1e6 * p10(plainly) / (len(data) / size)
        of_floor = f"{median(ratios(mine, floor)):.2f} | {p10(mine) / p10(floor):.2f}"
        told.append(f"{median(ratios(mine, plainly)):.2f} | {p10(mine) / p10(plainly):.2f} | {of_floor} | {us_a_batch:.0f}")
    return f"| {name}, batch {size} | {' | '.join(told)} |"


def main() -> None:
    torch.set_num_threads(1)
    rankwise.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    columns = [f"{way} / {other}: median | tenths" for way in ("Evaluate", "predict") for other in ("by hand", "floor")]
    print(f"| data | {columns[0]} | {columns[1]} | by hand, us | {columns[2]} | {columns[3]} | by hand, us |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for size in (32, 256):
        x, y = torch.randn(64 * size + 5, WIDTH), torch.randint(CLASSES, (64 * size + 5,))
        for name, data, collate_fn in (
            ("class with `__getitems__`", InOne(x, y), as_it_is),
            ("class with `__getitem__`", PerSample(x, y), None),
            ("TensorDataset", TensorDataset(x, y), None),
        ):
            print(row(name, data, collate_fn, size, model), flush=True)


if __name__ == "__main__":
    main()
