"""Whether a person types the code: in a notebook, in IPython, or at Python's prompt."""

from __future__ import annotations

import sys


def is_interactive() -> bool:
    """Python and IPython set `sys.ps1` when they begin to ask for code."""
    return hasattr(sys, "ps1")
