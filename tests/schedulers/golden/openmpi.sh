#!/bin/bash -p
cd /home/me || exit 2
exec mpirun -np 2 --map-by ppr:1:node --bind-to none -H node1,node2 \
  ${PYTHONPATH:+-x PYTHONPATH} ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
  /bin/bash -p -c '[ -x "$1" ] || { echo "rankwise: $(uname -n) has no Python $1; install rankwise where all nodes see it" >&2; exit 2; }; exec "$@"' bash \
  @PYTHON@ -P -m rankwise.agent /home/me/runs/train </dev/null
