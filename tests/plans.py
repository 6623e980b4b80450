"""For tests of the code that starts agents: plans, plain ones and ones in which every word is hostile, and a fake mpirun."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankwise.run.plan import Host, Plan

GOLDEN = Path(__file__).parent / "schedulers" / "golden"
HOSTILE = 'a b/$(touch x);it\'s "here"'


def plan(folder: str = "/home/me", run: str = "runs/train", **changes: Any) -> Plan:
    """A plan for two nodes in this folder; `changes` by the names of Plan."""
    values: dict[str, Any] = {
        "version": 2,
        "run_id": "x",
        "run_dir": f"{folder}/{run}",
        "argv": ("train.py",),
        "interpreter": (sys.executable,),
        "environment": {},
        "cwd": folder,
        "name": "train",
        "on": "local",
        "nodes": 2,
        "min_nodes": 2,
        "hosts": (),
        "node_rank": -1,
        "nproc": 2,
        "threads": 1,
        "job": {},
        "fork": True,
        "master_addr": "",
        "master_port": 0,
        "join_timeout_s": 300.0,
        "node_wait_s": 30.0,
        "max_restarts": 0,
        "stop_after_s": 0.0,
        "grace_s": 120.0,
        "stall_warn_s": 120.0,
        "check_collectives": False,
        "tee": "main",
        "launcher_pid": 0,
    }
    return Plan(**{**values, **changes})


def hostile(**changes: Any) -> Plan:
    return plan(f"/home/{HOSTILE}", "runs/`touch y` & *", **{"name": "3;$(touch x)\\ 'é\"", **changes})


def golden(name: str) -> str:
    """The text that a scheduler must render."""
    return (GOLDEN / name).read_text().replace("@PYTHON@", shlex.quote(sys.executable))


TWO_HOSTS = (Host("node1", 2), Host("node2", 0))


@pytest.fixture
def mpirun(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a text by its first line, and returns the words that mpirun got. Its stdin must be at its end."""
    command = tmp_path / "bin" / "mpirun"
    command.parent.mkdir()
    python = shlex.quote(sys.executable)  # a line that starts with #! does not allow every path
    source = "import json, sys; print(json.dumps([sys.argv[1:], sys.stdin.read()]))"
    command.write_text(f'#!/bin/sh\nexec {python} -c {shlex.quote(source)} "$@"\n')
    command.chmod(0o755)

    def run(text: str, **environ: str) -> list[str]:
        env = {"PATH": f"{command.parent}:/usr/bin:/bin", **environ}
        read, write = os.pipe()  # not at its end while this process holds the other side
        try:
            done = subprocess.run(["/bin/sh", "-c", text], env=env, stdin=read, capture_output=True, text=True, timeout=30)
        finally:
            os.close(read)
            os.close(write)
        words, stdin = json.loads(done.stdout)
        assert stdin == ""
        return list(words)

    return run
