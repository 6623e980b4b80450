"""Each private name that ranks use, missing in turn: a forked rank runs its script, leaves its error, and a line says why."""

from __future__ import annotations

import ast
import json
import os
import re
import select
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from plans import plan
from ranks import on_ranks

from rankwise.agent import private_names
from rankwise.agent.collective_check import Note, Rings
from rankwise.agent.rank_starter import Spec, Starter
from rankwise.host import processes

SCRIPT = """\
import atexit, os, threading, time
import torch
import torch.distributed as dist

atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(1.5), print("in a thread"))).start()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(2))
for _ in range(2):
    model(torch.ones(2, 2)).sum().backward()
if place := os.environ.get("COUNT_AT"):  # it is taken twice a second, by a thread
    while not any(open(place, "rb").read()[int(os.environ["COUNT_OFFSET"]):][:8]):
        time.sleep(0.01)
else:
    time.sleep(0.6)  # nothing is to happen: as long as it would have taken
if "DESTROYED" in os.environ:
    dist.destroy_process_group()
print("trained", __name__, flush=True)
if "INTERRUPTED" in os.environ:
    raise KeyboardInterrupt
raise ValueError("no data")
"""

# In the warm process, torch and Python still have the name in WITHOUT, but getattr does not find it.
HIDING = """\
import builtins, os
usual = getattr
def find(owner, name, *default):
    return default[0] if default and name == os.environ.get("WITHOUT") else usual(owner, name, *default)
builtins.getattr = find
"""

GO, GROUP, ANSWERS, COUNT, DATA, LAST_WORDS, ROW = 0, 1, 2, 8, 16, 40, 1024
"""Where a spec's values are in the page, and how much of the page a rank has."""

Ended = dict[str, Any]


def spec_of(row: int, folder: Path, environment: dict[str, str], page: Path, notes: dict[str, Any]) -> Spec:
    def place(offset: int) -> tuple[str, int]:
        return str(page), row * ROW + offset

    return {
        "environment": environment, "log": f"{folder}/{row}.log", "exception": f"{folder}/{row}.json",
        "stacks": f"{folder}/{row}.stacks", "stdin": False, "threads": 1, "go_mark": place(GO), "group_mark": place(GROUP),
        "answers_mark": place(ANSWERS), "last_words": (*place(LAST_WORDS), ROW - LAST_WORDS), "count_mark": place(COUNT),
        "data_mark": place(DATA), "notes": notes,
    }  # fmt: skip


def ranks_ended(folder: Path, environments: list[dict[str, str]]) -> list[Ended]:
    """How ranks of one warm process end, each with these extra variables. In a separate process, which is their agent."""
    processes.become_subreaper()
    (folder / "hides").mkdir()
    (folder / "hides" / "sitecustomize.py").write_text(HIDING)
    (folder / "trains.py").write_text(SCRIPT)
    page = folder / "page"
    page.write_bytes((b"\1" + bytes(ROW - 1)) * len(environments))
    rings = Rings(len(environments))
    os.environ["PYTHONPATH"] = str(folder / "hides")
    starter = Starter(plan(argv=("-m", "trains"), cwd=str(folder), fork=True))
    counted = [
        {} if "not counted" in private_names.NAMES.get(more["WITHOUT"], "")
        else {"COUNT_AT": str(page), "COUNT_OFFSET": str(row * ROW + COUNT)}
        for row, more in enumerate(environments)
    ]  # fmt: skip
    specs = [
        spec_of(row, folder, {**os.environ, **more, **counted[row]}, page, rings.place(row))
        for row, more in enumerate(environments)
    ]
    assert answer(starter) == {"ready": True}
    starter.start(specs)
    ended = [status_of(pid) for pid in answer(starter)["pids"]]
    noted = [(row, Note.of(line).what) for row, line in rings.read()]
    starter.close()
    pages = page.read_bytes()
    return [
        {
            "status": status, "log": Path(spec["log"]).read_text(),
            "error": json.loads(Path(spec["exception"]).read_text()) if Path(spec["exception"]).exists() else None,
            "made a group": pages[row * ROW + GROUP], "count": int.from_bytes(pages[row * ROW + COUNT :][:8], "little"),
            "noted": [what for which, what in noted if which == row],
        }
        for row, (spec, status) in enumerate(zip(specs, ended, strict=True))
    ]  # fmt: skip


def answer(starter: Starter) -> dict[str, Any]:
    while (found := starter.receive()) is None:
        select.select([starter.channel], [], [])
    return found


def status_of(pid: int) -> int:
    while True:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except ChildProcessError:  # when the process that has forked the rank exits, this process inherits it
            time.sleep(0.001)


NONE = ""
INTERRUPTED = {"INTERRUPTED": "1"}
STARTS = [
    *({"WITHOUT": name, "RANK": "0"} for name in (NONE, *private_names.NAMES)),
    {"WITHOUT": "_world", "RANK": "1", "DESTROYED": "1"},
    {"WITHOUT": NONE, "RANK": "0", **INTERRUPTED},
    {"WITHOUT": "_shutdown", "RANK": "0", **INTERRUPTED},
]


def said(rank: Ended) -> list[str]:
    return [line for line in rank["log"].splitlines() if line.startswith("rankwise:")]


def check(rank: Ended, usual: Ended, name: str) -> None:
    """`rank` did not have this name, `usual` had all."""
    assert rank["status"] == 1
    assert (rank["error"]["message"], rank["error"]["where"]) == ("no data", "trains.py:21")
    assert rank["error"]["traceback"] == usual["error"]["traceback"]
    assert all(rank["log"].count(f"{word}\n") == 1 for word in ("trained __main__", "in a thread", "at exit"))
    assert rank["made a group"] == 1
    lost_feature = private_names.NAMES.get(name, "")
    assert said(rank) == ([f"rankwise: warning: torch or Python has no {name}: {lost_feature}"] if name else [])
    assert bool(rank["count"]) == ("not counted" not in lost_feature)
    lost = [what for what in usual["noted"] if what.startswith("broadcast by DDP")] if name == "_broadcast_coalesced" else []
    assert lost or name != "_broadcast_coalesced"
    assert rank["noted"] == [what for what in usual["noted"] if what not in lost]


@pytest.mark.stress
def test_a_rank_without_a_private_name_runs_its_script_and_leaves_its_error(tmp_path: Path) -> None:
    [ended] = on_ranks(1, ranks_ended, tmp_path, STARTS, timeout_s=120.0)
    *missing, destroyed, interrupted, interrupted_without = ended
    for name, rank in zip((NONE, *private_names.NAMES), missing, strict=True):
        check(rank, ended[0], name)
    assert (destroyed["status"], destroyed["made a group"]) == (1, 1)
    assert said(destroyed) == []  # only rank 0 does it
    for rank in (interrupted, interrupted_without):
        assert rank["status"] == -signal.SIGINT
        assert rank["log"].count("Traceback") == rank["log"].count("at exit") == 1


def test_every_name_that_is_looked_up_is_in_the_list() -> None:
    tree = ast.parse(Path(private_names.__file__).read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert {text for text in texts if re.fullmatch(r"_[A-Za-z]\w+", text)} == set(private_names.NAMES)
