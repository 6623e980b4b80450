"""How numbers, times and paths are printed, the same in every message.

print(f"{count(2, 'rank')} wrote {size(n)} in {clock(seconds)}")
"""

from __future__ import annotations

import re
import time
from pathlib import Path


def count(n: int, what: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def size(n: int) -> str:
    """`36 B`, `2.6 MB`: bytes with a unit, three digits."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= factor:
            return f"{n / factor:.3g} {unit}"
    return f"{n} B"


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def seconds_of(text: str) -> float | None:
    """Of `90s`, `30m`, `12h`, `7d`, `2w`; None for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    return float(found[1]) * _UNITS[found[2]] if found is not None else None


def stamp(seconds: float) -> str:
    """A time since the epoch, as this machine's clock and date."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def clock(seconds: float) -> str:
    """`4.2 s`, from a minute up `h:mm:ss`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def short(path: Path) -> str:
    """Relative to here where that is possible: shorter to read."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
