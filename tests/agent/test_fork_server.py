"""What the warm process imports before it forks, and the exit status of a rank whose output is lost."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankwise.agent import fork_server
from rankwise.host import processes

PLAIN = """\
import os, json as j
import numpy as np

import torch.distributed as dist
from torch import nn  # rankwise, train
if True:
    from rankwise import init
"""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", False),
        ("torch.optim.SGD", True),
        ("torch.compile(model)", True),
        ("nn.parallel.DistributedDataParallel(model)", True),
        ("rankwise.Trainer", True),
        ("import mine", True),
        ("import os, mine", True),
        ("import torch, mine.steps as m", True),
        ("    from mine import train", True),
        ("from . import train", False),  # raises in a script
        ("# import mine", False),
    ],
)
def test_the_compiler_is_imported_for_a_script_that_may_make_an_optimizer(more: str, expected: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{PLAIN}{more}\n")
    assert fork_server._may_compile([str(script), "--lr", "0.1"]) is expected


def test_the_compiler_is_imported_for_a_module_which_is_not_read() -> None:
    assert fork_server._may_compile(["-m", "rankwise.functions.worker"])


def closed_file() -> io.TextIOWrapper:
    file = io.TextIOWrapper(io.BytesIO())
    file.close()
    return file


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize(("stream", "status"), [(io.StringIO(), 0), (closed_file(), 0), (None, 0), (object(), 120)])
def test_output_is_lost_as_python_itself_reports_it_which_passes_over_streams_that_the_script_has_closed(
    name: str, stream: Any, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, name, stream)
    assert fork_server._flush() == status


def test_no_output_is_lost_if_the_script_has_deleted_its_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "stdout")
    assert fork_server._flush() == 0


def test_a_rank_whose_agent_was_killed_before_it_was_ready_exits_whoever_has_inherited_it() -> None:
    """Not only init inherits orphans: also a user's systemd, a container's first process, and our launcher."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert processes.start_time(ended.pid) is None
    reader, writer = os.pipe()
    os.write(writer, json.dumps({"environment": {}, "log": "rank.log"}).encode())
    os.close(writer)
    command = [sys.executable, fork_server.__file__, "once", str(reader), str(ended.pid), "script.py"]
    try:
        assert subprocess.run(command, pass_fds=[reader], timeout=60).returncode == 1
    finally:
        os.close(reader)
    assert not Path("rank.log").exists()
