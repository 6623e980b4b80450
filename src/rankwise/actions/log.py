"""The log of a training: meters over all ranks, a line every few seconds, and a line for each epoch.

log = Log(every_steps=50);  log.attach(trainer);  log.begin(state)
log(state)                                     # an action
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from rankwise.dist import comm
from rankwise.errors import RankwiseError
from rankwise.host.arguments import FROM_ONE, NOT_NEGATIVE, takes
from rankwise.host.text import count, in_lines, rounded, wrapped
from rankwise.telemetry.breakdown import TimeBreakdown
from rankwise.telemetry.meters import Meters, Total
from rankwise.telemetry.progress import Progress
from rankwise.telemetry.slowness import SlowWatch, Spent
from rankwise.training.state import TrainState

_PROCESSOR = "processor"
_SLOW_LINE_S = 60.0  # if a log interval takes longer than this, a line without metrics is printed


class Log:
    """An action: every `every_steps` steps, and at the end of an epoch, reduce the loss and the other meters over all ranks.
    The results are metrics of this step, with the learning rate and the samples per second. A line is printed at most every
    `line_every_s` seconds, and one that says why the training is slow. A Log in the Trainer's `actions` replaces the default
    one."""

    name = "log"

    @takes(every_steps=FROM_ONE, line_every_s=NOT_NEGATIVE)
    def __init__(self, every_steps: int = 50, line_every_s: float = 15.0) -> None:
        self.every_steps = every_steps
        self._line_every_s = line_every_s
        self._samples: Callable[[], int] = int
        self._samples_before = 0
        self._began = self._last_line = time.monotonic()
        self._interval: dict[str, Total] = {}
        self._epoch: dict[str, Total] = {}
        self._epoch_steps = 0
        self._skipped_before = 0
        self._last_step = 0
        self._sent_before = 0.0
        self._text = ""
        self._samples_at_line = 0
        self.slower_ranks_s = 0.0
        """How long this rank has waited for slower ranks, as known at the last log interval. Its strategy counts this time as
        all-reduce."""

    def attach(self, trainer: Any) -> None:
        """Use the Trainer's meters, time breakdown, progress line, count of samples, and the metrics of its strategy."""
        self._is_main: bool = trainer.world.is_main
        self._meters: Meters = trainer.meters
        self._breakdown: TimeBreakdown = trainer.breakdown
        self._epoch_time = TimeBreakdown(self._breakdown.sources)
        self._spent = TimeBreakdown({**self._breakdown.sources, _PROCESSOR: time.process_time})
        self._run: Any = getattr(trainer, "run", None)
        self._progress: Progress = trainer.progress
        self._samples = lambda: trainer.loader.taken
        self._of_sync: Callable[[], dict[str, float]] = trainer.sync.figures

    def begin(self, state: TrainState) -> None:
        """The loop starts now: time before this does not count."""
        self._breakdown.restart()
        self._epoch_time.restart()
        self._spent.restart()
        self._progress.explain()
        self._slow = SlowWatch(_hosts(self._run) if self._is_main else ())
        self._began = time.monotonic()
        self._samples_before = self._samples()
        self._begin_line()
        self._last_step = state.step
        self._skipped_before = state.steps_left_out
        self._sent_before = self._of_sync().get("sent_bytes", 0.0)

    def __call__(self, state: TrainState) -> None:
        self._epoch_steps += 1
        if self.is_due(state):
            self.reduce(state)
            self._interval = {}
        now = time.monotonic()
        if self._is_main and now >= self._progress.next_s:
            self._progress.show(state.step, f"epoch {state.epoch + 1}", self._text)
        if state.epoch_ended:
            self._end_epoch(state)
        elif now - self._last_line >= max(self._line_every_s, _SLOW_LINE_S):
            self._say_line(state, "")  # without metrics: these are reduced on all ranks together, at a log interval

    def is_due(self, state: TrainState) -> bool:
        """Whether a log interval ends after this step, on all ranks."""
        return state.step % self.every_steps == 0 or state.epoch_ended or state.last

    def reduce(self, state: TrainState) -> None:
        """Collective. Update the metrics to this step: means since the last log interval. A save in between changes none of
        them, so Plateau and EarlyStopping see the same values however often the run is saved or resumed."""
        if state.step == self._last_step:
            return
        steps = state.step - self._last_step
        self._last_step = state.step
        spent = self._spent.since_last()
        row = [spent.elapsed_s, *spent.parts_s.values()]
        totals, state.clock_s, rows = self._meters.reduce_with_clock(time.monotonic() - self._began, row)
        slow = self._compare([_spent(row, list(spent.parts_s)) for row in rows], steps)
        for name, total in totals.items():
            for kept in (self._interval, self._epoch):
                kept[name] = kept[name] + total if name in kept else total
            state.measure({name: self._interval[name].mean})
        span = self._breakdown.since_last()
        figures: dict[str, float] = {"epoch": state.epoch, "clock_s": state.clock_s, **_rate_of(state)}
        taken = self._samples()
        if span.elapsed_s and taken:
            figures["samples_per_s"] = (taken - self._samples_before) / span.elapsed_s
            self._samples_before = taken
        figures |= self._figures_of_sync(steps)
        parts = {name: max(s, 0.0) for name, s in span.parts_s.items()}  # a difference of two sums may be rounded to below 0
        state.note(figures | {f"share/{name}": s / span.elapsed_s for name, s in parts.items() if span.elapsed_s})
        means = ", ".join(f"{name} {state.metrics[name]:.4g}" for name in totals)
        drift = f", drift {figures['sync/drift']:.3g}" if "sync/drift" in figures else ""
        self._text = f"{means}{_per_second(figures.get('samples_per_s', 0.0))}{drift}"
        since_s = time.monotonic() - self._last_line
        if since_s >= self._line_every_s and not state.epoch_ended:
            rate = (taken - self._samples_at_line) / max(since_s, 1e-9)  # since the last line, as its steps per second
            self._say_line(state, f"{means}{_per_second(rate)}{drift}, ")
        if slow is not None:
            self._progress.say(slow)

    def _compare(self, ranks: list[Spent], steps: int) -> str | None:
        """Note how long this rank has waited for slower ones: the rank that waits least waits only for the network. Returns
        what the main rank should print."""
        mine = ranks[comm.rank()].waited_s
        self.slower_ranks_s += mine - min(rank.waited_s for rank in ranks)
        found = self._slow.add(ranks, steps, time.monotonic()) if self._is_main else None
        if found is None:
            return None
        return "\n".join(wrapped(found))

    def _figures_of_sync(self, steps: int) -> dict[str, float]:
        """On the main rank: bytes per step since the last call, and other metrics of the strategy."""
        figures = self._of_sync()
        if "sent_bytes" in figures:
            sent = figures.pop("sent_bytes")
            figures["bytes_per_step"] = (sent - self._sent_before) / steps
            self._sent_before = sent
        return {f"sync/{name}": value for name, value in figures.items()}

    def _say_line(self, state: TrainState, metrics: str) -> None:
        self._begin_line()
        self._progress.say(in_lines(f"{self._progress.place(state.step)}: {metrics}{self._pace(state)}"))

    def _begin_line(self) -> None:
        self._last_line, self._samples_at_line = time.monotonic(), self._samples()

    def _pace(self, state: TrainState) -> str:
        rate = "".join(f"{name} {value:.4g}, " for name, value in _rate_of(state).items())
        return f"{rate}{self._progress.pace(state.step)}"

    def _end_epoch(self, state: TrainState) -> None:
        means = ", ".join(f"{name} {total.mean:.4g}" for name, total in self._epoch.items())
        span = self._epoch_time.since_last()
        skipped = state.steps_left_out - self._skipped_before
        if self._is_main and self._progress.tells("epoch", state.step):
            place = f"{self._progress.place(state.step)}, {self._pace(state)}"
            steps = count(self._epoch_steps, "step") + f" ({skipped} skipped)" * bool(skipped)
            self._progress.say(in_lines(f"epoch {state.epoch}: {steps}, {means}; {place}; {span.text()}"))
            self._begin_line()
        self._epoch = {}
        self._epoch_steps, self._skipped_before = 0, state.steps_left_out

    def state_dict(self) -> dict[str, Any]:
        return {"interval": _saved(self._interval), "epoch": _saved(self._epoch), "epoch_steps": self._epoch_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._interval = _loaded(state.get("interval", {}))  # older checkpoints do not have it
        self._epoch = _loaded(state["epoch"])
        self._epoch_steps = state["epoch_steps"]


def _spent(row: list[float], names: list[str]) -> Spent:
    """`row`: the elapsed seconds, then those of each name."""
    parts = dict(zip(names, row[1:], strict=True))
    return Spent(row[0], {name: s for name, s in parts.items() if name != _PROCESSOR}, parts[_PROCESSOR])


def _hosts(run: Any) -> list[str]:
    """The host of each rank, from the record of this attempt; empty if there is only one host. `run`: a RunDir, or None."""
    with contextlib.suppress(RankwiseError, OSError, IndexError):
        parts = run.attempts()[-1].parts if run is not None else ()
        if len({part.host for part in parts}) > 1:
            return [part.host for part in sorted(parts, key=lambda part: part.first) for _ in range(part.ranks)]
    return []


def _saved(totals: dict[str, Total]) -> dict[str, list[float]]:
    return {name: [total.sum, total.count] for name, total in totals.items()}


def _loaded(saved: dict[str, list[float]]) -> dict[str, Total]:
    return {name: Total(*pair) for name, pair in saved.items()}


def _per_second(samples: float) -> str:
    return f", {rounded(samples, 4)} samples/s" if samples > 0 else ""


def _rate_of(state: TrainState) -> dict[str, float]:
    """The learning rate of the first parameter group; some optimizers have none."""
    group = state.optimizer.param_groups[0]
    return {"lr": float(group["lr"])} if "lr" in group else {}
