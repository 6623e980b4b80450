"""What another launcher's manual has left in a script."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rankwise.launch.pitfalls import pitfalls

SPAWNS = """
import torch.multiprocessing as mp
def train(rank, world_size): ...
if __name__ == "__main__":
    mp.spawn(train, args=(4,), nprocs=4)
"""
PROCID = "import os\nlocal_rank = int(os.environ['SLURM_PROCID'])\nprint(os.environ['SLURM_PROCID'])\n"
ARGUMENT = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--local_rank', type=int)\n"


def found(source: str) -> list[str]:
    return pitfalls(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        SPAWNS,
        SPAWNS.replace("mp.spawn", "torch.multiprocessing.spawn"),
        SPAWNS.replace("import torch.multiprocessing as mp", "from torch.multiprocessing import spawn as s")
        .replace("mp.spawn", "s"),
        SPAWNS + "import rankwise\n",
    ],
)  # fmt: skip
def test_a_script_that_starts_processes_itself_is_told_with_its_line(source: str) -> None:
    (text,) = found(source)
    assert text.startswith(
        "line 5 starts processes itself (torch.multiprocessing.spawn), and each rank does so again: type python"
    )


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK"]
)
def test_a_rank_that_is_read_from_another_starters_variable_is_told_with_its_first_line(name: str) -> None:
    (text,) = found(PROCID.replace("SLURM_PROCID", name))
    assert text == f"line 2 takes a rank from {name}: here it is in RANK, and in LOCAL_RANK which of its node's it is"


def test_a_local_rank_that_is_an_argument_is_told_with_what_to_read() -> None:
    (text,) = found(ARGUMENT)
    assert text == 'line 3 takes --local_rank, which nobody gives here: read int(os.environ["LOCAL_RANK"])'


@pytest.mark.parametrize("source", [PROCID + ARGUMENT, ARGUMENT, SPAWNS + PROCID])
def test_a_script_that_also_reads_torchruns_variables_knows_what_it_does(source: str) -> None:
    assert found(source + "rank = os.environ.get('LOCAL_RANK')\n") == []


@pytest.mark.parametrize("source", [PROCID, ARGUMENT])
def test_a_script_that_asks_rankwise_needs_none_of_them(source: str) -> None:
    assert found(source + "from rankwise import init\n") == []


@pytest.mark.parametrize("source", ["", "import multiprocessing\nmultiprocessing.get_context('spawn')", "spawn()", "x.spawn()"])
def test_what_only_looks_alike_is_passed_over(source: str) -> None:
    assert found(source) == []


def test_the_launcher_says_it_before_the_ranks_start(rankwise) -> None:
    Path("train.py").write_text(PROCID)
    done = rankwise("run", "--nproc", "2", "train.py")
    assert done.returncode == 1
    warning, headline = [line for line in done.stderr.splitlines() if line.startswith("rankwise: ")][:2]
    assert warning.startswith("rankwise: warning: train.py, line 2 takes a rank from SLURM_PROCID")
    assert headline.startswith("rankwise: train.py on 2 ranks")


def test_one_rank_is_told_nothing(rankwise) -> None:
    Path("train.py").write_text(ARGUMENT)
    done = rankwise("run", "--nproc", "1", "train.py")
    assert done.returncode == 0
    assert "warning" not in done.stderr
