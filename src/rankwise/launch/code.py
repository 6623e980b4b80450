"""code.txt, the code of a run: the commit, the differences from it, and the versions of packages."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

_DIFF_BYTES = 1_000_000


def describe(folder: Path) -> str:
    """The text for the script's folder. Never fails: without git, the text says so."""
    commit = _git(folder, "rev-parse", "HEAD").strip()
    lines = [f"python {sys.version.split()[0]} ({sys.executable})"]
    lines.append(f"commit {commit}" if commit else "commit none (not in a git repository)")
    packages = sorted({f"{d.metadata['Name']}=={d.version}" for d in metadata.distributions() if d.metadata["Name"]})
    lines += ["", "# packages", *packages]
    if commit:
        diff = _git(folder, "diff", "HEAD")
        lines += ["", "# git diff HEAD", diff[:_DIFF_BYTES]]
        if len(diff) > _DIFF_BYTES:
            lines.append(f"# ... cut: the diff has {len(diff)} characters")
    return "\n".join(lines) + "\n"


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
