#!/bin/bash
#SBATCH --job-name=touch-x
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --partition="a b"
#SBATCH --chdir="/home/a b/;$(touch x) %j 'it\\'s' \"here\"/runs/;$(touch x)"
#SBATCH --output=/dev/null
#SBATCH --open-mode=append

exec >>'/home/a b/;$(touch x) %j '"'"'it\'"'"'s'"'"' "here"/runs/;$(touch x)'/logs/job-"$SLURM_JOB_ID".log 2>&1
export A="$(date)"; echo `hostname`
cd '/home/a b/;$(touch x) %j '"'"'it\'"'"'s'"'"' "here"' || { echo "rankwise: $(uname -n) does not see the script's folder; use one on a file system that all nodes share" >&2; exit 2; }
exec srun --export=ALL --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=2 --kill-on-bad-exit=1 \
  /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent '/home/a b/;$(touch x) %j '"'"'it\'"'"'s'"'"' "here"/runs/;$(touch x)'
