"""`rankwise selftest`: runs the script with rankwise's launcher on 1, 2 and 4 ranks, and tests its Trainer or watches its loop.

status = selftest(("train.py", "--lr", "0.1"), ranks=(1, 2, 4), timeout_s=600)
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rankwise.checks.compare import compare
from rankwise.checks.difference import Arrays
from rankwise.checks.finding import Finding, as_text, combined, passed
from rankwise.checks.settings import RankSettings
from rankwise.errors import ConfigError, SelftestError
from rankwise.host import machine
from rankwise.host.stack_text import shortened
from rankwise.host.text import count, listed
from rankwise.launch.outcome import say
from rankwise.launch.script_lint import examine
from rankwise.run import directory

_GRACE_S = 3
_CUTS = (4, 16, 64)  # batches per epoch: a loop that accumulates over more batches takes no step in fewer
_SHOWN = 12  # lines of the script's output to print


def selftest(argv: Sequence[str], ranks: Sequence[int], timeout_s: float, env: Mapping[str, str]) -> int:
    """Print the findings. Returns 0 if none is a mistake, otherwise 1. Leaves nothing on the disk.

    Raises ConfigError for a script that cannot be run, SelftestError for one that cannot be watched.
    """
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"--timeout {timeout_s:g}: give a number of seconds above 0")
    examine(argv[0])
    devices = machine.gpus(env)
    given = dict(env) if devices >= max(ranks) else {**env, "CUDA_VISIBLE_DEVICES": ""}
    where = "" if devices >= max(ranks) else f", on the CPU ({count(devices, 'GPU')} here)" if devices else ", on the CPU"
    say(f"selftest of {argv[0]} on {listed(sorted(ranks), last=' and ')} rank{'s' * (max(ranks) > 1)}{where}")
    folder = Path(tempfile.mkdtemp(prefix="rankwise-selftest-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs the cleanup below
    try:
        starts: dict[int, list[dict[str, Any]]] = {}
        batches: list[int] = []
        for n in sorted(ranks, reverse=True):  # the most ranks first: they have the smallest batch per rank
            starts[n] = _started(argv, n, batches, folder, timeout_s, given)
            batches = batches or [loader["whole"] for loader in starts[n][0].get("loaders", [])]
        findings = _findings(starts, folder)
        print(as_text(findings), flush=True)
        _say_what_is_not_covered(starts)
        return 0 if passed(findings) else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ranks_of(text: str) -> tuple[int, ...]:
    """The numbers of `1,2,4`. Raises ConfigError."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--ranks {text}: give numbers of ranks, for example --ranks 1,2,4")
    return tuple(sorted({int(word) for word in words}))


def _started(
    argv: Sequence[str], ranks: int, batches: Sequence[int], folder: Path, timeout_s: float, env: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The record of each rank, from a start in which a rank took a step."""
    records: list[dict[str, Any]] = []
    for cut in _CUTS:
        records = _start(argv, RankSettings(str(folder), ranks, cut, tuple(batches)), timeout_s, env)
        if any("findings" in record or record["taken"] for record in records):
            return records
        if max(record["forwards"] for record in records) < cut:
            break
    seen = f"{records[0]['forwards']} forward passes in training on rank 0 of {ranks}"
    raise SelftestError(f"{argv[0]} took no step of a torch optimizer ({seen}), so there is nothing to test")


def _start(argv: Sequence[str], settings: RankSettings, timeout_s: float, env: Mapping[str, str]) -> list[dict[str, Any]]:
    """One start of the script; the record of each rank."""
    folder, ranks = Path(settings.folder), settings.ranks
    path = folder / f"ranks-{ranks}.json"
    directory.write_json(path, asdict(settings))
    for stale in folder.glob(f"ranks-{ranks}-rank-*"):
        stale.unlink()
    shutil.rmtree(folder / "saved", ignore_errors=True)  # no start must resume from another
    words = ["--nproc", str(ranks), "--run-dir", str(folder / f"run-{ranks}"), "--grace", str(_GRACE_S)]
    # -P: the current folder may contain a secrets.py or platform.py, which our own module must not import.
    words += ["--", sys.executable, "-P", "-m", "rankwise.checks.rank_process", str(path)]
    in_time = _run([*words, *argv], folder / f"out-{ranks}.txt", timeout_s, env)
    late = "" if in_time else f" within {timeout_s:g} s"
    records = [_record(folder / f"ranks-{ranks}-rank-{rank}.json") for rank in range(ranks)]
    missing = [rank for rank, record in enumerate(records) if record is None]
    if missing:
        said = (folder / f"out-{ranks}.txt").read_text(errors="replace")
        raise SelftestError(
            f"{argv[0]} did not finish{late} on {count(ranks, 'rank')} (rank {missing[0]}); its output:\n{_last(said)}"
        )
    found = [record for record in records if record is not None]
    _refuse_failed(argv[0], found)
    return found


def _run(words: Sequence[str], out: Path, timeout_s: float, env: Mapping[str, str]) -> bool:
    """`rankwise run` with these words; its output goes to a file. Returns whether it exited in time. Leaves no process
    running."""
    with open(out, "w") as file:
        command = [sys.executable, "-P", "-m", "rankwise", "run", *words]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
    return True


def _refuse_failed(script: str, records: Sequence[dict[str, Any]]) -> None:
    """Raises SelftestError if the script failed before there was anything to test."""
    for record in records:
        failed = record["ended"] not in ("", "enough")
        if failed and ("findings" in record or not record["forwards"]):
            told = shortened(record["traceback"] or record["ended"]).rstrip()
            raise SelftestError(f"{script} failed on rank {record['rank']} of {len(records)}:\n{told}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the launcher, which stops its ranks."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_S + 10)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def _record(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def _last(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines()[-_SHOWN:])


def _findings(starts: Mapping[int, Sequence[dict[str, Any]]], folder: Path) -> list[Finding]:
    if all("findings" in records[0] for records in starts.values()):
        return combined([Finding(**found) for n in sorted(starts) for found in starts[n][0]["findings"]])

    def gradients(ranks: int, rank: int) -> Arrays:
        path = folder / f"ranks-{ranks}-rank-{rank}.npz"
        if not path.exists():  # there were none
            return {}
        with np.load(path) as file:
            return {name: file[name] for name in file.files}

    return combined(compare({n: starts[n] for n in sorted(starts)}, gradients))


def _say_what_is_not_covered(starts: Mapping[int, Sequence[dict[str, Any]]]) -> None:
    """Print what was not tested: your own loop does not show how it resumes or evaluates."""
    watched = [record for records in starts.values() for record in records if "findings" not in record]
    if not watched:
        return
    say("not tested in your own loop: a resumed step, evaluation")
    broken = next((record for record in watched if record["ended"] not in ("", "enough")), None)
    if broken is not None:
        say(f"rank {broken['rank']} stopped early: {broken['ended'].splitlines()[0]}")
