"""Writes the fixtures beside it: what rankwise leaves on disk. Run at 29eeb0e, with torch 2.13.0 on the CPU:

    .venv/bin/python tests/frozen/make.py           all of them, from scratch
    .venv/bin/python tests/frozen/make.py words     only reports.json: what the command prints about the existing fixtures

Older versions have written them, so they must not change. The same is true of records.json (what `--json` prints) and
weights.json (the final weights of the trainings). If you change texts on purpose, write reports.json again and read its diff.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from frozen import fixtures, train
from frozen.fixtures import CHECKPOINTS, COMMANDS, EXPLAINED, HERE, OF_CHECKPOINTS, OF_RUNS, PLANS, RUNS
from ranks import on_ranks, torchrun


def run(name: str, status: int, **environ: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rankwise", *COMMANDS[name]], env={**os.environ, **environ}, capture_output=True, text=True
    )
    assert done.returncode == status, done.stdout + done.stderr


def runs(folder: Path) -> None:
    run("done", 0)
    run("stopped", 75, FROZEN_STOP_AT=str(train.STOP_AT))
    run("failed", 1, FROZEN_FAIL_AT=str(train.STOP_AT))
    run("queued", 0)
    for name in PLANS:
        run(name, 0, **({"XDG_CONFIG_HOME": str(fixtures.site_file(folder / "config"))} if name == "site" else {}))
    step = fixtures.manifest_of(folder / "runs" / "stopped")["step"]
    assert 5 < step < 15, f"stopped after step {step}: run it again"  # the ranks agree on a step a few steps later
    for name in RUNS:
        fixtures.brought(folder / "runs" / name, folder, f"runs/{name}")
    for name in PLANS:
        fixtures.brought(folder / "runs" / name, folder, f"plans/{name}")


def checkpoints(folder: Path) -> None:
    weights: dict[str, Any] = {"torch": torch.__version__, "machine": machine()}
    for kind, ranks in train.RANKS.items():
        nodes = {"environ": [torchrun(rank, ranks, 1) for rank in range(ranks)]} if kind == "node" else {}
        call = (ranks, train.fit, kind)
        ends = on_ranks(*call, folder / "unbroken" / kind, own_disk=kind == "node", **nodes)
        weights[kind] = ends if kind == "node" else ends[:1]
        assert kind == "node" or ends == ends[:1] * ranks
        made, fixture = folder / "made" / kind, f"checkpoints/{kind}"
        if kind == "sharded":  # the stopped run has them
            (HERE / "checkpoints").mkdir(exist_ok=True)
            (HERE / fixture).unlink(missing_ok=True)
            (HERE / fixture).symlink_to(Path("..", "runs", "stopped"))
            continue
        on_ranks(*call, made, stop_at=train.STOP_AT if ranks == 1 else 2, own_disk=kind == "node", **nodes)
        if kind == "node":  # each disk has the same
            one, other = (sorted((made / disk / "checkpoints").rglob("*")) for disk in "01")
            assert [p.read_bytes() for p in one if p.is_file()] == [p.read_bytes() for p in other if p.is_file()]
            made = made / "0"
        fixtures.brought(made, folder, fixture)
    (HERE / "weights.json").write_text(json.dumps(weights) + "\n")


def machine() -> str:
    """Results are equal, bit for bit, on machines for which this is equal."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def answers(folder: Path, words_alone: bool) -> None:
    """What the command prints about the fixtures. A key of records.json is a fixture, or a verb that needs none."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    reports: dict[str, Any] = {}
    records: dict[str, Any] = {}
    for name in RUNS:
        run = fixtures.copied(folder, f"runs/{name}")
        records[f"runs/{name}"] = fixtures.answered("status", "--json", name)
        reports[f"runs/{name}"] = {" ".join(verb): fixtures.typed(*verb, name) for verb in OF_RUNS}
        if name == "queued":
            reports[f"runs/{name}"]["logs"] = fixtures.typed("logs", name)
            reports[f"runs/{name}"]["run"] = fixtures.typed(*COMMANDS[name])
        shutil.rmtree(run)
    for name in CHECKPOINTS:
        run = fixtures.copied(folder, f"checkpoints/{name}", f"runs/{name}")
        records[f"checkpoints/{name}"] = fixtures.shown(run)
        reports[f"checkpoints/{name}"] = {" ".join(verb): fixtures.typed(*verb, name) for verb in OF_CHECKPOINTS}
        shutil.rmtree(run)
    reports["site.toml"] = {}
    for line in ("nprocs = 2", 'name = "mine"', 'grace = "long"'):
        os.environ["XDG_CONFIG_HOME"] = str(fixtures.site_file(folder / "config", line))
        reports["site.toml"][line] = fixtures.typed(*COMMANDS["site"])
    os.environ.update(EXPLAINED)
    records["explain"] = fixtures.explained()
    (HERE / "reports.json").write_text(json.dumps(reports, indent=1) + "\n")
    if not words_alone:
        (HERE / "records.json").write_text(json.dumps(records, indent=1) + "\n")


def main(words: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="frozen-") as name:
        folder = Path(name)
        os.chdir(folder)
        os.environ.update(
            XDG_CONFIG_HOME=f"{name}/none", OMP_NUM_THREADS="1", COLUMNS="100",
            PATH=f"{fixtures.stand_ins(folder / 'bin')}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        )  # fmt: skip
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        fixtures.scripts(folder)
        if words != ["words"]:
            runs(folder)
            checkpoints(folder)
        answers(folder, words_alone=words == ["words"])


if __name__ == "__main__":
    main(sys.argv[1:])
