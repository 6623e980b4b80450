#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --chdir=/home/u/runs/train
#SBATCH --output=logs/job-%j.log
#SBATCH --open-mode=append

cd /home/u || exit 2
exec srun --export=ALL --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 \
  @PYTHON@ -m rankwise.agent /home/u/runs/train
