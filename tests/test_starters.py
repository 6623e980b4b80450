"""The same script with everything in Python that starts ranks: spawn, torch's old launcher, torchrun.

Each rank imports torch: tests with more than three ranks are in the stress tier.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launched import FORKED

ROOT = Path(__file__).parents[1]

SPAWN = """
import os, sys, rankwise, torch, torch.multiprocessing as mp

def train(rank, world_size):
    world = rankwise.init(rank=rank, world_size=world_size)
    total = rankwise.all_reduce(torch.tensor(1.0 + world.rank)).item()
    print(world.rank, world.world_size, world.local_rank, world.local_world_size, world.source, total, flush=True)

if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200)


@pytest.mark.stress
def test_what_spawn_starts_joins_by_the_numbers_it_is_given() -> None:
    Path("train.py").write_text(SPAWN)
    done = run("train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 0 2 arguments 3.0", "1 2 1 2 arguments 3.0"]
    assert [path.name for path in Path.cwd().iterdir()] == ["train.py"]


@pytest.mark.stress
def test_what_spawn_starts_below_each_rank_of_a_launcher_is_an_error_of_both() -> None:
    Path("train.py").write_text(SPAWN)
    done = run("-m", "rankwise", "run", *FORKED, "train.py")
    assert done.returncode == 1
    assert "called torch.multiprocessing.spawn: " in done.stdout + done.stderr
    assert "each of these ranks would start its own ranks" in done.stdout + done.stderr
    assert not [
        line for log in Path("runs/train/logs").iterdir() for line in log.read_text().splitlines() if " arguments " in line
    ]


@pytest.mark.stress
def test_two_processes_of_one_rank_at_a_given_address_are_told_what_a_rank_is_over_several_nodes() -> None:
    """The `rank = node_rank + gpu` of a manual."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = (
        "import sys, rankwise\nnode, gpu = int(sys.argv[1]), int(sys.argv[2])\n"
        f"rankwise.init(rank=node + gpu, world_size=4, local_rank=gpu, local_world_size=2, rdzv='127.0.0.1:{port}')"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", source, node, gpu], stderr=subprocess.PIPE, text=True)
        for node in "01"
        for gpu in "01"
    ]
    said = [process.communicate(timeout=100)[1] for process in started]
    assert all(
        "two processes are rank 1 of 4 (arguments): on several nodes, rank = node_rank * ranks" in text for text in said
    ), said


def test_numbers_by_hand_that_nothing_joins_are_an_error_that_asks_for_an_address() -> None:
    done = run("-c", "import rankwise; rankwise.init(rank=1, world_size=2, local_rank=1, local_world_size=2)")
    assert done.returncode != 0
    assert "rank 1 of 2 (arguments): the launcher sets no id for this start of the script" in done.stderr
    assert 'rankwise.init(rdzv="HOST:PORT")' in done.stderr


@pytest.mark.parametrize("rdzv", ["29500", "node1", "node1:x", ":29500", "node1:0", "node1:70000"])
def test_an_address_that_is_none_is_refused_before_anybody_waits(rdzv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import rankwise
    from rankwise.dist import comm

    monkeypatch.setattr(comm, "_world", None)
    with pytest.raises(rankwise.RankwiseError, match=r"give HOST:PORT, .* for example node1:29500"):
        rankwise.init(rank=1, world_size=2, local_rank=1, local_world_size=2, rdzv=rdzv)


@pytest.mark.stress
def test_under_torchs_old_launcher_the_trainer_example_trains_whatever_arguments_it_adds() -> None:
    launcher = ("-m", "torch.distributed.launch", "--nproc_per_node=2", "--standalone")
    done = run("-W", "ignore", *launcher, str(ROOT / "examples" / "03_trainer_digits.py"))
    assert done.returncode == 0, done.stderr
    assert "global batch 64 = 32 x 2 ranks" in done.stdout
    assert done.stdout.count("done: 480 steps") == 1
