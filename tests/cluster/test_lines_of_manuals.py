"""The lines of manuals that need several machines or a scheduler, unchanged, with one of our examples as their script."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from clusters import PYTHON, ROOT, Ended, Start, hosts, openmpi, sge, slurm

__all__ = ["hosts", "openmpi", "sge", "slurm"]  # fixtures

pytestmark = pytest.mark.cluster

DEADLINE_S = 100.0
FOUR = [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
"""(rank, local rank), as in SpeechBrain's manual."""

# SpeechBrain's two scripts, without the GPUs and conda's environment, which do not exist here, and with 2 ranks per node.
SBATCH = """
#SBATCH --nodes=2 # We want two nodes (servers)
#SBATCH --ntasks-per-node=1 # we will run once the next srun per node
#SBATCH --job-name=SBisSOcool
#SBATCH --cpus-per-task=10 # the only task will request 10 cores
#SBATCH --time=20:00:00 # Everything will run for 20H.

# We jump into the submission dir
cd ${SLURM_SUBMIT_DIR}

# And we call the srun that will run --ntasks-per-node times (once here) per node
"""
SRUN = """#!/bin/bash

# We jump into the submission dir
cd ${SLURM_SUBMIT_DIR}

# We extract the master node address (the one that every node must connects to)
LISTNODES=`scontrol show hostname $SLURM_JOB_NODELIST`
MASTER=`echo $LISTNODES | cut -d" " -f1`

python -m torch.distributed.launch --nproc_per_node=2 --nnodes=${SLURM_JOB_NUM_NODES} --node_rank=${SLURM_NODEID} \
--master_addr=${MASTER} --master_port=5555 train.py hparams/myrecipe.yaml
"""
OURS = {"PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(autouse=True)
def _example() -> None:
    for name in ("experiment.py", "train.py", "main.py"):
        shutil.copy(ROOT / "examples" / "05_ranks.py", name)


def typed(start: Start, line: str) -> Ended:
    return start(*shlex.split(line), **OURS)


def run_by_sbatch(slurm: Start, script: str) -> str:
    """What the job printed. `sbatch --wait` checks for its end at growing intervals."""
    job = typed(slurm, f"sbatch --parsable --output=job.txt {script}").stdout.strip()
    deadline = time.monotonic() + DEADLINE_S
    while slurm("squeue", "-h", "-j", job, "-o", "%T").stdout.strip() not in ("", "COMPLETED", "FAILED"):
        if time.monotonic() > deadline:
            slurm("scancel", job)
            break
        time.sleep(0.3)
    return Path("job.txt").read_text()


def numbers(text: str) -> list[tuple[str, str]]:
    return sorted(re.findall(r"\[rank (\d)\] \w+ rank, local rank (\d)", text))


def logs() -> str:
    return "".join(log.read_text() for log in Path.cwd().rglob("rank-*.log"))


# --- Slurm


def test_an_sbatch_script_without_its_first_line_is_refused_by_slurm_in_these_words(slurm: Start) -> None:
    Path("sbatch.sh").write_text(SBATCH + "srun srun_script.sh\n")
    done = slurm("sbatch", "sbatch.sh")
    assert done.returncode == 1
    assert "This does not look like a batch script" in done.stderr


@pytest.mark.parametrize("line", ["srun srun_script.sh", "srun rankwise run --nproc_per_node=2 train.py hparams/myrecipe.yaml"])
def test_the_two_scripts_of_the_manual_and_the_one_line_in_their_place_are_one_world_without_a_flag(
    slurm: Start, line: str
) -> None:
    Path("sbatch.sh").write_text("#!/bin/bash\n" + SBATCH.lstrip() + line + "\n")
    Path("srun_script.sh").write_text(SRUN)
    Path("srun_script.sh").chmod(0o755)
    text = run_by_sbatch(slurm, "sbatch.sh")
    assert numbers(logs() or text) == FOUR, text
    assert text.count("done: 3.1") == 1


def test_a_task_a_device_gets_its_own_numbers_whatever_the_script_is_told(slurm: Start) -> None:
    """Without GPUs, SLURM_GPUS_ON_NODE does not exist: then the option has no value."""
    done = slurm(
        "salloc", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2", "--time=01:00:00", "sh", "-c",
        "srun python main.py --num_gpus $SLURM_GPUS_ON_NODE --num_nodes $SLURM_NNODES", **OURS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert numbers(done.stdout) == FOUR


def test_srun_refuses_torchruns_option_and_takes_its_own(slurm: Start) -> None:
    refused = slurm("srun", "--nproc_per_node=4", "train.py")
    assert refused.returncode != 0
    assert "unrecognized option '--nproc_per_node=4'" in refused.stderr
    done = slurm("srun", "-N1", "--ntasks-per-node=2", "python", "train.py", **OURS)
    assert numbers(done.stdout) == FOUR[:2], done.stderr


def test_the_small_script_of_the_article_and_our_line_for_it_run_on_the_node_they_name(slurm: Start) -> None:
    Path("script.sh").write_text(
        '#!/bin/bash\n#SBATCH -w "node2"\n#SBATCH -p main\n#SBATCH --mem=100MB\nsrun python train.py\n'
    )
    text = run_by_sbatch(slurm, "script.sh")
    assert text.count("done: 3.1") == 1, text
    line = "rankwise run --on slurm --wait --nproc 2 -w node2 -p main --mem 100MB train.py"
    ours = typed(slurm, line)
    assert ours.returncode == 0, ours.stderr
    assert numbers(logs()) == FOUR[:2]


def test_the_articles_options_for_slurm_are_answered_with_a_line_that_slurm_takes(slurm: Start) -> None:
    said = typed(slurm, "rankwise run -slurm -slurm_nnodes 2 -slurm_ngpus 8 -slurm_partition general train.py").stderr
    line = said.rstrip().rpartition("type: ")[2]
    assert line == "rankwise run --on slurm --nodes 2 --gpus-per-node 8 --partition general train.py"
    refused = typed(slurm, line)
    assert refused.returncode == 2
    assert "partition" in refused.stderr  # there is no partition with this name


# --- Grid Engine


def test_the_manuals_resources_are_asked_for_as_they_stand_and_what_is_not_there_is_said_at_once(sge: Start) -> None:
    line = ["-l", "h_vmem=15G", "-l", "h_rt=10:00:00", "-l", "gpu=1", "-l", "qname=*1080*|*TITAN*", "-l", "num_proc=8"]
    refused = sge("rankwise", "run", "--on", "sge", *line, "--pe", "mpi", "--slots", "8", "train.py", **environment())
    assert refused.returncode == 2
    assert "no queue can ever run it" in refused.stderr
    words = ["--on", "sge", "--wait", "-l", "h_rt=10:00:00", "-l", "gpu=1", "-l", "qname=*main*|*TITAN*"]
    done = sge("rankwise", "run", *words, "--pe", "mpi", "--slots", "4", "--name", "there", "train.py", **environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert [rank for rank, _ in numbers(logs())] == ["0", "1", "2", "3"]


def environment() -> dict[str, str]:
    return {**OURS, **{name: value for name, value in os.environ.items() if name.startswith("SGE_")}}


# --- machines reached directly


@pytest.mark.parametrize("launcher", ["python -m torch.distributed.launch", "rankwise run"])
def test_the_two_lines_of_two_machines_number_the_ranks_as_the_manual_says(hosts: Start, launcher: str) -> None:
    line = (
        f"cd {Path.cwd()} && export PATH={OURS['PATH']} PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 && {launcher} "
        "--nproc_per_node=2 --nnodes=2 --node_rank={rank} --master_addr node1 --master_port 5555 "
        "experiment.py hyperparams.yaml --distributed_launch"
    )
    second = subprocess.Popen(
        ["ssh", "node2", line.format(rank=1)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        first: Ended = hosts("ssh", "node1", line.format(rank=0))
        other = second.communicate(timeout=100)[0]
    finally:
        second.kill()
        second.wait()
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + first.stderr + other
    assert numbers(logs() or first.stdout + other) == FOUR
    assert (first.stdout + other).count("done: 3.1") == 1


# --- Open MPI


def test_the_line_that_shows_who_is_who_shows_eight_ranks(openmpi: Start) -> None:
    done = typed(openmpi, "-np 8 -mca pml ob1 -mca btl ^openib rankwise explain")
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"^rank (\d) of 8", done.stdout, re.MULTILINE)) == [*"01234567"]
