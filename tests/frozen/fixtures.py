"""The fixtures that make.py writes and test_frozen.py reads: where they are, how to copy one, what the command prints about it.

    folder = copied(tmp_path, "runs/done");  status, lines = typed("status", "done")

In text files, @FOLDER@ and @PYTHON@ replace the folder and the interpreter of the machine that wrote them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

from ranks import scripts_on_ranks

HERE = Path(__file__).parent
RUNS = ("done", "stopped", "failed", "queued")
CHECKPOINTS = ("alone", "sharded", "node", "fp16", "stream", "tokens")
PLANS = ("local", "ssh", "site")
ROOT = HERE.parents[1]

COMMANDS = {
    "done": ("run", "--nproc", "1", "--name", "done", "train.py", "alone"),
    "stopped": ("run", "--nproc", "2", "--name", "stopped", "train.py", "sharded"),
    "failed": ("run", "--nproc", "2", "--name", "failed", "train.py", "sharded"),
    "queued": ("run", "--on", "slurm", "--nodes", "2", "--nproc", "1", "--partition", "gpu", "--time", "30",
               "--start-method", "spawn", "--name", "queued", "hello.py"),
    "local": ("run", "--nproc", "2", "--start-method", "spawn", "--name", "local", "--dry-run", "hello.py"),
    "ssh": ("run", "-H", "a:1,b:1", "--start-method", "spawn", "--name", "ssh", "--dry-run", "hello.py"),
    "site": ("run", "--on", "slurm", "--config", "run.toml", "--name", "site", "--dry-run", "hello.py"),
}  # fmt: skip
"""The command of each run; that of `site` has site.toml as the user's rankwise.toml."""

OF_RUNS = (("status",), ("report",), ("cancel",))
OF_CHECKPOINTS = (("checkpoint", "verify"), ("checkpoint", "ls", "--verify"))
"""Commands about a fixture, which answer in sentences."""

EXPLAINED = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}  # fmt: skip
"""The environment for `rankwise explain`."""

_SLURM = {
    "sbatch": "echo 12",
    "scancel": "true",
    "scontrol": 'echo "JobId=12 JobState=PENDING Reason=Resources Dependency=(null) ExitCode=0:0"',
    "srun": """
while [ "$1" != "${1#--}" ]; do shift; done
export SLURM_JOB_ID=12 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_NNODES=2 SLURM_LOCALID=0
for task in 0 1; do SLURM_PROCID=$task SLURM_NODEID=$task "$@" & done
wait %1 && wait %2
""",
}
_SSH = {"ssh": 'while [ "$1" != -- ]; do shift; done\nexec sh -c "$3"'}


def stand_ins(folder: Path) -> Path:
    """A folder for the start of PATH: a Slurm and an ssh that stay on this machine."""
    folder.mkdir(exist_ok=True)
    for name, source in {**_SLURM, **_SSH}.items():
        (folder / name).write_text(f"#!/bin/bash\n{source}\n")
        (folder / name).chmod(0o755)
    return folder


def scripts(folder: Path) -> None:
    """Write the scripts of the runs, in the folder where they run."""
    for name in ("train.py", "hello.py", "run.toml"):
        shutil.copy(HERE / name, folder)


def site_file(folder: Path, more: str = "") -> Path:
    """Write the site file, with further lines, as the user's configuration below XDG_CONFIG_HOME."""
    folder.mkdir(exist_ok=True)
    (folder / "rankwise.toml").write_text((HERE / "site.toml").read_text() + more)
    return folder


def copied(folder: Path, name: str, to: str | None = None) -> Path:
    """Copy the fixture `runs/done` to this folder, as if it had been written there."""
    target = folder / (to or name)
    shutil.copytree(HERE / name, target)
    for path in _texts(target):
        python = shlex.quote(sys.executable) if path.suffix == ".sh" else sys.executable
        path.write_text(path.read_text().replace("@FOLDER@", str(folder)).replace("@PYTHON@", python))
    return target


def brought(source: Path, folder: Path, name: str) -> None:
    """Turn a run of `folder` into the fixture `name`: without files that nobody needs, and without what belongs to this
    machine."""
    target = HERE / name
    shutil.rmtree(target, ignore_errors=True)
    ignored = shutil.ignore_patterns("telemetry", "code.txt", ".*")  # metrics that metrics.jsonl has too; packages
    shutil.copytree(source, target, ignore=ignored)
    for path in _texts(target):
        text = path.read_text().replace(str(folder), "@FOLDER@").replace(sys.executable, "@PYTHON@")
        text = text.replace(str(ROOT), "/home/me/rankwise").replace(socket.gethostname(), "workstation")
        path.write_text(text)
    for path in sorted(target.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()  # git stores no empty folder


def _texts(folder: Path) -> list[Path]:
    """The text files of a run, without its checkpoints, which have checksums."""
    found = [path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".sh", ".log")]
    return [path for path in found if "checkpoints" not in path.relative_to(folder).parts]


def typed(*words: str) -> tuple[int, list[str]]:
    """(exit status, lines) of `rankwise words`, in a forked process: both streams, without what depends on place and time."""
    [done] = scripts_on_ranks(1, "-m", "rankwise", *words)
    return done.returncode, [masked(line) for line in done.stdout.splitlines()]


def masked(line: str) -> str:
    line = line.replace(os.getcwd(), "@FOLDER@").replace(shlex.quote(sys.executable), "@PYTHON@")
    line = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?", "@TIME@", line)
    return re.sub(r"written .* ago", "written @AGE@ ago", line).rstrip()


def answered(*words: str) -> dict[str, Any]:
    """The JSON that the command prints, without place and time."""
    status, lines = typed(*words)
    assert status == 0, lines
    record: dict[str, Any] = json.loads("\n".join(lines))
    return {name: "@TIME@" if name in ("written", "saved") and value is not None else value for name, value in record.items()}


def manifest_of(run: Path) -> dict[str, Any]:
    """The manifest of its only checkpoint."""
    [path] = (run / "checkpoints").glob("*/manifest.json")
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def shown(run: Path) -> dict[str, Any]:
    """What `checkpoint show --json` prints in addition to the manifest, unchanged."""
    manifest = manifest_of(run)
    found = answered("checkpoint", "show", "--json", run.name)
    return {name: value for name, value in found.items() if manifest.get(name) != value} | {
        "without": sorted(manifest.keys() - found.keys())
    }


def explained() -> dict[str, Any]:
    """What `explain --json` prints; only the keys of the schedulers that were not used."""
    found = answered("explain", "--json")
    return {**found, "not_taken": keys(found["not_taken"])}


def keys(record: Any, path: str = "") -> list[str]:
    """The names in a JSON value, each with its path: lives[].host."""
    found = set()
    if isinstance(record, dict):
        for name, value in record.items():
            found |= {f"{path}{name}", *keys(value, f"{path}{name}.")}
    if isinstance(record, list):
        for value in record:
            found |= set(keys(value, f"{path.removesuffix('.')}[]."))
    return sorted(found)


def keys_of_files(run: Path) -> dict[str, list[str]]:
    """The names in each JSON file of a run. For metrics.jsonl, those of all its lines, without what a later version measures
    (sync/...). For config.json, those with a value, because a later version may have more settings."""
    found = {path.name: keys(json.loads(path.read_text())) for path in sorted(run.glob("*.json"))}
    if (config := run / "config.json").exists():
        found[config.name] = [name for name, value in json.loads(config.read_text()).items() if value not in (None, False, [])]
        found[config.name].sort()
    if (metrics := run / "metrics.jsonl").exists():
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        found[metrics.name] = keys([{k: v for k, v in line.items() if not k.startswith("sync/")} for line in lines])
    return found
