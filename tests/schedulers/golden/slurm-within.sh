#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --chdir=/home/u/100%
#SBATCH --output=/dev/null
#SBATCH --open-mode=append

cd /home/u || exit 2
exec srun --export=ALL --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
  @PYTHON@ -m rankwise.agent /home/u/100%
