#!/bin/bash
#PBS -N train
#PBS -l select=1:ncpus=1:mpiprocs=1
#PBS -j oe
#PBS -o /dev/null
#PBS -r n

exec >>/home/me/runs/train/logs/job-"$PBS_JOBID".log 2>&1
cd /home/me || { echo "rankwise: $(uname -n) does not see the script's folder; use one on a file system that all nodes share" >&2; exit 2; }
exec /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent /home/me/runs/train
