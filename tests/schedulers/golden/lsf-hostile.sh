#!/bin/bash
#BSUB -J run-3-touch-x
#BSUB -n 4
#BSUB -R "span[ptile=2]"
#BSUB -o /dev/null

exec >>'/home/a b/$(touch x);it'"'"'s "here"/runs/`touch y` & *'/logs/job-"$LSB_JOBID".log 2>&1
cd '/home/a b/$(touch x);it'"'"'s "here"' || { echo "rankwise: $(uname -n) does not see the script's folder; use one on a file system that all nodes share" >&2; exit 2; }
[ -z "$1" ] || exec /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent '/home/a b/$(touch x);it'"'"'s "here"/runs/`touch y` & *' --node "$1"
node=0
for host in $(echo $LSB_MCPU_HOSTS | awk '{ for (i = 3; i <= NF; i += 2) print $i }'); do
  node=$((node + 1))
  blaunch "$host" /bin/bash '/home/a b/$(touch x);it'"'"'s "here"/runs/`touch y` & *'/job.sh "$node" &
done
exec /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent '/home/a b/$(touch x);it'"'"'s "here"/runs/`touch y` & *'
