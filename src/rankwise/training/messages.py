"""What a training prints when it starts, when it is resumed and when it stops. Only texts.

for line in begun(model, "fp32 on cpu", loader.describe(), loader.describe_batch(), sync.describe(), ""): log.say(line)
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from rankwise.host.session import is_interactive
from rankwise.host.text import count, in_lines, short
from rankwise.training.state import TrainState


def begun(model: nn.Module, precision: str, data: str, batch: str, strategy: str, rate: str) -> list[str]:
    """The plan: size of the model, data, batches, strategy. `rate`: how the learning rate was scaled, or empty."""
    parameters = _amount(sum(p.numel() for p in model.parameters()))
    lines = [f"{parameters} parameters, {precision}; {data}", "; ".join(text for text in (batch, strategy) if text)]
    return [in_lines(line) for line in ([*lines, rate] if rate else lines)]


def used_before(why: str) -> str:
    """`why`: why a Trainer would start from scratch that has trained before."""
    return (
        f"{why}, and an earlier fit() has changed the model; create the model, the optimizer and the Trainer again, and call "
        "fit() of that Trainer"
    )


def resumed(state: TrainState, saved: Mapping[str, Any], now: Mapping[str, Any], same_ranks: bool) -> list[str]:
    """`saved`, `now`: the numerics (fingerprint.py) of the checkpoint and of this process."""
    saved = {name: _in_todays_words(value) for name, value in saved.items()}
    lines = [f"resuming from step {state.step} (epoch {state.epoch + 1})"]
    passed_over = () if same_ranks else ("reduction",)  # it depends on the number of ranks, which is printed anyway
    differs = [f"{k} {saved[k]} -> {v}" for k, v in now.items() if k not in passed_over and saved.get(k, v) != v]
    changed = f"results may differ from those of an uninterrupted run, because this has changed: {', '.join(differs)}"
    return [*lines, in_lines(changed)] if differs else lines


def _in_todays_words(value: Any) -> Any:
    """Earlier versions recorded `one all-reduce of 760 B a step`: the reduction has not changed since, only its words."""
    return value.replace(" a step", " per step").replace(" whole)", " uncompressed)") if isinstance(value, str) else value


def stopped(state: TrainState, where: Path, launched: bool) -> list[str]:
    """After a signal. `launched`: whether a launcher prints how to resume."""
    lines = [f"stopped after step {state.step}, saved in {short(where)}"]
    if launched:
        return lines
    if is_interactive():
        return [*lines, "to resume, run the same code again"]
    return [*lines, "to resume, type:", f"  {shlex.join(sys.orig_argv)}"]


def ended(state: TrainState, steps_before: int, elapsed: str, where: Path) -> str:
    """`elapsed`: the time, and where it went; `steps_before`: steps of earlier attempts."""
    figures = ", ".join(f"{name} {value:.4g}" for name, value in state.metrics.items())
    if state.steps_left_out:
        figures += f", {count(state.steps_left_out, 'step')} skipped"
    before = f" ({steps_before} in earlier attempts)" if steps_before else ""
    reason = f" ({state.stop_reason})" if state.stop_reason else ""
    how = f"stopped by the script{reason}" if state.stopped else "done"
    return f"{in_lines(f'{how}: {state.step} steps{before}, {figures}, {elapsed}')}\nsaved in {short(where)}"


def best(name: str, folder: Path | None) -> str:
    return f"best {name}: {short(folder) if folder else 'none was measured'}"


def _amount(n: int) -> str:
    return f"{n / 1e6:.2f} M" if n >= 10_000 else str(n)
