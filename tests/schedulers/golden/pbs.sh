#!/bin/bash
#PBS -N train
#PBS -l select=2:ncpus=32:ngpus=4:mem=64gb:mpiprocs=1
#PBS -l place=scatter
#PBS -l walltime=10:00:00
#PBS -q gpu
#PBS -A phd
#PBS -m abe
#PBS -j oe
#PBS -o /dev/null
#PBS -r n

exec >>/home/me/runs/train/logs/job-"$PBS_JOBID".log 2>&1
module load cuda
cd /home/me || { echo "rankwise: $(uname -n) does not see the script's folder; use one on a file system that all nodes share" >&2; exit 2; }
[ -z "$1" ] || exec /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent /home/me/runs/train --node "$1"
node=0
for host in $(seq 1); do
  node=$((node + 1))
  pbsdsh -n "$node" -- /bin/bash /home/me/runs/train/job.sh "$node" &
done
exec /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent /home/me/runs/train
