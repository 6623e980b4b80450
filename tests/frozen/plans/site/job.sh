#!/bin/bash
#SBATCH --job-name=site
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --gres=gpu:a100:4
#SBATCH --partition=gpu
#SBATCH --time=60
#SBATCH --account=speech
#SBATCH --requeue
#SBATCH --signal=USR1@90
#SBATCH --chdir=@FOLDER@/runs/site
#SBATCH --output=logs/job-%j.log
#SBATCH --open-mode=append
#SBATCH --no-kill
#SBATCH --exclusive

module load cuda
export NCCL_DEBUG=WARN
cd @FOLDER@ || { echo "rankwise: $(uname -n) does not see the script's folder; use one on a file system that all nodes share" >&2; exit 2; }
srun --export=ALL --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=2 --kill-on-bad-exit=0 --no-kill \
  /bin/sh -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' sh \
  @PYTHON@ -m rankwise.agent @FOLDER@/runs/site
status=$?
# 75: stopped and saved, to go on. Slurm ends this script as soon as it is asked.
[ "$status" = 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$status"
