#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --array=0-7%2
#SBATCH --chdir=/home/u/runs
#SBATCH --output=train-%a/logs/job-%A_%a.log
#SBATCH --open-mode=append

cd /home/u || { echo "rankwise: $(uname -n) lacks that folder; the script runs there: every node needs it under this path, on a file system that they share, or as a copy" >&2; exit 2; }
exec srun --export=ALL --nodes=1 --ntasks=1 --ntasks-per-node=1 --kill-on-bad-exit=1 \
  /bin/sh -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1: every node needs it under this path; install rankwise on a file system that all nodes share, and start that one" >&2; exit 2; }; exec "$@"' sh @PYTHON@ -m rankwise.agent /home/u/runs/train-"$SLURM_ARRAY_TASK_ID"
