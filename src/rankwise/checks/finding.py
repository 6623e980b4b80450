"""What a check has found, and how it is told.

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
"""As it should be; a mistake; a difference whose reason is known, and no mistake; not to be decided here."""

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
"""Each check by its name: how it is called on the screen, in this order."""

_COLUMNS = 110


@dataclass(frozen=True)
class Finding:
    """One check, on one number of ranks or over several."""

    check: str
    """One of CHECKS."""

    status: str
    evidence: str
    """What was seen; `{}` in it is where."""

    cause: str = ""
    """Why, with the layer where one is to blame; empty if all is well."""

    cure: str = ""
    """What to change."""

    where: str = ""
    """On how many ranks, with the figures there; findings that differ in it alone become one line."""

    def record(self) -> dict[str, Any]:
        return asdict(self)


def combined(findings: Sequence[Finding]) -> list[Finding]:
    """One a check: the worst, with the evidence of all that are alike."""
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
    """Numbers of ranks as `1, 2 and 4 ranks`, all else with commas."""
    if not all(word.isdecimal() for word in words):
        return listed(words)
    return listed(words, last=" and ") + (" rank" if words[-1] == "1" else " ranks")


def passed(findings: Sequence[Finding]) -> bool:
    """Whether nothing is a mistake."""
    return not any(finding.status == FAILED for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """A line or a few for each, and one of them all together."""
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
