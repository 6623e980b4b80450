"""Rows of text in columns.

print(table([["step", "loss"], ["10", "2.31"]]))
"""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; numbers to the right, words to the left."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(_is_figure(cell) for cell in column[1:]) for column in columns]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_figure(cell: str) -> bool:
    return not cell or cell in ("nan", "inf", "-inf") or (cell[0] in "0123456789-+." and not cell[-1:].isalpha())
