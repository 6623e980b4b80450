"""Command lines of five popular manuals, unchanged, with one of our examples instead of their script.

tests/cluster/test_lines_of_manuals.py has those that need several machines or a scheduler, test_under_mpirun.py RETURNN's.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from environments import SLURM_STEP

from rankwise.dist.world import discover
from rankwise.launch.foreign_options import translated

EXAMPLES = Path(__file__).parents[1] / "examples"
LAUNCH = "python -m torch.distributed.launch"

ONE_MACHINE = {
    # SpeechBrain; the backend is gloo here
    f"{LAUNCH} --nproc_per_node=4 experiment.py hyperparams.yaml --distributed_launch": 4,
    f"{LAUNCH} --nproc_per_node=4 experiment.py hyperparams.yaml --distributed_launch --distributed_backend='gloo'": 4,
    "python experiment.py params.yaml --data_parallel_backend": 1,
    # a PyTorch guide
    f"{LAUNCH} --nproc_per_node=4 train.py --local_rank 0": 4,
    "torchrun --nproc_per_node=4 train.py": 4,
    # Template
    "python train.py -gpus 0": 1,
    "python train.py -gpus 0,1,2": 1,
    "python train.py -slurm -slurm_nnodes 2 -slurm_ngpus 8 -slurm_partition general": 1,
    # what a user of these may type next
    f"{LAUNCH} --use_env --nproc_per_node=2 train.py": 2,
    "rankwise run --nproc_per_node=4 experiment.py hyperparams.yaml --distributed_launch": 4,
    "rankwise run --nproc_per_node=2 --nnodes=1 --node_rank=0 --master_addr localhost --master_port {port} train.py": 2,
}
"""The line, and the number of ranks that it must start together."""


def in_shell(line: str) -> subprocess.CompletedProcess[str]:
    """`python`, `torchrun` and `rankwise` are those of this Python."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(line, shell=True, env=env, capture_output=True, text=True, timeout=200)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def said(text: str) -> list[str]:
    """The lines of 05_ranks.py: `[rank 0] main rank, local rank 0 of 2`; a single rank prints no rank."""
    return sorted(re.findall(r"local rank \d+ of \d+", text))


@pytest.fixture(autouse=True)
def _example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # ranks that need torch are forked
    for name in ("experiment.py", "train.py"):
        shutil.copy(EXAMPLES / "05_ranks.py", name)


def _marks(line: str) -> list[pytest.MarkDecorator]:
    """Lines of another launcher start only that launcher: tests/schedulers/test_torchrun.py has the variables that it sets.

    Of those that differ only in what the example ignores, the small dose has one.
    """
    if line == "python train.py -gpus 0" or "nproc_per_node=2 --nnodes" in line:
        return []
    of_their_script = ("--distributed_backend=", "--local_rank 0", "--data_parallel_backend", "-gpus 0,1,2", "-slurm")
    return [pytest.mark.stress(dose="whole") if any(word in line for word in of_their_script) else pytest.mark.stress]


@pytest.mark.parametrize("line", [pytest.param(line, marks=_marks(line)) for line in ONE_MACHINE])
def test_the_line_as_it_stands_is_one_world_of_so_many_ranks(line: str) -> None:
    ranks = ONE_MACHINE[line]
    done = in_shell(line.format(port=free_port()))
    assert done.returncode == 0, done.stderr
    logs = "".join(log.read_text() for log in Path.cwd().glob("runs/*/logs/rank-*.log"))
    assert said(logs or done.stdout) == [f"local rank {rank} of {ranks}" for rank in range(ranks)]
    assert done.stdout.count("done: 3.1") == 1


@pytest.mark.stress
@pytest.mark.parametrize("launcher", [LAUNCH, "rankwise run"])
def test_the_two_lines_of_two_machines_number_the_ranks_as_the_manual_says(launcher: str) -> None:
    """Both on this machine, in a folder each."""
    for rank in "01":
        Path(rank).mkdir()
        shutil.copy("experiment.py", rank)
    line = (
        "cd {rank} && " + launcher + " --nproc_per_node=2 --nnodes=2 --node_rank={rank} --master_addr localhost "
        f"--master_port {free_port()} experiment.py hyperparams.yaml --distributed_launch"
    )  # fmt: skip
    both = in_shell(f"({line.format(rank=1)}) >one.txt 2>&1 & {line.format(rank=0)}; status=$?; wait $! && exit $status")
    text = both.stdout + Path("one.txt").read_text()
    assert both.returncode == 0, both.stderr + text
    logs = "".join(log.read_text() for log in Path.cwd().rglob("rank-*.log"))
    numbers = re.findall(r"\[rank (\d)\] \w+ rank, local rank (\d)", logs or text)
    # Our agents know that they are on the same host.
    assert sorted(numbers) == [*zip("0123", "0123" if logs else "0101", strict=True)]
    assert text.count("done: 3.1") == 1


# --- mistakes in the manuals


def test_slurms_procid_is_the_rank_and_never_the_local_rank() -> None:
    world = discover(SLURM_STEP[2])
    assert (world.rank, world.local_rank, world.node_rank) == (2, 0, 1)


def test_an_option_of_torchrun_given_to_srun_is_answered_when_it_is_typed_for_us() -> None:
    done = in_shell("rankwise run srun --nproc_per_node=4 train.py")
    assert (done.returncode, done.stderr) == (
        2,
        "rankwise: srun: part of a command for another launcher; type: rankwise run --nproc_per_node=4 train.py\n",
    )


def test_a_master_port_that_is_taken_is_refused_with_the_port_and_none_is_needed() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = in_shell(f"rankwise run --nproc_per_node=2 --master_port={port} train.py")
        assert done.returncode == 2, done.stdout + done.stderr
        assert str(port) in done.stderr
        assert in_shell("rankwise run --nproc_per_node=2 train.py").returncode == 0


def test_a_script_with_the_manuals_spawn_is_told_what_to_do_before_it_starts() -> None:
    Path("train.py").write_text(
        "import torch.multiprocessing as mp\ndef train(rank, world_size):\n    pass\n"
        "if __name__ == '__main__':\n    mp.spawn(train, args=(2,), nprocs=2)\n"
    )
    done = in_shell("rankwise run --nproc_per_node=2 --dry-run train.py")
    assert done.returncode == 0
    assert done.stderr.startswith("rankwise: warning: train.py, line 5 starts processes itself")


def test_the_options_of_qsub_as_the_manual_has_them_become_ours() -> None:
    line = "-hard -l h_vmem=15G -l h_rt=10:00:00 -l gpu=1 -l qname='*1080*|*TITAN*' -l num_proc=8 -pe mpi 8"
    found = translated([*shlex.split(line), "train.py"], {"-l": True})
    assert found is not None
    typed = shlex.join(found.words)
    done = in_shell(f"rankwise run --on sge --dry-run {typed}")
    assert done.returncode == 0, done.stderr
    assert "#$ -pe mpi 8\n" in done.stdout
    for resource in ("h_vmem=15G", "h_rt=10:00:00", "gpu=1", "qname=*1080*|*TITAN*", "num_proc=8"):
        assert resource in done.stdout


@pytest.mark.stress
def test_a_line_that_names_gpus_which_torch_cannot_use_is_an_error_with_the_reason_and_no_training_on_the_cpu() -> None:
    done = in_shell("CUDA_VISIBLE_DEVICES=101,105 python experiment.py params.yaml --data_parallel_backend")
    assert done.returncode == 1
    assert "error: CUDA_VISIBLE_DEVICES=101,105 names 2 GPUs, but torch" in done.stderr, done.stderr
    assert "put CUDA_VISIBLE_DEVICES= before the command" in done.stderr


def test_gpus_that_are_not_there_are_an_error_and_no_training_of_nothing() -> None:
    done = in_shell("CUDA_VISIBLE_DEVICES= rankwise run --gpus 0,1,2 train.py")
    assert done.returncode == 2
    assert done.stderr.startswith("rankwise: --gpus 0,1,2: ")
