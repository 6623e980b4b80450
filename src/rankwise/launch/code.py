"""code.txt, the code of a run: the commit, the differences from it, and the versions of packages."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

_DIFF_BYTES = 1_000_000

_NAME, _VERSION = (re.compile(rf"^{field}:[ \t]*(\S+)", re.MULTILINE | re.IGNORECASE) for field in ("Name", "Version"))


def describe(folder: Path) -> str:
    """The text for the script's folder. Never fails: without git, the text says so."""
    commit = _git(folder, "rev-parse", "HEAD").strip()
    lines = [f"python {sys.version.split()[0]} ({sys.executable})"]
    lines.append(f"commit {commit}" if commit else "commit none (not in a git repository)")
    lines += ["", "# packages", *_packages()]
    if commit:
        diff = _git(folder, "diff", "HEAD")
        lines += ["", "# git diff HEAD", diff[:_DIFF_BYTES]]
        if len(diff) > _DIFF_BYTES:
            lines.append(f"# ... cut: the diff has {len(diff)} characters")
    return "\n".join(lines) + "\n"


def _packages() -> list[str]:
    """name==version. Only two fields of the headers are read: importlib.metadata parses each file as an e-mail, again for each
    field, which takes 100 ms of CPU where 200 packages are installed."""
    found = set()
    for distribution in metadata.distributions():
        try:  # a wheel's, a folder's of setuptools, a file's of distutils
            text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or distribution.read_text("")
        except UnicodeDecodeError:
            continue
        headers = (text or "").partition("\n\n")[0]
        name, version = _NAME.search(headers), _VERSION.search(headers)
        if name is not None and version is not None:
            found.add(f"{name[1]}=={version[1]}")
    return sorted(found)


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
