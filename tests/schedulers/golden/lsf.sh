#!/bin/bash
#BSUB -J train
#BSUB -n 64
#BSUB -R "span[ptile=32] rusage[mem=64gb]"
#BSUB -gpu "num=4:gmodel=a100"
#BSUB -W 10:00
#BSUB -q gpu
#BSUB -P phd
#BSUB -Q "75"
#BSUB -x
#BSUB -o /dev/null

exec >>/home/me/runs/train/logs/job-"$LSB_JOBID".log 2>&1
module load cuda
cd /home/me || { echo "rankwise: $(uname -n) does not see the script's folder; use one on a file system that all nodes share" >&2; exit 2; }
[ -z "$1" ] || exec /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent /home/me/runs/train --node "$1"
node=0
for host in $(echo $LSB_MCPU_HOSTS | awk '{ for (i = 3; i <= NF; i += 2) print $i }'); do
  node=$((node + 1))
  blaunch "$host" /bin/bash /home/me/runs/train/job.sh "$node" &
done
exec /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent /home/me/runs/train
