"""Scripts written for torchrun with other libraries run unchanged (docs/frameworks.md)."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from pathlib import Path

import pytest
from launched import FORKED

pytestmark = pytest.mark.stress

SCRIPTS = Path(__file__).with_name("frameworks")


@pytest.mark.parametrize("library", ["lightning", "accelerate", "transformers", "speechbrain"])
def test_a_script_of_another_library_trains_20_steps_on_2_ranks(library: str, rankwise, tmp_path: Path) -> None:
    try:
        importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed here; .ci/run installs it")
    script = shutil.copy(SCRIPTS / f"train_{library}.py", tmp_path / "train.py")  # not in a folder with the library's name
    done = rankwise("run", *FORKED, str(script))
    logs = [(tmp_path / "runs" / "train" / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert done.returncode == 0, logs
    for rank, log in enumerate(logs):
        assert re.search(rf"^trained 20 steps as rank {rank} of 2$", log, re.MULTILINE), log
    assert "separate runs" not in done.stderr
    assert "cannot be imported once for all ranks" not in done.stderr
