"""A copy of the repository that may be changed and measured, with a virtual environment in which `rankwise` is the copy.

    scratch = Scratch(Path("/tmp/somewhere/rankwise"))      # a folder that does not exist yet
    scratch.pytest("tests/stop/test_signal.py", "-x", timeout_s=60)

Ranks, agents and commands that the tests start also run the code of the copy. All other packages are those of the Python that
creates the copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Scratch:
    """The current files of this checkout that git tracks or does not ignore."""

    def __init__(self, folder: Path) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        )
        self.folder = folder
        for name in map(os.fsdecode, filter(None, listed.stdout.split(b"\0"))):
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
        venv.create(folder / ".venv")
        self.python = folder / ".venv" / "bin" / "python"
        (self.packages,) = (folder / ".venv" / "lib").glob("python*/site-packages")
        shared = [path for path in sys.path if path.endswith("site-packages")]
        (self.packages / "a_rankwise.pth").write_text(f"{folder / 'src'}\n")
        (self.packages / "b_shared.pth").write_text("\n".join(shared) + "\n")
        command = folder / ".venv" / "bin" / "rankwise"
        command.write_text(f"#!{self.python}\nimport sys\nfrom rankwise.cli import main\nsys.exit(main())\n")
        command.chmod(0o755)

    def install(self, module: Path, at_start: bool = False) -> None:
        """Make a module importable in the copy; with `at_start`, each Python of the environment imports it first."""
        shutil.copy(module, self.packages / module.name)
        if at_start:
            (self.packages / f"c_{module.stem}.pth").write_text(f"import {module.stem}\n")

    def pytest(
        self, *words: str | Path, timeout_s: float | None = None, environ: Mapping[str, str] | None = None, quiet: bool = True
    ) -> int:
        """Returns pytest's exit status. Raises TimeoutExpired after killing pytest; the caller ends what else has started.

        In one process (-n0), so that the tests run in the order in which they were chosen.
        """
        for cache in self.folder.joinpath("src").rglob("__pycache__"):
            shutil.rmtree(cache)  # a change of the same length within the same second would not be compiled
        process = subprocess.Popen(
            [self.python, "-m", "pytest", "-n0", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None,
            stderr=subprocess.DEVNULL if quiet else None,
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
