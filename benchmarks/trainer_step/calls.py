"""How many more Python calls does a step of the Trainer make than a hand-written loop? An exact count, not a timing.

python benchmarks/trainer_step/calls.py              a class with __getitems__
python benchmarks/trainer_step/calls.py quiet        the same class, with draws_nothing
"""

import collections
import contextlib
import io
import sys
import tempfile

from bench import BATCH, QuietRows, Rows, step_fn, tiny
from torch.nn import functional as F
from torch.utils.data import DataLoader

import rankwise

FIRST, LAST = 110, 140  # between two log intervals, after the warm-up
DATA = (QuietRows if sys.argv[1:] == ["quiet"] else Rows)(16384)


class Counter:
    """Counts Python-level calls between two steps, by function."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()

    def at(self, step: int) -> None:
        if step == FIRST:
            sys.setprofile(self._event)
        elif step == LAST:
            sys.setprofile(None)

    def _event(self, frame, event, _argument) -> None:
        if event == "call":
            self.calls[f"{frame.f_code.co_filename.rpartition('site-packages/')[2]}:{frame.f_code.co_qualname}"] += 1

    def per_step(self) -> float:
        return sum(self.calls.values()) / (LAST - FIRST)


def raw() -> Counter:
    counter = Counter()
    model, optimizer = tiny()
    for step, (x, y) in enumerate(DataLoader(DATA, BATCH, shuffle=True, collate_fn=lambda batch: batch), 1):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counter.at(step)
        if step == LAST:
            return counter
    return counter


def trainer() -> Counter:
    counter = Counter()
    action = lambda state: counter.at(state.step)  # noqa: E731
    with contextlib.redirect_stdout(io.StringIO()):
        rankwise.Trainer(
            *tiny(), step_fn, DATA, batch_size=BATCH, max_steps=LAST, actions=[action], run_dir=tempfile.mkdtemp()
        ).fit()
    return counter


if __name__ == "__main__":
    ours, theirs = trainer(), raw()
    extra = ours.per_step() - theirs.per_step()
    print(f"hand-written {theirs.per_step():.1f}, Trainer {ours.per_step():.1f}: {extra:+.1f} a step")
    for name, n in ours.calls.most_common(60):
        more = (n - theirs.calls[name]) / (LAST - FIRST)
        if more >= 0.5:
            print(f"  {more:5.1f}  {name}")
