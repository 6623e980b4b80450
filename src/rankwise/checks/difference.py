"""The difference between two sets of gradients, parameter by parameter.

apart = difference({"weight": a}, {"weight": b});  apart.size, apart.parameter
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[np.float64]]

TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""The largest relative difference from rounding, by the type of the parameters."""

_FLOOR = 1e-3  # of the largest gradient: a parameter with a true gradient of zero has only rounding errors


class Difference(NamedTuple):
    size: float
    """The largest max |a - b| / max |a| of all parameters; infinite if a gradient is missing or not finite."""

    parameter: str

    def __str__(self) -> str:
        return f"{self.size:.1e} ({self.parameter})" if self.parameter else f"{self.size:.1e}"


def difference(these: Arrays, those: Arrays) -> Difference:
    """The difference between `these` and `those`, relative to `these`."""
    largest = max((float(np.abs(a).max(initial=0)) for a in these.values()), default=0.0)
    worst = Difference(0.0, "")
    for name in {**these, **those}:
        a, b = these.get(name), those.get(name)
        if a is None or b is None or a.shape != b.shape:
            return Difference(float("inf"), name)
        scale = max(float(np.abs(a).max(initial=0)), _FLOOR * largest)
        apart = float(np.abs(a - b).max(initial=0))
        size = apart / scale if scale else apart
        if not size <= worst.size:
            worst = Difference(size if np.isfinite(size) else float("inf"), name)
    return worst


def factor(these: Arrays, those: Arrays) -> float | None:
    """c, if `those` are c times `these` for all parameters, within 1e-3; None if there is no such number."""
    dot = sum(float((a * those[name]).sum()) for name, a in these.items() if name in those and a.shape == those[name].shape)
    square = sum(float((a * a).sum()) for a in these.values())
    if not square or not np.isfinite(dot / square) or dot == 0:
        return None
    c = dot / square
    scaled: dict[str, Any] = {name: a * c for name, a in these.items()}
    return c if difference(scaled, those).size < 1e-3 else None
