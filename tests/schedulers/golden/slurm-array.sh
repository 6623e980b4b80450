#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --array=0-7%2
#SBATCH --chdir=/home/u/runs
#SBATCH --output=train-%a/logs/job-%A_%a.log
#SBATCH --open-mode=append

cd /home/u || { echo "rankwise: $(uname -n) does not see the script's folder; use one on a file system that all nodes share" >&2; exit 2; }
exec srun --export=ALL --nodes=1 --ntasks=1 --ntasks-per-node=1 --kill-on-bad-exit=1 \
  /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent /home/u/runs/train-"$SLURM_ARRAY_TASK_ID"
