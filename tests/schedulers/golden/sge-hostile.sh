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

cd '/home/a b/$(touch x);it'"'"'s "here"' || { echo "rankwise: $(uname -n) does not see the script's folder; use one on a file system that all nodes share" >&2; exit 2; }
exec /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent '/home/a b/$(touch x);it'"'"'s "here"/runs/`touch y` & *'
