"""What the warm process imports before it forks, and a rank without an agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
