"""The finding of a check, and its text.

Finding("gradients", FAILED, "4 ranks: 0.3", cause="BatchNorm 1", cure="use GroupNorm")
print(as_text(findings))
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rankwise.host.text import listed

OK, FAILED, KNOWN, OPEN = "ok", "FAILED", "known", "open"
"""Correct; a mistake; a difference with a known reason, not a mistake; not decided."""

_WORST_FIRST = (FAILED, OPEN, KNOWN, OK)

CHECKS = {
    "weights": "weights at the start",
    "samples": "samples",
    "order": "order of the epochs",
    "gradients": "gradients",
    "random": "random numbers",
    "steps": "steps",
    "resume": "resume",
    "looking": "side effects",
    "evaluation": "evaluation",
}
"""Each check: its name in the code, and its title on the screen, in this order."""

_COLUMNS = 110


@dataclass(frozen=True)
class Finding:
    """One check, on one number of ranks or over several."""

    check: str
    """One of CHECKS."""

    status: str
    evidence: str
    """What was found; `{}` in it stands for `where`."""

    cause: str = ""
    """Why, with the layer if it is known; empty if the check is ok."""

    cure: str = ""
    """What to change."""

    where: str = ""
    """The number of ranks, with the values found there. Findings that differ only in this become one line."""

    def record(self) -> dict[str, Any]:
        return asdict(self)


def combined(findings: Sequence[Finding]) -> list[Finding]:
    """One finding per check: the worst, with the evidence of all equally bad ones."""
    together = []
    for check in CHECKS:
        mine = [finding for finding in findings if finding.check == check]
        if not mine:
            continue
        worst = min(mine, key=lambda finding: _WORST_FIRST.index(finding.status))
        alike = [finding for finding in mine if (finding.status, finding.cause) == (worst.status, worst.cause)]
        places: dict[str, list[str]] = {}
        for finding in alike:
            places.setdefault(finding.evidence, []).append(finding.where)
        evidence = "; ".join(text.replace("{}", _places(where)) for text, where in places.items())
        together.append(Finding(check, worst.status, evidence, worst.cause, worst.cure))
    return together


def _places(words: Sequence[str]) -> str:
    """Numbers of ranks as `1, 2 and 4 ranks`; other words with commas."""
    if not all(word.isdecimal() for word in words):
        return listed(words)
    return listed(words, last=" and ") + (" rank" if words[-1] == "1" else " ranks")


def passed(findings: Sequence[Finding]) -> bool:
    """Whether no finding is a mistake."""
    return not any(finding.status == FAILED for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """One or a few lines for each finding, and a last line with the counts."""
    width = max(len(title) for title in CHECKS.values()) + 2
    lines = []
    for finding in findings:
        head = f"{finding.status:8}{CHECKS[finding.check]:{width}}"
        texts = [finding.evidence, finding.cause and f"why: {finding.cause}", finding.cure and f"fix: {finding.cure}"]
        for text in filter(None, texts):
            lines += textwrap.wrap(
                text, _COLUMNS, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
            )
            head = " " * len(head)
    return "\n".join([*lines, _together(findings)])


def _together(findings: Sequence[Finding]) -> str:
    counts = {status: sum(finding.status == status for finding in findings) for status in _WORST_FIRST}
    words = {FAILED: "FAILED", OPEN: "could not be decided", KNOWN: "known difference" + "s" * (counts[KNOWN] != 1), OK: "ok"}
    return f"{len(findings)} checks: " + ", ".join(f"{counts[s]} {words[s]}" for s in reversed(_WORST_FIRST) if counts[s])
