"""What the warm process imports before it forks."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankwise.agent import fork_server

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
