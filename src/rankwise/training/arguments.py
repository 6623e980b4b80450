"""Checks of what a script gives a training: raised before anything is made.

check_counts(max_steps=10, log_every=50);  check_evaluation(eval_data, eval_fn, eval_metrics, eval_every)
"""

from __future__ import annotations

from typing import Any

from rankwise.errors import ConfigError


def check_length(max_epochs: int | None, max_steps: int | None) -> None:
    if max_epochs is None and max_steps is None:
        raise ConfigError("say how long to train: max_epochs=... or max_steps=...")


def check_counts(**counts: int | None) -> None:
    """Each is a whole number from 1 up, or was not given."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: give a whole number from 1 up")


def check_evaluation(data: Any, fn: Any, metrics: Any, every: int | None) -> None:
    if data is None and (fn is not None or every is not None or metrics is not None):
        raise ConfigError("eval_fn, eval_every and eval_metrics evaluate nothing without eval_data=...")
    if fn is None and metrics is not None:
        raise ConfigError("eval_metrics are updated by a function of yours: eval_fn=lambda model, batch: f1.update(...)")


def check_workers(workers: int) -> None:
    if workers < 0:
        raise ConfigError(f"workers={workers}: give how many processes fetch ahead, 0 for none")
