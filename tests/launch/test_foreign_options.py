"""Command lines of other launchers, typed for this one."""

from __future__ import annotations

import os
import shlex

import pytest

from rankwise.launch.foreign_options import Translated, translated

OURS = {
    "--nproc": True,
    "--nproc_per_node": True,
    "-H": True,
    "-m": False,
    "-p": True,
    "-l": True,
    "--on": True,
    "--nnodes": True,
}
RETURNN = "-bind-to none -map-by slot -x NCCL_DEBUG=INFO -x PATH -mca pml ob1 -mca btl ^openib"


def of(line: str) -> Translated | None:
    return translated(shlex.split(line), OURS)


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("--use_env --nproc_per_node=4 train.py --lr 1", "--nproc_per_node=4 train.py --lr 1"),
        ("--standalone --nproc 2 train.py", "--nproc 2 train.py"),
        ("--local-rank=0 train.py", "train.py"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv_endpoint=a:1 t.py", "--nnodes 2 --master-addr a --master-port 1 t.py"),
        ("--rdzv_endpoint a t.py", "--master-addr a --master-port 29500 t.py"),
        (f"-np 4 {RETURNN} python3 rnn.py config ++use_horovod 1", "--nproc 4 rnn.py config ++use_horovod 1"),
        (f"mpirun -np 4 {RETURNN} python3 rnn.py config", "--nproc 4 rnn.py config"),
        ("-np 4 -H a:2,b:2 python train.py", "-H a:2,b:2 train.py"),
        ("horovodrun -np 4 -H a:2,b:2 python train.py", "-H a:2,b:2 train.py"),
        ("srun --nproc_per_node=4 train.py", "--nproc_per_node=4 train.py"),
        ("--on slurm -N 2 --gres=gpu:4 train.py", "--on slurm --nodes 2 --gpus-per-node 4 train.py"),
        ("--on slurm --ntasks-per-node=4 train.py", "--on slurm --nproc 4 train.py"),
        (
            "--on sge -hard -l gpu=1 -l qname='*80*|*X*' -pe mpi 8 t.py",
            "--on sge -l gpu=1 -l 'qname=*80*|*X*' --pe mpi --slots 8 t.py",
        ),
        ("-slurm -slurm_nnodes 2 -slurm_ngpus 8 t.py", "--on slurm --nodes 2 --gpus-per-node 8 t.py"),
        ("-slurm -slurm_partition general t.py", "--on slurm --partition general t.py"),
        ("-gpus 0,1,2 train.py", "--gpus 0,1,2 train.py"),
        ("--num_processes 2 --main_process_port 1 t.py", "--nproc 2 --master-port 1 t.py"),
        ("accelerate launch --num_processes 2 t.py", "--nproc 2 t.py"),
        ("accelerate launch --num_machines 2 --num_processes=8 t.py", "--nodes 2 --nproc 4 t.py"),
        ("accelerate launch --num_processes 8 --num_machines=2 t.py", "--nproc 4 --nodes 2 t.py"),
        ("--on slurm --nnodes 2 --ntasks 8 t.py", "--on slurm --nnodes 2 --nproc 4 t.py"),
        ("-np 4 t.py --nodes 2 -H a", "--nproc 4 t.py --nodes 2 -H a"),
        ("--on slurm -N 2 --ntasks 7 t.py", "--on slurm --nodes 2 t.py"),
        ("--nnodes=1:2 -np 4 t.py", "--nnodes=1:2 --nproc 4 t.py"),
        ("-m torch.distributed.launch --nproc_per_node=4 --use_env t.py --lr 1", "--nproc_per_node=4 t.py --lr 1"),
        ("python -m torch.distributed.launch --nproc_per_node=4 t.py", "--nproc_per_node=4 t.py"),
        ("torchrun --nproc_per_node=4 t.py", "--nproc_per_node=4 t.py"),
        ("-- torchrun --nproc_per_node=4 t.py", "--nproc_per_node=4 t.py"),
        ("--nproc 2 python t.py", "--nproc 2 t.py"),
        ("python -m package.train", "-m package.train"),
        ("--nproc 2 python -u t.py", "--nproc 2 -- python -u t.py"),
        ("-pgpu -np 2 t.py", "-pgpu --nproc 2 t.py"),
    ],
)  # fmt: skip
def test_a_line_of_another_launcher_is_said_in_our_words(typed: str, instead: str) -> None:
    found = of(typed)
    assert found is not None
    assert shlex.join(found.words) == instead
    assert found.theirs
    assert of(instead) is None


@pytest.mark.parametrize(
    "line",
    [
        "train.py -np 4 --use_env",
        "--nproc 2 train.py python",
        "-- python -u train.py",
        "-- mine -np 4",
        "-m train",
        "-m",
        "-np",
        "--nonsense -np 4 train.py",
        "-p -np train.py",
        "python",
        "",
        "--",
    ],
)
def test_what_is_ours_the_scripts_or_nobodys_is_left_alone(line: str) -> None:
    assert of(line) is None


def test_the_command_refuses_such_a_line_and_starts_nothing(rankwise) -> None:
    done = rankwise("run", "-np", "2", "-x", "PATH", "python", "train.py", "a b")
    assert done.returncode == 2
    assert done.stderr == (
        "rankwise: -np 2, -x PATH, python: part of a command for another launcher; type: "
        "rankwise run --nproc 2 train.py 'a b'\n"
    )
    assert os.listdir() == []


@pytest.mark.parametrize("python", ["python", "python3.12"])
def test_a_python_before_the_script_is_no_other_launcher(rankwise, python: str) -> None:
    done = rankwise("run", "--nproc", "2", python, "train.py", "--lr", "1")
    assert (done.returncode, done.stderr) == (
        2,
        f"rankwise: {python}: rankwise run starts Python itself; type: rankwise run --nproc 2 train.py --lr 1\n",
    )


def test_a_variable_that_mpirun_would_set_for_the_ranks_is_set_in_the_command_to_type(rankwise) -> None:
    done = rankwise("run", "-x", "A=1", "mpirun", "-np", "2", "-x", "B=a b", "-x", "PATH", "train.py")
    assert done.stderr.endswith("; type: A=1 B='a b' rankwise run --nproc 2 train.py\n")


def test_accelerates_precision_is_set_for_the_ranks(rankwise) -> None:
    done = rankwise("run", "accelerate", "launch", "--mixed_precision=bf16", "--num_processes", "2", "train.py")
    assert done.stderr.endswith("; type: ACCELERATE_MIXED_PRECISION=bf16 rankwise run --nproc 2 train.py\n")


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("accelerate launch --num_processes 2 --config_file c.yaml train.py", "--config_file"),
        ("mpirun -np 2 --report-bindings python train.py", "--report-bindings"),
        ("--nproc 2 torchrun --nnodes=2 --foo=3 train.py --bar", "--foo"),
    ],
)
def test_an_option_of_another_launcher_without_a_counterpart_is_named(rankwise, line: str, option: str) -> None:
    done = rankwise("run", *line.split())
    assert done.returncode == 2
    assert f"for another launcher, whose option {option} has no counterpart here; remove this option" in done.stderr


def test_grid_engines_hard_is_not_taken_for_a_request_of_help(rankwise) -> None:
    done = rankwise("run", "--on", "sge", "-hard", "-l", "h_vmem=15G", "-pe", "mpi", "8", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("type: rankwise run --on sge -l h_vmem=15G --pe mpi --slots 8 train.py\n")
