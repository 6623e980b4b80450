#!/bin/bash -p
cd '/home/a b/$(touch x);it'"'"'s "here"' || exit 2
exec mpirun -np 2 -ppn 1 /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent '/home/a b/$(touch x);it'"'"'s "here"/runs/`touch y` & *' </dev/null
