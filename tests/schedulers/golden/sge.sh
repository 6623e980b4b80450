#!/bin/bash
#$ -S /bin/bash
#$ -cwd
#$ -o logs/job-$JOB_ID.log
#$ -j y
#$ -N train
#$ -v PATH
#$ -w e
#$ -r y
#$ -notify
#$ -pe mpi 8
#$ -l h_rt=10:00:00,gpu=1
#$ -l h_vmem=15G
#$ -q gpu.q
#$ -A speech

module load cuda
cd /home/me || { echo "rankwise: $(uname -n) does not see the script's folder; use one on a file system that all nodes share" >&2; exit 2; }
exec /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent /home/me/runs/train
