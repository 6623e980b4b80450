"""What is known of a metric by its name: whether more of it is better, and whether anything will measure it.

is_larger_better("keep_best='eval_accuracy'", "eval_accuracy", True);  check_measured("keep_best", "eval_loss", {"eval": True})
"""

from __future__ import annotations

from collections.abc import Mapping

from rankwise.errors import ConfigError
from rankwise.host.text import listed


def is_larger_better(what: str, metric: str, given: bool | None) -> bool:
    """`given`, if it was; False for a loss. Raises ConfigError for any other: to guess it wrong would keep the worst."""
    if given is None and not metric.endswith("loss"):
        raise ConfigError(f"{what}: is more of it better? Say larger_is_better=True, or False")
    return bool(given)


def check_measured(what: str, metric: str, evaluations: Mapping[str, bool]) -> None:
    """Raises ConfigError for a metric that nothing will measure. `evaluations`: by their names, whether a function of the
    user's names what they measure."""
    if metric == "loss":
        return
    if not evaluations:
        raise ConfigError(f"{what}={metric!r}: nothing is evaluated without evaluate=...; 'loss' is that of training")
    prefix = next((name for name in evaluations if metric.startswith(f"{name}_")), None)
    if prefix is None:
        named = listed([f"{name}_..." for name in evaluations])
        raise ConfigError(f"{what}={metric!r}: nothing measures that; what is evaluated is called {named}")
    if not evaluations[prefix] and metric != f"{prefix}_loss":
        raise ConfigError(f"{what}={metric!r}: without a function Evaluate measures {prefix}_loss alone")
