#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=20:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@150
#SBATCH --chdir=/home/u/runs/train
#SBATCH --output=logs/job-%j.log
#SBATCH --open-mode=append

cd /home/u || { echo "rankwise: $(uname -n) does not see the script's folder; use one on a file system that all nodes share" >&2; exit 2; }
srun --export=ALL --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 \
  /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent /home/u/runs/train
status=$?
# 75: stopped and saved. Slurm kills this script as soon as it gets the request, so this comes last.
[ "$status" = 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$status"
