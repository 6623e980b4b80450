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
cd /home/me || exit 2
exec @PYTHON@ -m rankwise.agent /home/me/runs/train
