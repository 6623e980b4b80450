"""What to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankwise.errors import ConfigError
from rankwise.launch import script
from rankwise.run.config import RunConfig


def test_a_script_that_needs_torch_is_told_what_to_type_where_this_python_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.py").write_text("import torch\n")
    assert script.find(RunConfig(argv=("train.py", "--lr", "1"))).no_torch is None
    monkeypatch.setattr(script, "_has_torch", lambda: False)
    found = script.find(RunConfig(argv=("train.py", "--lr", "1"))).no_torch
    assert found is not None
    assert found.startswith("train.py, line 1: it imports torch, but ")
    assert found.endswith("rankwise run -- /path/to/python train.py --lr 1")
    Path("python3").write_text("#!/bin/sh\n")  # not the one that an activated environment has on the PATH
    Path("python3").chmod(0o755)
    assert script.find(RunConfig(argv=("./python3", "train.py"), command=True)).no_torch is None


def test_a_command_in_the_current_folder_is_told_with_its_path() -> None:
    Path("job.sh").write_text("#!/bin/sh\n")
    for mode, cure in ((0o644, ""), (0o755, "; for the file in this folder, type: .* run -- ./job.sh 1")):
        Path("job.sh").chmod(mode)
        with pytest.raises(ConfigError, match=rf"^there is no command job.sh \(it is not on the PATH, or .*\){cure}$"):
            script.find(RunConfig(argv=("job.sh", "1"), command=True))
