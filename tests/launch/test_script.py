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


@pytest.mark.parametrize("name", ["app.pyz", "app.pyc", "app"])
def test_an_application_that_only_python_can_run_is_a_command_like_any_other(name: str) -> None:
    """Each rank starts it, as under torchrun; a script can be forked, because its text can be read."""
    Path("app").mkdir()
    Path(name).touch() if name != "app" else None
    found = script.find(RunConfig(argv=("python3", name, "--lr", "1"), command=True))
    assert (found.interpreter, found.argv) == ((), ("python3", name, "--lr", "1"))


def test_an_archive_is_answered_with_the_command_that_runs_it() -> None:
    Path("app.pyz").write_bytes(b"PK\0")
    with pytest.raises(ConfigError, match=r"app\.pyz: .*type: rankwise run -- python app\.pyz$"):
        script.find(RunConfig(argv=("app.pyz",)))
    Path("job.sh").write_text("echo one two")
    with pytest.raises(ConfigError, match=r"job\.sh:1: .*type: rankwise run -- \./job\.sh\n"):
        script.find(RunConfig(argv=("job.sh",)))
    Path("app.pyz").chmod(0o755)
    with pytest.raises(ConfigError, match=r"app\.pyz: .*type: rankwise run -- \./app\.pyz$"):
        script.find(RunConfig(argv=("app.pyz",)))
