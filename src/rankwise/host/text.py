"""How messages print numbers, times, paths and lists.

count(2, "rank")                       # 2 ranks
listed(["a", "b", "c"], most=2)        # a, b and 1 more
numbered("rank", [1, 4, 5, 6])         # ranks 1, 4, 5, 6
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path


def count(n: int, what: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def listed(
    items: Iterable[object],
    most: int | None = None,
    joint: str = ", ",
    last: str | None = None,
    rest: str = " and {} more",
) -> str:
    """`a, b, c`; with `most=2` `a, b and 1 more`; with `last=" and "` `a, b and c`. Empty for no item.

    `joint` stands between items, `last` before the last one if all are shown. `rest` follows the first `most` items if there
    are more; `{}` in it is how many.
    """
    words = [str(item) for item in items]
    left = len(words) - most if most is not None else 0
    if left > 0:
        return joint.join(words[:most]) + rest.format(left)
    if last is None or len(words) < 2:
        return joint.join(words)
    return joint.join(words[:-1]) + last + words[-1]


def numbered(what: str, numbers: Iterable[int], most: int | None = None, ranges: bool = False) -> str:
    """`rank 3`, `ranks 1, 2, 3`. `most`: as for `listed`. `ranges`: sorted, neighbours together: `ranks 1, 4-7, 9`."""
    found = list(numbers)
    shown = listed(_ranges(found) if ranges else found, most)
    return f"{what} {shown}" if len(found) == 1 else f"{what}s {shown}"


def _ranges(numbers: Iterable[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs]


def size(n: int) -> str:
    """`36 B`, `2.6 MB`: bytes with a unit, three digits."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= factor:
            return f"{rounded(n / factor)} {unit}"
    return f"{n} B"


def rounded(value: float, digits: int = 3) -> str:
    """`7.61`, `1800`: a number of 0 or more with so many digits, or all of those before the point; large ones are not written
    as 1.8e+03."""
    return f"{value:.{digits}g}" if value < 10**digits - 0.5 else f"{value:.0f}"


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def seconds_of(text: str) -> float | None:
    """The seconds of `90s`, `30m`, `12h`, `7d`, `2w`; None for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    return float(found[1]) * _UNITS[found[2]] if found is not None else None


def stamp(seconds: float) -> str:
    """A time since the epoch, as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def clock(seconds: float) -> str:
    """`4.2 s`; from one minute on, `h:mm:ss`. A negative time, between two clocks or after one was set back, is 0."""
    if seconds < 59.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Colours and movements of a terminal, and other characters that change how the text after them is shown."""


def printable(text: str) -> str:
    """Without what would change a terminal; spaces and ends of lines remain."""
    return _CONTROLS.sub("", text)


def cut(line: str, most: int) -> str:
    """At most `most` characters and `...`: whole sentences, or else whole words, if these are at least half of it."""
    if len(line) <= most:
        return line
    begin = rf".{{{most // 2},{most}}}"
    found = re.match(rf"{begin}(?=[.;] )", line) or re.match(rf"{begin}(?= )", line)
    return f"{found[0]} ..." if found is not None else f"{line[:most]}..."


def rate(steps: int, seconds: float) -> str:
    """`7.61 steps/s`, or `20.3 s/step` if a step takes more than a second."""
    if steps >= seconds:
        return f"{rounded(steps / max(seconds, 1e-9))} steps/s"
    return f"{rounded(seconds / steps)} s/step"


_COMMAND = re.compile(r"(.*(?:[Tt]ype|[Tt]o try|stop it): )(\S.*)", re.DOTALL)
"""A text, and the command at its end that a person may copy."""


def wrapped(text: str, columns: int = 80) -> list[str]:
    """Lines of at most `columns`, broken only between words, the second and later ones indented."""
    return textwrap.wrap(text, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def folded(text: str, columns: int) -> str:
    """A message in lines of at most `columns`, broken between words. A command at its end is a separate line, to be copied.

    Only the first line of `text` is folded: the rest stays unchanged (a line of source, a traceback).
    """
    first, newline, rest = text.partition("\n")
    found = _COMMAND.fullmatch(first)
    if len(first) <= columns and found is None:
        return text
    said, command = (found[1].rstrip(), ["  " + found[2]]) if found is not None and not rest else (first, [])
    kept = re.sub(r"(?<=\d) (?=[a-zA-Z]{1,2}\b)", "\xa0", said)  # a number and its unit
    lines = wrapped(kept, columns)
    return "\n".join([*lines, *command]).replace("\xa0", " ") + newline + rest


def in_lines(figures: str, columns: int = 80) -> str:
    """`loss 2.31, lr 0.1, ...` in lines of at most `columns`, broken only after a comma or semicolon. A rank does not know how
    wide the terminal is in which its log is read."""
    kept = re.sub("(?<![,;]) ", "\xa0", figures)
    lines = wrapped(kept, columns)
    return "\n".join(lines).replace("\xa0", " ")


def short(path: Path) -> str:
    """The path relative to the current folder if possible: shorter to read."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # it lies elsewhere, or the current folder was removed
        return str(path)
