#!/bin/sh
cd /home/me || exit 2
exec mpirun -np 2 -ppn 1 -hosts node1,node2 @PYTHON@ -m rankwise.agent /home/me/runs/train </dev/null
