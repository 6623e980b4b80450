"""What the warm process imports before it forks, a rank without an agent, and where a script imports from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import launch

from rankwise.agent import fork_server
from rankwise.host import processes

__all__ = ["launch"]  # a fixture

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
        ("torch.optim.SGD", False),
        ("torch.optim.SGD\noptimizer.step()", True),
        ("torch.optim.SGD\nscaler.step(optimizer)", True),
        ("import sklearn, tqdm, h5py\ntorch.optim.SGD", False),
        ("import torchvision", True),
        ("torch.compile(model)", True),
        ("nn.parallel.DistributedDataParallel(model)", True),
        ("rankwise.Trainer", False),
        ("rankwise.Trainer\ntorch.compile", True),
        ("import re\nre.compile('x')", False),
        ("model.compile()", True),
        ("from torch import nn, compile", True),
        ("import mine", True),
        ("import os, mine", True),
        ("import torch, mine.steps as m", True),
        ("    from mine import train", True),
        ("from . import train", False),  # raises in a script
        ("# import mine", False),
        ("os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'\ntorch.optim.SGD", False),
        ("torch.compile\nos.environ |= {'TORCHDYNAMO_DISABLE': '1'}", False),
        ("    os.environ.update(TORCH_COMPILE_DEBUG='1')\nimport mine", False),
        ("os.environ.setdefault('TORCHDYNAMO_VERBOSE', '1')\nimport mine", False),
        ("os.putenv('TORCHDYNAMO_VERBOSE', '1')\nimport mine", False),
        ("if os.environ['TORCHDYNAMO_DISABLE'] == '1': pass\nimport mine", True),
        ("os.environ.get('TORCHDYNAMO_DISABLE')\nimport mine", True),
        ("os.environ['MY_VARIABLE'] = '1'\nimport mine", True),
    ],
)
def test_the_compiler_is_imported_for_a_script_that_may_need_it(more: str, expected: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{PLAIN}{more}\n")
    assert fork_server._may_compile([str(script), "--lr", "0.1"]) is expected


@pytest.mark.parametrize(
    ("module", "files", "expected"),
    [
        ("import torch", ["mine.py"], False),
        ("import torch\ntorch.optim.SGD", ["mine.py"], False),
        ("def step(optimizer):\n    optimizer.step()", ["mine.py"], True),
        ("torch.compile(model)", ["mine/__init__.py", "mine/deep/__init__.py"], True),
        ("import torch", ["mine/__init__.py", "mine/deep/__init__.py", "mine/deep/net.py"], False),
        ("import torch", ["mine/net.py"], True),
        ("import torch", ["mine.py", "mine/data/readme"], False),
        ("import torchvision", ["mine.py"], True),
        ("import mine, other", ["mine.py", "other.py"], False),
        ("import other", ["mine.py"], True),
        ("import torch", ["mine/__init__.py", *(f"mine/part_{k}.py" for k in range(100))], True),
        ("os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'", ["mine.py"], False),
    ],
)
def test_the_modules_beside_a_script_are_read_too(module: str, files: list[str], expected: bool, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(module)
    script = tmp_path / "script.py"
    script.write_text(f"{PLAIN}from mine import step\nrankwise.Trainer\n")
    assert fork_server._may_compile([str(script)]) is expected


@pytest.mark.parametrize(
    ("script", "expected"), [("import torch", False), ("import torch\ntorch.optim.SGD", True), ("Trainer", True)]
)
def test_the_compiler_is_imported_for_optimizers_that_rankwise_does_not_step(
    script: str, expected: bool, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(script)
    assert fork_server._may_compile([str(tmp_path / "script.py")]) is expected


COMPILES = """
import os, torch
os.environ["TORCHDYNAMO_VERBOSE"] = "1"
torch.optim.SGD([torch.zeros(1)], lr=0.1)
import torch._dynamo.config
print(torch._dynamo.config.verbose)
"""


@pytest.mark.stress
def test_a_variable_of_the_compiler_that_a_script_sets_has_its_effect(launch) -> None:
    run = launch(COMPILES, options=("--nproc", "1"))
    assert run.wait() == 0, run.output()
    assert run.run.log(0).read_text() == "True\n"


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


@pytest.mark.parametrize("safe", ["", "1"])
def test_a_script_imports_from_the_folders_that_python_gives_it(safe: str, launch, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    folders = filter(None, [str(tmp_path / "lib"), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONSAFEPATH": safe, "PYTHONPATH": os.pathsep.join(folders)}
    run = launch("import sys\nprint(sys.path)", options=("--nproc", "1"), env=environment)
    assert run.wait() == 0, run.output()
    plain = subprocess.run([sys.executable, str(tmp_path / "script.py")], env=environment, stdout=subprocess.PIPE, text=True)
    assert run.run.log(0).read_text() == plain.stdout
