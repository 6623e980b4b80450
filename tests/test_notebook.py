"""A real kernel of Jupyter: training in a cell, its interrupt, its errors, and functions on several ranks."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.stress

TRAIN = """
import time, torch, rankwise
def train(steps, **settings):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
    model = torch.nn.Linear(3, 1)
    def step(model, batch):
        time.sleep(0.02)
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y, reduction="sum"), len(y)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rankwise.Trainer(model, optimizer, step, data, batch_size=8, max_steps=steps, **settings).fit()
    return rankwise.init().rank
"""


class Notebook:
    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        # As for somebody who has configured nothing, the ranks are forked: all of them train, and torch is imported once.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XDG_CONFIG_HOME": str(folder)}
        self.kernel, self._client = start_new_kernel(kernel_name="python3", cwd=str(folder), env=env)

    def run(self, cell: str, interrupt_at: str = "") -> str:
        """What is shown below the cell. `interrupt_at`: the kernel is interrupted once this is shown."""
        asked = self._client.execute(cell)
        shown, deadline = "", time.monotonic() + 200
        while time.monotonic() < deadline:
            message: Any = self._client.get_iopub_msg(timeout=200)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                return re.sub(r"\x1b\[[0-9;]*m", "", shown)
            shown += content.get("text", "") or "\n".join(content.get("traceback", ()))
            shown += content.get("data", {}).get("text/plain", "")
            if interrupt_at and interrupt_at in shown:
                self.kernel.interrupt_kernel()
                interrupt_at = ""
        raise AssertionError(shown)

    def end(self) -> None:
        self._client.stop_channels()
        self.kernel.shutdown_kernel(now=True)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    opened = Notebook(tmp_path)
    opened.run(TRAIN)
    yield opened
    opened.end()


def test_an_interrupted_cell_saves_and_resumes_also_in_another_kernel(notebook: Notebook, tmp_path: Path) -> None:
    shown = notebook.run("train(10**6)", interrupt_at="epoch 2")
    assert "to resume, run the same code again\nstopped by Ctrl-C" in shown
    stopped = int(re.findall(r"stopped after step (\d+)", shown)[0])
    again = Notebook(tmp_path)
    try:
        again.run(TRAIN)
        shown = again.run(f"train({stopped + 5})")
        assert f"resuming from step {stopped} " in shown
        assert f"done: {stopped + 5} steps" in shown
    finally:
        again.end()
    assert f"already done: {stopped + 5} steps" in notebook.run(f"train({stopped + 5})")


def test_a_wrong_argument_is_shown_without_our_frames(notebook: Notebook) -> None:
    shown = notebook.run("import rankwise\nrankwise.run_function(train, 3)")
    assert shown == "error: run_function(args=3): give a list or tuple: (1, 2)\nat line 2: rankwise.run_function(train, 3)"


def test_a_function_of_a_cell_runs_on_ranks_and_is_interrupted(notebook: Notebook) -> None:
    assert notebook.run("rankwise.run_function(train, (5,), nproc=2)").endswith("[0, 1]")
    shown = notebook.run("rankwise.run_function(train, (10**6,), nproc=2, name='long')", interrupt_at="epoch 2")
    assert "saved in runs/long/checkpoints" in shown
    assert shown.endswith("stopped by Ctrl-C")
    assert "resuming from step" in notebook.run("rankwise.run_function(train, (10**6,), nproc=2, name='long')", "resuming")
