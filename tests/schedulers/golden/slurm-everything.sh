#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1-2
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=32
#SBATCH --gres=gpu:a100:4
#SBATCH --partition=gpu,long
#SBATCH --time=1-12:00:00
#SBATCH --nodelist=node[1-2]
#SBATCH --mem=64G
#SBATCH --account=phd
#SBATCH --qos=high
#SBATCH --constraint="a100|h100"
#SBATCH --dependency=afterok:12
#SBATCH --chdir=/home/u/runs/train
#SBATCH --output=logs/job-%j.log
#SBATCH --open-mode=append
#SBATCH --no-kill
#SBATCH --exclusive
#SBATCH --comment="a b"
#SBATCH -Lx

module load cuda
source ~/venv/bin/activate
cd /home/u || { echo "rankwise: $(uname -n) does not see the script's folder; use one on a file system that all nodes share" >&2; exit 2; }
nodes=${SLURM_JOB_NUM_NODES:-$SLURM_NNODES}
nodes=$((nodes < 2 ? nodes : 2))
exec srun --export=ALL --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task=32 --kill-on-bad-exit=0 --no-kill \
  /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent /home/u/runs/train
