"""Who has started a run: a person who typed a command, or Python code that called `run_function`.

caller = caller_of(program.argv);  caller.name_of(program.argv);  caller.how_to_continue("rankwise run train.py")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankwise.run.config import WORKER


@dataclass(frozen=True)
class Caller:
    """How to name what was started, what to tell the caller to do next, and whether the caller reads what is printed."""

    again: str
    """The word for what starts the run again: the same "command", the same "call"."""

    name_option: str
    """How the caller gives the run another name."""

    fresh_option: str
    """The option that renames an older run."""

    reads: bool
    """Whether somebody reads what is printed. Code gets an exception, or the run, instead."""

    def name_of(self, argv: Sequence[str]) -> str:
        """The name that a person uses for the script, module, command or function."""
        return self.identity(argv)[-1]

    def identity(self, argv: Sequence[str]) -> tuple[str, ...]:
        """The first words of `argv`, which show what is run; the others are its arguments."""
        return tuple(argv[:2] if argv[0] == "-m" else argv[:1])

    def how_to_continue(self, command: str) -> str:
        """What to print after "to resume,". `command`: what a person would type."""
        return f"type: {command}"


class _Code(Caller):
    def identity(self, argv: Sequence[str]) -> tuple[str, ...]:
        return tuple(argv[:3])

    def how_to_continue(self, command: str) -> str:
        return "call it again"


PERSON = Caller("command", "--name NAME", "--fresh", reads=True)
CODE = _Code("call", 'name="NAME"', "fresh=True", reads=False)


def caller_of(argv: Sequence[str]) -> Caller:
    """`argv`: a script, or `-m` and a module, or a command; then its arguments."""
    return CODE if tuple(argv[:2]) == ("-m", WORKER) else PERSON
