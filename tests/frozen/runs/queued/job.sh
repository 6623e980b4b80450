#!/bin/bash
#SBATCH --job-name=queued
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --partition=gpu
#SBATCH --time=30
#SBATCH --chdir=@FOLDER@/runs/queued
#SBATCH --output=logs/job-%j.log
#SBATCH --open-mode=append

cd @FOLDER@ || { echo "rankwise: $(uname -n) does not see the script's folder; use one on a file system that all nodes share" >&2; exit 2; }
exec srun --export=ALL --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1 --kill-on-bad-exit=1 \
  /bin/sh -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' sh \
  @PYTHON@ -m rankwise.agent @FOLDER@/runs/queued
