"""What follows from the name of a metric: whether a larger value is better, and whether an evaluation measures it.

is_larger_better("keep_best='eval_accuracy'", "eval_accuracy", True);  check_measured("keep_best", "eval_loss", {"eval": True})
"""

from __future__ import annotations

from collections.abc import Mapping

from rankwise.errors import ConfigError
from rankwise.host.text import listed


def is_larger_better(what: str, metric: str, given: bool | None, cure: str = "Give larger_is_better=True or False") -> bool:
    """`given`, unless it is None; False for a loss. Otherwise raises ConfigError, because a wrong guess would keep the
    worst."""
    if given is None and not metric.endswith("loss"):
        raise ConfigError(f"{what}: is a larger value better? {cure}")
    return bool(given)


def check_measured(what: str, metric: str, evaluations: Mapping[str, bool]) -> None:
    """Raises ConfigError for a metric that no evaluation measures. `evaluations`: {name: whether a function of the user names
    its metrics}."""
    if metric == "loss":
        return
    if not evaluations:
        raise ConfigError(f"{what}={metric!r} needs an evaluation: give evaluate=...; or use 'loss', the training loss")
    prefix = next((name for name in evaluations if metric.startswith(f"{name}_")), None)
    if prefix is None:
        named = listed([f"{name}_..." for name in evaluations])
        raise ConfigError(f"{what}={metric!r}: nothing measures this metric; those of the evaluations are called {named}")
    if not evaluations[prefix] and metric != f"{prefix}_loss":
        raise ConfigError(f"{what}={metric!r}: Evaluate without a function measures only {prefix}_loss")
