#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --array=0-7%2
#SBATCH --chdir=/home/u/runs
#SBATCH --output=/dev/null
#SBATCH --open-mode=append

exec >>/home/u/runs/100%-"$SLURM_ARRAY_TASK_ID"/logs/job-"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID".log 2>&1
cd /home/u || { echo "rankwise: $(uname -n) does not see the script's folder; use one on a file system that all nodes share" >&2; exit 2; }
exec srun --export=ALL --nodes=1 --ntasks=1 --ntasks-per-node=1 --kill-on-bad-exit=1 \
  /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent /home/u/runs/100%-"$SLURM_ARRAY_TASK_ID"
