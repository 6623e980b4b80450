#!/bin/bash
#$ -S /bin/bash
#$ -cwd
#$ -o logs/job-$JOB_ID.log
#$ -j y
#$ -N run-3-touch-x
#$ -v PATH
#$ -w e
#$ -r n
#$ -notify
#$ -pe "m pi" 4-8
#$ -l 'os="a b"'
#$ -l "x=$(touch x);it's"
#$ -q "*@!(a|b)"

cd '/home/a b/$(touch x);it'"'"'s "here"' || exit 2
exec @PYTHON@ -m rankwise.agent '/home/a b/$(touch x);it'"'"'s "here"/runs/`touch y` & *'
