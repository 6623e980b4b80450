"""Parts to save, of which every element has the step as its value; and a disk that is soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.checkpoint import Checkpoints


class Box:
    """Anything Stateful."""

    def __init__(self, state: Any = None) -> None:
        self.state: Any = {"value": state}

    def state_dict(self) -> dict[str, Any]:
        return self.state  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def of_step(step: int, numbers: int = 200) -> dict[str, Box]:
    """Two parts in which every element has the value `step`."""
    return {"model": Box(torch.full((numbers,), float(step))), "loader": Box({"step": step, "list": [torch.tensor([step])]})}


def step_in(parts: dict[str, Box]) -> int:
    """The step of these parts, which must be the same in all."""
    values = {float(v) for v in parts["model"].state["value"]}
    values |= {parts["loader"].state["value"]["step"], float(parts["loader"].state["value"]["list"][0])}
    assert len(values) == 1, "parts of different steps"
    return int(values.pop())


def loaded(folder: Path) -> int | None:
    """The step that load_latest finds, and that all parts have; None if there is none."""
    parts = of_step(-1)
    manifest = Checkpoints(folder, background=False).load_latest(parts)
    if manifest is None:
        assert step_in(parts) == -1
        return None
    assert step_in(parts) == manifest.step
    return manifest.step


@pytest.fixture(params=[False, True], ids=["blocking", "background"])
def background(request: pytest.FixtureRequest) -> bool:
    """Saves that the loop waits for, and saves in the background."""
    return bool(request.param)


def save(checkpoints: Checkpoints, step: int, **parts: Any) -> Path:
    """Save `of_step(step)`, and wait until it is on disk."""
    path = checkpoints.save({**of_step(step), **parts}, step)
    checkpoints.wait()
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"a small disk needs the right to mount: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)
